"""Products of experts on other ranks, in kernels that also send the rows (``kernels/gpu/overlap``).

    dispatch_product   tokens -> the owners of their experts, a product each      gradient: a product there, rows return
    product_return     a product each -> back to the ranks of the tokens          gradient: rows are dispatched anew

All ranks of the axis make both calls, also a rank without rows. The caller exchanges the counts beforehand, sends each
token as often as it has experts, and weighs and adds the results of the experts. The engine itself does not use these
functions yet.

Shape suffixes: T rows of a rank, R rows for the experts of a rank, X experts of a rank, K inputs, N outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.grouped_product import grouped_product_reference, grouped_weight_gradient
from engine.kernels.overlap import ExpertRows
from engine.parallel.comm.symmetric_memory import SymmetricBuffer

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_ALIGNED = 16
"""Rows are a multiple of this number of bytes, so that a program loads whole lines."""
AllToAll = Callable[[list[Tensor]], list[Tensor]]
"""Function that sends each rank the rows in a list, and returns the rows received from each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoute:
    """Routing of token rows to expert ranks: the destination of each row, and symmetric memory for the transfers."""

    rows: ExpertRows
    buffer: SymmetricBuffer
    kernels: Kernels
    """Kernels of the weight gradients, which are computed on this rank alone."""


def dispatch_product(tokens: Tensor, weight: Tensor, route: ExpertRoute) -> Tensor:
    """Sends each row of ``tokens`` [T, K] to the rank of its expert, and multiplies it by the expert's matrix in
    ``weight`` [X, K, N]. Returns the products of the R received rows, [R, N].

    ``tokens`` are sorted by expert; the result is sorted by expert, then by source rank.

    Raises:
        EngineError: the rows exceed the memory of ``route``, or the kernels do not support their dtype or shape (raised
            on all ranks), or a rank did not make this call.
    """
    _check(tokens, weight, route.rows.own)
    _check_room(tokens, weight, route)
    y: Tensor = _DispatchProduct.apply(tokens, weight, route)  # type: ignore[no-untyped-call]
    return y


def product_return(rows: Tensor, weight: Tensor, route: ExpertRoute) -> Tensor:
    """Multiplies each of ``rows`` [R, K] by its expert's matrix in ``weight`` [X, K, N], and sends the products back.
    Returns the products of this rank's T tokens, [T, N], sorted by expert.

    ``rows`` are sorted by expert, then by source rank.

    Raises:
        EngineError: as for :func:`dispatch_product`.
    """
    _check(rows, weight, route.rows.here)
    _check_room(rows, weight, route)
    y: Tensor = _ProductReturn.apply(rows, weight, route)  # type: ignore[no-untyped-call]
    return y


def dispatch_product_reference(tokens: Tensor, weight: Tensor, rows: ExpertRows, exchange: AllToAll) -> Tensor:
    """Implements :func:`dispatch_product` without its kernel: the all-to-all ``exchange``, then a grouped product.
    ``rows``: row counts of the experts.
    """
    received = rows.by_expert(exchange(rows.to_owners(tokens)))
    return grouped_product_reference(received, weight, rows.sizes.cumsum(0))


def product_return_reference(whole: Tensor, weight: Tensor, rows: ExpertRows, exchange: AllToAll) -> Tensor:
    """Implements :func:`product_return` without its kernel: a grouped product, then the all-to-all ``exchange``.
    ``whole``: the received rows; ``rows``: number of rows from each rank to each expert.
    """
    product = grouped_product_reference(whole, weight, rows.sizes.cumsum(0))
    return torch.cat(exchange(rows.by_rank(product)))


class _DispatchProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, route: ExpertRoute) -> Tensor:
        out, received = _dispatch(tokens, weight, route, keeps=ctx.needs_input_grad[1])
        ctx.save_for_backward(received, weight)
        ctx.route = route
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        received, weight = ctx.saved_tensors
        dx = _return(dy, weight.transpose(1, 2), ctx.route)
        return dx, _weight_gradient(ctx, received, dy, weight), None


class _ProductReturn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, route: ExpertRoute) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.route = route
        return _return(rows, weight, route)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        dx, received = _dispatch(dy, weight.transpose(1, 2), ctx.route, keeps=ctx.needs_input_grad[1])
        return dx, _weight_gradient(ctx, rows, received, weight), None


