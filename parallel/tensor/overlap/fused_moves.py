"""Products whose rows travel inside the kernel that multiplies them: a tile is multiplied when its rows have come, and
sent when it is done (``kernels/gpu/overlap``).

What does not fit the kernel or the memory of the axis goes by collectives, which every rank decides alike, from shapes
and dtypes. Bytes and calls are counted as those of the collectives that the kernels replace.

Shape suffixes: B sequences of L rows each that a rank holds, W ranks, K the dim that is summed over, N columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.device import is_host
from engine.parallel.comm.symmetric.symmetric_buffer import SymmetricBuffer
from engine.parallel.tensor.overlap.moves import PLAIN_MOVES, Moves, Route
from engine.parallel.tensor.tp_axis import TensorAxis

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_ALIGNED = 16
"""Bytes of which rows are a multiple, so that a program loads whole lines."""


def fuses(axis: TensorAxis) -> bool:
    """Whether products on this axis communicate by themselves; not in a dry run, nor where results are kept."""
    return axis.symmetric is not None and not axis.dry and axis.repeats is None


def gather_in_kernel(part: Tensor, matrix: Tensor, bias: Tensor | None, route: Route) -> tuple[Tensor, Tensor]:
    """:class:`GatherProduct` in one kernel."""
    buffer, axis = route.axis.symmetric, route.axis
    rows_BLK = part.contiguous().view(-1, *part.shape[-2:])
    if buffer is None or part.dtype != matrix.dtype or not fits(buffer, rows_BLK, matrix, rows_BLK.nbytes):
        return PLAIN_MOVES.gather(part, matrix, bias, route)
    from engine.kernels.gpu.overlap.launches import KernelCall, launch_gather_product

    whole_BWLK = part.new_empty((rows_BLK.shape[0], axis.size, *rows_BLK.shape[1:]))
    found: list[Tensor] = []

    def call() -> Callable[[], None]:
        epoch = buffer.next_epoch()
        found.append(launch_gather_product(rows_BLK, matrix, bias, KernelCall(buffer.mailbox, epoch)))
        for writer in range(axis.size):
            whole_BWLK[:, writer].copy_(buffer.slot(epoch, writer, tuple(rows_BLK.shape), part.dtype))
        return completion(buffer, part.device)

    axis.in_kernel("all_gather", whole_BWLK, route.label, call).wait()
    shape = (*part.shape[:-2], axis.size * part.shape[-2])
    return in_shape(found[0], (*shape, matrix.shape[1])), whole_BWLK.view(*shape, -1)


def scatter_in_kernel(
    whole: Tensor, matrix: Tensor, plus: Tensor | None, dtype: torch.dtype, route: Route
) -> Callable[[], Tensor]:
    """:class:`ProductScatter` in two kernels, the second of which sums."""
    buffer, axis = route.axis.symmetric, route.axis
    rows, columns = whole.shape[-2] // axis.size, matrix.shape[-1]
    whole_BWLK = whole.to(matrix.dtype).contiguous().view(-1, axis.size, rows, whole.shape[-1])
    sequences = whole_BWLK.shape[0]
    sent = sequences * rows * columns * dtype.itemsize
    if buffer is None or dtype not in _DTYPES or not fits(buffer, whole_BWLK[:, 0], matrix, sent):
        return PLAIN_MOVES.scatter(whole, matrix, plus, dtype, route)
    from engine.kernels.gpu.overlap.launches import KernelCall, launch_product_scatter, launch_sum_slots, tile_of

    added = None if plus is None else plus.contiguous().view(sequences, axis.size, rows, columns)
    found: list[Tensor] = []

    def call() -> Callable[[], None]:
        at = KernelCall(buffer.mailbox, buffer.next_epoch(), tile_of(matrix.dtype))
        launch_product_scatter(whole_BWLK, matrix, added, at, dtype)
        found.append(launch_sum_slots(sequences, rows, columns, at, dtype))
        return completion(buffer, whole.device)

    full_WBLN = torch.empty((axis.size, sequences, rows, columns), dtype=dtype, device="meta")  # its size is counted
    pending = axis.in_kernel("reduce_scatter", full_WBLN, route.label, call)

    def wait() -> Tensor:
        pending.wait()
        return in_shape(found[0], (*whole.shape[:-2], rows, columns))

    return wait


def in_shape(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A result in another shape, which nothing else refers to: marked as a view it would refuse writes in place."""
    found: Tensor = torch.ops.aten._unsafe_view(result, shape)
    return found


def fits(buffer: SymmetricBuffer, rows_BLK: Tensor, matrix: Tensor, size: int) -> bool:
    """Whether the kernels can multiply these rows with ``matrix`` [K, N] and send ``size`` bytes to each rank.

    What they cannot is said once; every rank finds the same.
    """
    reason = _obstacle(buffer, rows_BLK, matrix, size)
    if reason:
        buffer.say_once(f"{tuple(rows_BLK.shape)} x {tuple(matrix.shape)} goes by collectives: {reason}")
    return not reason


def _obstacle(buffer: SymmetricBuffer, rows_BLK: Tensor, matrix: Tensor, size: int) -> str:
    if matrix.dtype not in _DTYPES:
        return f"no kernel multiplies {matrix.dtype}"
    if not rows_BLK.numel() or not matrix.numel():
        return "it is empty"
    from engine.kernels.gpu.overlap.launches import signals_of, tile_of

    sequences, rows, depth = rows_BLK.shape
    if any(width * matrix.element_size() % _ALIGNED for width in (depth, matrix.shape[1])):
        return f"its rows are no multiple of {_ALIGNED} bytes"
    if not buffer.fits(size, signals_of(sequences, rows, matrix.shape[1], tile_of(matrix.dtype))):
        return f"a rank would send {size} bytes to each other; raise parallel.overlap_buffer_bytes"
    return ""


def completion(buffer: SymmetricBuffer, device: torch.device) -> Callable[[], None]:
    """What completes a call: on CPUs, where the kernel has ended, whether everything came. A GPU is asked once a step
    (:meth:`Comm.check_kernels`), since the host would wait for it."""
    return buffer.check if is_host(device) else lambda: None


FUSED_MOVES = Moves(gather_in_kernel, scatter_in_kernel)
"""Both products in kernels that communicate."""
