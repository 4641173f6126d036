"""Arguments of ``initialize`` beside the model and the configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from engine.build.forward_changes import ForwardChanges
from engine.optim.given_optimizer import GivenOptimizer
from engine.optim.lr_schedules import SchedulerArgument
from engine.parallel.model.forward_patch import ForwardPatches
from engine.program.batch import Batch
from engine.program.loss import LossFunction
from engine.zero.optim.sharded_optimizer import OptimizerFactory

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of ``initialize``, and the changes already made to the model."""

    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerArgument | None = None
    example_batch: Batch = None
    given: GivenOptimizer | None = None
    """The user's optimizer that ``optimizer`` builds anew; None if the user gave a callable or nothing."""
    changes: ForwardChanges = field(default_factory=ForwardChanges)
    """Changes of the model's forwards that were made before planning."""
    patches: ForwardPatches = field(default_factory=ForwardPatches)
    """Owns every patch of the model."""