def _dispatch(tokens: Tensor, weight: Tensor, route: ExpertRoute, *, keeps: bool) -> tuple[Tensor, Tensor]:
    """Returns the product, and the rows that arrived, [R, K], if ``keeps``."""
    from engine.kernels.gpu.overlap.expert_matmul import launch_dispatch_product
    from engine.kernels.gpu.overlap.launches import KernelCall

    buffer, rows = route.buffer, route.rows
    call = KernelCall(buffer.mailbox, buffer.next_epoch())
    out = launch_dispatch_product(tokens.contiguous(), weight, rows, call)
    _complete(buffer, tokens.device)
    if not keeps:
        return out, tokens.new_empty(0)
    sizes = rows.received.sum(1).tolist()
    slots = (buffer.slot(call.epoch, n, (size, tokens.shape[1]), tokens.dtype) for n, size in enumerate(sizes))
    return out, rows.by_expert(list(slots))


def _return(whole: Tensor, weight: Tensor, route: ExpertRoute) -> Tensor:
    from engine.kernels.gpu.launch_shapes import tile_of
    from engine.kernels.gpu.overlap.expert_matmul import launch_collect_rows, launch_product_return
    from engine.kernels.gpu.overlap.launches import KernelCall

    buffer = route.buffer
    call = KernelCall(buffer.mailbox, buffer.next_epoch(), tile_of(weight.dtype))
    launch_product_return(whole.contiguous(), weight, route.rows, call)
    out = launch_collect_rows(weight.shape[2], route.rows, call, weight.dtype)
    _complete(buffer, whole.device)
    return out


def _weight_gradient(ctx: Any, left: Tensor, right: Tensor, weight: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[1]:
        return None
    ends = ctx.route.rows.sizes.cumsum(0).int().to(left.device)
    return grouped_weight_gradient(left, right, weight, ends, ctx.route.kernels)


def _complete(buffer: SymmetricBuffer, device: torch.device) -> None:
    """Raises on CPUs, where the kernel has ended, if rows are missing; a GPU is checked once a step."""
    if is_host(device):
        try:
            buffer.check()
        except RuntimeError as error:
            raise EngineError(
                f"a grouped matrix multiplication over expert ranks failed: {error}; look for the first traceback of "
                "the job, which shows the cause."
            ) from error


def _check(rows: Tensor, weight: Tensor, count: int) -> None:
    if rows.dtype not in _DTYPES or rows.dtype != weight.dtype:
        raise EngineError(
            f"rows are {rows.dtype} and experts {weight.dtype}; pass both in one of float32, float16, bfloat16."
        )
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape != (count, weight.shape[1]):
        raise EngineError(
            f"rows have shape {tuple(rows.shape)} and expert weights {tuple(weight.shape)}, but the counts sum to "
            f"{count}; pass rows of shape [{count}, inputs], sorted by expert, and weights [experts, inputs, outputs]."
        )
    if any(size * rows.element_size() % _ALIGNED for size in weight.shape[1:]):
        inputs, outputs = weight.shape[1:]
        raise EngineError(
            f"the experts have {inputs} inputs and {outputs} outputs in {weight.dtype}, but the kernel sends rows in "
            f"units of {_ALIGNED} bytes; make both feature sizes multiples of {_ALIGNED // rows.element_size()}."
        )


def _check_room(rows: Tensor, weight: Tensor, route: ExpertRoute) -> None:
    """Checks the room for both directions, so that the backward of a forward that fits does fit as well."""
    from engine.kernels.gpu.launch_shapes import tile_of

    tile, holds = tile_of(weight.dtype), route.buffer.sizes
    widest = max(weight.shape[1:])
    size = route.rows.most_rows() * widest * rows.element_size()
    tiles = route.rows.most_tiles(tile.rows) * -(-widest // tile.columns)
    if not route.buffer.fits(size, tiles):
        raise EngineError(
            f"a rank would send {size} bytes in {tiles} tiles to another rank, but route.buffer has capacity = "
            f"{holds.capacity} bytes and most = {holds.most} tiles for one call; pass fewer rows to one call, or give "
            "Comm.open_symmetric larger SlotSizes."
        )
