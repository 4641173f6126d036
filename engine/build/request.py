"""What the user gave ``initialize`` beside the model and the configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from engine.build.forward_changes import Forwards
from engine.optim.lr_schedules import SchedulerArgument
from engine.program.batch import Batch
from engine.program.loss import LossFunction
from engine.zero.optim.sharded_optimizer import OptimizerFactory

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, beside the model and the configuration."""

    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerArgument | None = None
    example_batch: Batch = None
    forwards: Forwards = field(default_factory=Forwards)
    """What has been put on the model."""
