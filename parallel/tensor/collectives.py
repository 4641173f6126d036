"""Collectives that gradients pass through (Megatron-LM, Shoeybi et al. 2019, section 3: f and g).

            forward         backward
    f       identity        all-reduce      copy_to: before column layers
    g       all-reduce      identity        reduce_from: after a row layer
    gather  all-gather      own slice       gather_last: a sharded last dim becomes full

Tensors that are sharded along a dim, with equal shards in rank order, have the same functions; under sequence
parallelism the sequence is sharded this way outside regions (Korthikanti et al. 2022, section 4.2.2):

    f       all-gather      reduce-scatter  gather_to: before column layers
    g       reduce-scatter  all-gather      scatter_from: after a row layer
    enter   own slice       all-gather      slice_of: a full tensor, equal on all ranks, becomes sharded
    leave   all-gather      own slice       gather_whole: a sharded tensor becomes full, and so does its gradient

All of them communicate over the axis "tp", in the dtype of their input.

Shape suffixes: V a sharded last dim, W this rank's shard of it, T tensor ranks.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import EngineError
from engine.kernels.dispatch import eager_apply
from engine.parallel.comm.comm import Pending
from engine.parallel.tensor.tp_axis import TensorAxis

COLUMN_INPUTS = "column inputs"
ROW_OUTPUTS = "row outputs"
COLUMN_OUTPUTS = "column outputs"
EMBEDDING = "embedding"
LOGITS = "logits"
LOSS = "loss"
ACTIVATIONS = frozenset({COLUMN_INPUTS, COLUMN_OUTPUTS, ROW_OUTPUTS, EMBEDDING})
"""Labels of collectives of activations, which may be rounded; logits, losses and statistics may not."""


def copy_to(x: Tensor, axis: TensorAxis, owned: bool = False, passed: Callable[[], None] | None = None) -> Tensor:
    """Returns ``x`` unchanged (Megatron-LM's f); backward all-reduces the gradient.

    ``owned``: True if the sum may overwrite the gradient of the result. ``passed``: function called after this sum,
    without arguments.
    """
    if axis.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return start_copy_to(x, axis, owned, partial(_wait, passed))


def start_copy_to(x: Tensor, axis: TensorAxis, owned: bool, started: Callable[[Pending], None]) -> Tensor:
    """Returns ``x`` unchanged. Backward starts the all-reduce of the gradient without a wait.

    It passes the handle to ``started``; code that reads the gradient must wait for the handle. ``owned``: True if the
    all-reduce may overwrite the gradient of the result.
    """
    copied: Tensor = _copy(x, axis, owned, started)
    axis.expect("all_reduce", COLUMN_INPUTS, x, copied)
    return copied


def reduce_from(x: Tensor, axis: TensorAxis, label: str = ROW_OUTPUTS) -> Tensor:
    """Returns the sum of ``x`` over the tensor ranks (Megatron-LM's g); backward is the identity.

    The sum overwrites a contiguous ``x``; if autograd records the sum, an autograd leaf is copied first.
    """
    if axis.size == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        summed: Tensor = _sum(x, axis, label)
        return summed
    x = x.contiguous()
    axis.all_reduce(x, label)
    return x


def gather_last(x_W: Tensor, widths: tuple[int, ...], axis: TensorAxis, label: str = LOGITS) -> Tensor:
    """Gathers ``x_W`` [.., W], each rank's shard of the last dim, to the full tensor [.., V].

    ``widths``: shard sizes in rank order. Backward takes this rank's slice; the gradient must be equal on all ranks.
    """
    whole_V: Tensor = _GatherLast.apply(x_W, widths, axis, label)  # type: ignore[no-untyped-call]
    return whole_V


def gather_to(
    x: Tensor,
    axis: TensorAxis,
    dim: int = -2,
    label: str = COLUMN_INPUTS,
    owned: bool = False,
    passed: Callable[[], None] | None = None,
) -> Tensor:
    """Returns the tensors ``x`` of all ranks joined along ``dim`` (Megatron-LM's f under sequence parallelism).

    Backward reduce-scatters the gradient. ``x`` has one shape on all ranks. ``owned``: True if the gradient of the
    result may be overwritten. ``passed``: callback after the reduce-scatter.
    """
    if axis.size == 1:
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _gather(x, axis, dim % x.ndim, label)
    return start_gather_to(x, axis, dim, label, owned, partial(_wait, passed))


def start_gather_to(
    x: Tensor, axis: TensorAxis, dim: int, label: str, owned: bool, started: Callable[[Pending], None]
) -> Tensor:
    """Returns the tensors ``x`` of all ranks joined along ``dim``. Backward starts a reduce-scatter without a wait.

    It passes the handle to ``started``; code that reads the gradient must wait for the handle. ``owned``: True if the
    gradient of the result may be overwritten.
    """
    whole: Tensor = _GatherTo.apply(x, axis, (dim % x.ndim, label), owned, started)  # type: ignore[no-untyped-call]
    axis.expect("reduce_scatter", label, whole, whole)
    return whole


def scatter_from(x: Tensor, axis: TensorAxis, dim: int = -2, label: str = ROW_OUTPUTS, owned: bool = False) -> Tensor:
    """Sums ``x`` over the ranks and returns this rank's shard along ``dim`` (Megatron-LM's g under sequence
    parallelism).

    Backward gathers the gradient. ``owned``: True if ``x`` may be overwritten.

    Raises:
        EngineError: the number of ranks does not divide the dim.
    """
    if axis.size == 1:
        return x
    dim = check_parts(x, axis, dim)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _scatter(x, axis, dim, label, owned)
    part: Tensor = _ScatterFrom.apply(x, axis, dim, label, owned)  # type: ignore[no-untyped-call]
    axis.expect("all_gather", label, x, part)
    return part


def slice_of(x: Tensor, axis: TensorAxis, dim: int = -2, label: str = COLUMN_INPUTS) -> Tensor:
    """Returns this rank's shard along ``dim`` of ``x``, which is equal on all ranks. Backward gathers the gradient.

    Raises:
        EngineError: the number of ranks does not divide the dim.
    """
    if axis.size == 1:
        return x
    dim = check_parts(x, axis, dim)
    part: Tensor = _SliceOf.apply(x, axis, dim, label)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and x.requires_grad:
        axis.expect("all_gather", label, x, part)
    return part


def gather_whole(x: Tensor, axis: TensorAxis, dim: int = -2, label: str = ROW_OUTPUTS) -> Tensor:
    """Gathers the tensors ``x`` of all ranks along ``dim``; backward takes this rank's slice of the gradient.

    The gradient of the result must be equal on all ranks.
    """
    if axis.size == 1:
        return x
    whole: Tensor = _GatherWhole.apply(x, axis, dim % x.ndim, label)  # type: ignore[no-untyped-call]
    return whole


def sum_parts(x: Tensor, axis: TensorAxis, label: str = ROW_OUTPUTS) -> Tensor:
    """Returns the sum of ``x`` over the ranks. Backward also sums the gradient over the ranks."""
    if axis.size == 1:
        return x
    summed: Tensor = _SumParts.apply(x, axis, label)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and x.requires_grad:
        axis.expect("all_reduce", label, x, summed)
    return summed


def check_parts(x: Tensor, axis: TensorAxis, dim: int) -> int:
    """Checks that the number of ranks divides dim ``dim`` of ``x``. Returns ``dim`` counted from the front.

    Raises:
        EngineError: the number of ranks does not divide the dim.
    """
    length, ranks = x.shape[dim], axis.size
    if length % ranks:
        raise EngineError(
            f"dim {dim} of a tensor of shape {list(x.shape)} is to be sharded evenly over {ranks} tensor ranks, but "
            f"{ranks} does not divide {length}; make it a multiple of {ranks}, for example by padding."
        )
    return dim % x.ndim


def join_parts(parts: Tensor, dim: int) -> Tensor:
    """Joins the shards of all T ranks, ``parts`` [T, .., n, ..], along ``dim`` to a tensor [.., T n, ..].

    ``dim`` counts without the leading T.
    """
    joined = parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()  # flatten alone may return strided memory
    # nothing else refers to the base; still marked as a view, the result would refuse in-place writes
    return torch.ops.aten._unsafe_view(joined, joined.shape) if joined._is_view() else joined


def split_parts(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Splits ``x`` [.., T n, ..] along ``dim`` into equal shards of the T ranks: a view [T, .., n, ..]."""
    return x.view(*x.shape[:dim], axis.size, x.shape[dim] // axis.size, *x.shape[dim + 1 :]).movedim(dim, 0)


def refuse_second_derivatives(axis: str = "tp") -> None:
    """Checks that the running backward records no autograd graph: second derivatives are not supported.

    ``axis``: name of the axis over which the function communicates.

    Raises:
        EngineError: backward was called with ``create_graph``.
    """
    if torch.is_grad_enabled():
        key = {"cp": "context", "ep": "expert"}.get(axis, "tensor")
        raise EngineError(
            f"backward was called with create_graph = True, but layers that are sharded over {key} ranks have first "
            f"derivatives only; set parallel.{key} to 1."
        )


def _wait(passed: Callable[[], None] | None, pending: Pending) -> None:
    pending.wait()
    if passed is not None:
        passed()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, owned: bool, started: Callable[[Pending], None]) -> Tensor:
        ctx.axis, ctx.owned, ctx.started = axis, owned, started
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivatives(ctx.axis.name)
        grad = grad.contiguous() if ctx.owned else grad.clone(memory_format=torch.contiguous_format)
        ctx.started(ctx.axis.start_all_reduce(grad, COLUMN_INPUTS))
        return grad, None, None, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, label: str) -> Tensor:
        if not x.is_contiguous() or x.is_leaf:  # a leaf came from another stage; autograd forbids writes to it
            x = x.clone(memory_format=torch.contiguous_format)
        else:
            ctx.mark_dirty(x)  # autograd then raises if another operation has saved x for its backward
        axis.all_reduce(x, label)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


_copy, _sum = eager_apply(_CopyTo), eager_apply(_ReduceFrom)


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


def _gather(x: Tensor, axis: TensorAxis, dim: int, label: str) -> Tensor:
    return join_parts(axis.all_gather(x.contiguous(), label), dim)


def _reduce_scatter(x: Tensor, axis: TensorAxis, dim: int, label: str, owned: bool) -> tuple[Tensor, Pending]:
    parts = split_parts(x, axis, dim)
    parts = parts.contiguous() if owned else parts.clone(memory_format=torch.contiguous_format)
    part, pending = axis.start_reduce_scatter(parts, label)
    return part.clone() if part._is_view() else part, pending  # a dry run returns a view of x


def _scatter(x: Tensor, axis: TensorAxis, dim: int, label: str, owned: bool) -> Tensor:
    part, pending = _reduce_scatter(x, axis, dim, label, owned)
    pending.wait()
    return part


def _own_slice(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return split_parts(x, axis, dim)[axis.index]


class _GatherTo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: TensorAxis, place: tuple[int, str], owned: bool, started: Callable[[Pending], None]
    ) -> Tensor:
        ctx.axis, ctx.place, ctx.owned, ctx.started = axis, place, owned, started
        return _gather(x, axis, *place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivatives(ctx.axis.name)
        dim, label = ctx.place
        part, pending = _reduce_scatter(grad, ctx.axis, dim, label, ctx.owned)
        ctx.started(pending)
        return part, None, None, None, None


class _ScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, label: str, owned: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.label = axis, dim, label
        return _scatter(x, axis, dim, label, owned)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivatives(ctx.axis.name)
        return _gather(grad, ctx.axis, ctx.dim, ctx.label), None, None, None, None


class _SliceOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, label: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.label = axis, dim, label
        return _own_slice(x, axis, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivatives(ctx.axis.name)
        return _gather(grad, ctx.axis, ctx.dim, ctx.label), None, None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        x = x.clone(memory_format=torch.contiguous_format)
        axis.all_reduce(x, label)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives(ctx.axis.name)
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(grad, ctx.label)
        return grad, None, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, label: str) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(x, axis, dim, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _own_slice(grad, ctx.axis, ctx.dim), None, None, None
