"""Arguments of ``initialize``, except the model and the configuration."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from engine.build.forward_changes import ForwardChanges
from engine.optim.lr_schedules import SchedulerArgument
from engine.optim.param_groups import GivenOptimizer
from engine.parallel.comm.comm import Comm
from engine.parallel.model.forward_patch import ForwardPatches
from engine.precision.dtypes import Precision
from engine.program.batch import Batch
from engine.program.batch_rows import BatchRows
from engine.program.forward_inputs import ForwardInputs
from engine.program.loss import LossFunction, RowGather
from engine.program.program import Program
from engine.zero.optim.inner_optimizer import OptimizerFactory
from engine.zero.optim.matrix.own_whole import OwnWholeRule

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
    whole: OwnWholeRule | None = None
    """The user's optimizer, if it updates parameters as a whole, which ``optimizer`` then wraps."""
    included: tuple[str, ...] = ()
    """Names of the frozen parameters that are planned as trained ones, since the user may thaw them."""
    rows: BatchRows = field(default_factory=BatchRows)
    inputs: ForwardInputs = field(default_factory=ForwardInputs)
    metrics: tuple[str, ...] = ()
    """Names of the further values that ``loss_fn`` returns."""
    gather: RowGather = field(default_factory=RowGather)
    """Gathers rows of all data ranks, in ``loss_fn`` and in a loop of the user's own."""
    changes: ForwardChanges = field(default_factory=ForwardChanges)
    """Changes of the model's forwards that were made before planning."""
    patches: ForwardPatches = field(default_factory=ForwardPatches)
    """Owns every patch of the model."""
    placing: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which parameters are placed; that of a rehearsal gives them shapes alone."""

    def program(
        self, model: nn.Module, precision: Precision, device: torch.device, comm: Comm | None = None
    ) -> Program:
        """Returns model and loss as one function of a microbatch, which communicates over ``comm`` if one is passed."""
        if comm is not None:
            self.gather.open(comm)
        loss_fn = self.gather.given_to(self.loss_fn)
        return Program(model, loss_fn, precision, device, self.rows, self.inputs, self.metrics, self.gather)
