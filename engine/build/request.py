"""Arguments of ``initialize``, except the model and the configuration."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from engine.build.forward_changes import ForwardChanges
from engine.config import Config
from engine.optim.lr_schedules import SchedulerArgument
from engine.optim.param_groups import GivenOptimizer, included_frozen
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.world import Lender
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
    """Arguments of ``initialize`` other than model and configuration, and the patches already made to the model."""

    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerArgument | None = None
    example_batch: Batch = None
    given: GivenOptimizer | None = None
    """Optimizer that the script passed, rebuilt by ``optimizer``; None if it passed a callable or nothing."""
    whole: OwnWholeRule | None = None
    """Rule of the script's optimizer if it updates whole matrices; ``optimizer`` wraps it."""
    included: tuple[str, ...] = ()
    """Names of frozen parameters that are planned as trained, because the script may thaw them."""
    rows: BatchRows = field(default_factory=BatchRows)
    inputs: ForwardInputs = field(default_factory=ForwardInputs)
    metrics: tuple[str, ...] = ()
    """Names of the metrics that ``loss_fn`` returns."""
    weighs_rows: bool = False
    """True if the mean loss of a microbatch weighs as its rows (``uneven_microbatches``)."""
    gather: RowGather = field(default_factory=RowGather)
    """All-gather of rows over dp, for ``loss_fn`` and the user's own loop."""
    changes: ForwardChanges = field(default_factory=ForwardChanges)
    """Patches of module forwards that were made before planning."""
    patches: ForwardPatches = field(default_factory=ForwardPatches)
    """All patches of the model, which ``close`` removes."""
    lender: Lender | None = None
    """Engine that lends groups and frozen parameters; None: the engine has its own."""
    placing: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which parameters are placed; a dry run gives them shapes without memory."""

    def completed(self, model: nn.Module, config: Config) -> "Request":
        """Returns a copy with the parts that ``config`` determines, such as metrics and the gather of rows.

        Raises:
            ConfigError: a pattern of ``optimizer.include_frozen`` matches no frozen parameter of ``model``.
        """
        uneven = config.uneven_microbatches
        return replace(
            self,
            included=included_frozen(model, config.optimizer),
            metrics=config.monitor.metrics,
            gather=RowGather(config.row_ranks, uneven),
            weighs_rows=uneven,
        )

    def program(
        self, model: nn.Module, precision: Precision, device: torch.device, comm: Comm | None = None
    ) -> Program:
        """Returns ``model`` and ``loss_fn`` as one function from a microbatch to a loss, in the dtypes of
        ``precision``.

        Args:
            comm: communication by which ``loss_fn`` can gather rows of tensors over the data ranks. None: a gather only
                repeats this rank's rows, for planning.
        """
        if comm is not None:
            self.gather.open(comm)
        loss_fn = self.gather.given_to(self.loss_fn)
        return Program(
            model, loss_fn, precision, device, self.rows, self.inputs, self.metrics, self.gather,
            weighs_rows=self.weighs_rows,
        )  # fmt: skip
