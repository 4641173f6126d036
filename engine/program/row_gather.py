"""Rows of all data ranks in a loss that compares them (CLIP, SigLIP), with exact gradients.

    forward    rows [b, ...] of each data rank -> [N*b, ...] on all of them           all-gather over dp
    backward   every rank's gradient of all rows -> the sum for the own rows [b, ...]  reduce-scatter over dp

The engine's gradient is that of the mean of all ranks' losses (of sum over weight, if a loss is a pair). A row's share
in the losses of other ranks comes back through the sum, so nothing is left out and nothing counts twice, also where
each rank computes the loss of the whole batch.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.program.loss import LossFunction

LABEL = "gathered rows"
_ARGUMENT = "gather_rows"


class RowGather:
    """Gathers rows over the ``ranks`` of axis dp; a plan, before ``open``, is made of shapes alone."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.comm: Comm | None = None

    def open(self, comm: Comm) -> None:
        """Communicate from now on."""
        self.comm = comm

    def __call__(self, rows: Tensor) -> Tensor:
        """See :meth:`engine.Engine.gather_rows`."""
        if not isinstance(rows, Tensor) or not rows.ndim:
            given = "a 0-dim tensor" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise EngineError(
                f"gather_rows was given {given}; give a tensor whose first dim are the rows of this rank."
            )
        gathered: Tensor = rows if self.ranks == 1 else _GatherRows.apply(rows, self)  # type: ignore[no-untyped-call]
        return gathered

    def given_to(self, loss_fn: LossFunction | None) -> LossFunction | None:
        """``loss_fn``, which gets this object if it has an argument ``gather_rows``."""
        try:
            named = loss_fn is not None and _ARGUMENT in inspect.signature(loss_fn).parameters
        except (TypeError, ValueError):  # a callable that does not tell
            return loss_fn
        return partial(loss_fn, **{_ARGUMENT: self}) if loss_fn is not None and named else loss_fn


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: RowGather) -> Tensor:
        ctx.gather = gather
        if gather.comm is None or rows.is_meta:
            return torch.cat([rows] * gather.ranks)
        full = rows.new_empty(gather.ranks * rows.shape[0], *rows.shape[1:])
        gather.comm.all_gather(full.view(-1), rows.contiguous().view(-1), gather.comm.grid.rows, LABEL).wait()
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gather: RowGather = ctx.gather
        own = grad.new_empty(grad.shape[0] // gather.ranks, *grad.shape[1:])
        if gather.comm is not None:
            full = grad.clone(memory_format=torch.contiguous_format)  # a reduce-scatter may overwrite it
            gather.comm.reduce_scatter(own.view(-1), full.view(-1), gather.comm.grid.rows, LABEL).wait()
        return own, None
