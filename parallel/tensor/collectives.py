"""Collectives that gradients pass through (Megatron-LM, Shoeybi et al. 2019, section 3: f and g).

            forward         backward
    f       identity        all-reduce      copy_to: before column layers
    g       all-reduce      identity        reduce_from: after a row layer
    gather  all-gather      own slice       gather_last: a cut last dim made whole

All communicate over the axis "tp", in the dtype of what they are given.

Shape suffixes: V a last dim that is cut, W the part of it that this rank holds, T tensor ranks.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import EngineError
from engine.parallel.tensor.axis import TensorAxis

COLUMN_INPUTS = "column inputs"
ROW_OUTPUTS = "row outputs"
EMBEDDING = "embedding"
LOGITS = "logits"
LOSS = "loss"


def copy_to(x: Tensor, axis: TensorAxis, owned: bool = False, passed: Callable[[], None] | None = None) -> Tensor:
    """f: ``x`` as it is; its gradient is summed over the tensor ranks, label "column inputs".

    ``owned``: nobody else reads the gradient that arrives, as after a plain matrix product, so that it may be
    summed in place; otherwise it is copied first. ``passed`` is called when the gradient has passed.
    """
    if axis.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    copied: Tensor = _CopyTo.apply(x, axis, owned, passed)  # type: ignore[no-untyped-call]
    return copied


def reduce_from(x: Tensor, axis: TensorAxis, label: str = ROW_OUTPUTS) -> Tensor:
    """g: the sum of every rank's ``x``, made in the memory of ``x`` where that is contiguous."""
    if axis.size == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        summed: Tensor = _ReduceFrom.apply(x, axis, label)  # type: ignore[no-untyped-call]
        return summed
    x = x.contiguous()
    axis.all_reduce(x, label)
    return x


def gather_last(x_W: Tensor, widths: tuple[int, ...], axis: TensorAxis, label: str = LOGITS) -> Tensor:
    """The whole [..., V] from parts [..., W] whose sizes by rank are ``widths``.

    Parts travel padded to the largest. The gradient of the whole is taken to be the same on all ranks.
    """
    whole_V: Tensor = _GatherLast.apply(x_W, widths, axis, label)  # type: ignore[no-untyped-call]
    return whole_V


def refuse_second_derivatives() -> None:
    """Called in a backward that cannot be differentiated itself, where silence would give a wrong result.

    Raises:
        EngineError: backward was called with ``create_graph``.
    """
    if torch.is_grad_enabled():
        raise EngineError(
            "backward was called with create_graph = True; layers that are cut over tensor ranks have first "
            "derivatives only: set parallel.tensor to 1."
        )


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, owned: bool, passed: Callable[[], None] | None) -> Tensor:
        ctx.axis, ctx.owned, ctx.passed = axis, owned, passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivatives()
        grad = grad.contiguous() if ctx.owned else grad.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(grad, COLUMN_INPUTS)
        if ctx.passed is not None:
            ctx.passed()
        return grad, None, None, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, label: str) -> Tensor:
        if x.is_contiguous():
            ctx.mark_dirty(x)  # autograd then refuses the sum if somebody had saved x
        else:
            x = x.contiguous()
        axis.all_reduce(x, label)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_W: Tensor, widths: tuple[int, ...], axis: TensorAxis, label: str) -> Tensor:
        own = widths[axis.index]
        ctx.stop = list(accumulate(widths))[axis.index]
        ctx.start = ctx.stop - own
        padded = functional.pad(x_W, (0, max(widths) - own)) if own < max(widths) else x_W.contiguous()
        parts = axis.all_gather(padded, label)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad_V: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_V[..., ctx.start : ctx.stop], None, None, None
