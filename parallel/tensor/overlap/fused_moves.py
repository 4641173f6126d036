"""Matrix products that send or receive rows inside the kernel (``kernels/gpu/overlap``).

A tile is multiplied after its rows have arrived, and sent after its product. For shapes on which measurements found it
faster, copy engines send the rows instead, to a kernel that waits for them (:func:`copied_rows`).

A product that does not fit the kernel or the memory of the axis runs with collectives. The choice depends on shapes and
dtypes only, so it is equal on all ranks. Bytes and calls are counted as if the replaced collectives had run.

Shape suffixes: B sequences of L rows each on a rank, W ranks, K the dim that is summed over, N columns.

Copies send rows to the other ranks while a product waits for them tile by tile:

    this stream   own rows │ product: own rows, then each other rank's as they come ──────────── │ join
    side stream            └ rows to the next rank, their signals │ rows to the one after it, .. ┘

The processors of the GPU only multiply; the copy engines move the rows. Copies of one stream run in order, so a signal
arrives after its rows. Signals are copies too, of numbers written beforehand, because a kernel might not start while a
product occupies every processor. On a CPU a copy has ended when its call returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.device import is_host
from engine.kernels.overlap import Operation, OverlapChoice, ProductSizes
from engine.parallel.comm.symmetric_memory import SymmetricBuffer
from engine.parallel.tensor.overlap.moves import PLAIN_MOVES, Moves, Route
from engine.parallel.tensor.tp_axis import TensorAxis

if TYPE_CHECKING:
    from engine.kernels.gpu.launch_shapes import Tile  # needs Triton


_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_ALIGNED = 16
"""Rows are a multiple of this number of bytes, so that a program loads whole lines."""


def fuses(axis: TensorAxis) -> bool:
    """Returns True if kernels may communicate over ``axis`` through symmetric memory.

    False in a dry run, and while results of collectives are saved for recomputation or reused by it.
    """
    return axis.symmetric is not None and not axis.dry and axis.repeats is None


def runs_in_kernel(axis: TensorAxis, operation: Operation, sizes: ProductSizes, dtype: torch.dtype) -> bool:
    """Returns True if a product of kind ``operation`` and of these ``sizes`` runs in a kernel that also communicates:
    ``axis`` supports it, and measurements, if any, favor it. The answer is the same on all ranks.
    """
    row = measured_row(axis, operation, sizes, dtype)
    return fuses(axis) and (axis.measured is None or (row is not None and row.fuses))


def measured_row(
    axis: TensorAxis, operation: Operation, sizes: ProductSizes, dtype: torch.dtype
) -> OverlapChoice | None:
    """Returns the measured choice between communicating kernel and collectives for a product of kind ``operation`` and
    of these ``sizes``; None if it was not measured.
    """
    return None if axis.measured is None else axis.measured.find(operation, sizes, dtype)


def tile_for(row: OverlapChoice | None, dtype: torch.dtype) -> "Tile":
    """Returns the tile (block size) of the communicating kernel: the fastest in ``row``, or ``dtype``'s default."""
    from engine.kernels.gpu.launch_shapes import Tile, tile_of

    return tile_of(dtype) if row is None or row.tile is None else Tile(*row.tile, parts=2, described=False)


def gather_in_kernel(part: Tensor, matrix: Tensor, bias: Tensor | None, route: Route) -> tuple[Tensor, Tensor]:
    """Gathers ``part``, this rank's rows, and multiplies the rows of all ranks by ``matrix`` in one kernel. Returns
    (product plus bias, gathered rows). ``route``: axis and label of the communication.

    Falls back to collectives for products that the kernel does not support.
    """
    buffer, axis = route.axis.symmetric, route.axis
    rows_BLK = part.contiguous().view(-1, *part.shape[-2:])
    sizes = ProductSizes(axis.size * rows_BLK.shape[:2].numel(), *matrix.shape[::-1])
    if buffer is None or part.dtype != matrix.dtype or not runs_in_kernel(axis, "gather_product", sizes, part.dtype):
        return PLAIN_MOVES.gather(part, matrix, bias, route)
    row = measured_row(axis, "gather_product", sizes, part.dtype)
    if not fits(buffer, rows_BLK, matrix, rows_BLK.nbytes, row):
        return PLAIN_MOVES.gather(part, matrix, bias, route)
    from engine.kernels.gpu.overlap.launches import KernelCall, launch_gather_product

    whole_BWLK = part.new_empty((rows_BLK.shape[0], axis.size, *rows_BLK.shape[1:]))
    found: list[Tensor] = []
    copied = row is not None and row.way == "copied"

    def call() -> Callable[[], None]:
        at = KernelCall(buffer.mailbox, buffer.next_epoch(), tile_for(row, matrix.dtype))
        with copied_rows(rows_BLK, buffer, at.epoch, at.shape(matrix.dtype).rows) if copied else nullcontext():
            found.append(launch_gather_product(rows_BLK, matrix, bias, at, "multiply" if copied else "both"))
        for writer in range(axis.size):
            whole_BWLK[:, writer].copy_(buffer.slot(at.epoch, writer, tuple(rows_BLK.shape), part.dtype))
        return completion(buffer, part.device)

    axis.in_kernel("all_gather", whole_BWLK, route.label, call).wait()
    shape = (*part.shape[:-2], axis.size * part.shape[-2])
    return in_shape(found[0], (*shape, matrix.shape[1])), whole_BWLK.view(*shape, -1)


def scatter_in_kernel(
    whole: Tensor, matrix: Tensor, plus: Tensor | None, dtype: torch.dtype, route: Route
) -> Callable[[], Tensor]:
    """Multiplies ``whole``, the rows of the full sequence, by ``matrix``, and adds ``plus`` (this rank's addend in the
    product's shape, or None). Communicating kernels reduce-scatter the result over all ranks. Returns a function that
    waits for this rank's rows and returns them in ``dtype``. ``route``: axis and label of the communication.

    Falls back to collectives for products that the kernels do not support.
    """
    buffer, axis = route.axis.symmetric, route.axis
    rows, columns = whole.shape[-2] // axis.size, matrix.shape[-1]
    whole_BWLK = whole.to(matrix.dtype).contiguous().view(-1, axis.size, rows, whole.shape[-1])
    sequences, sizes = whole_BWLK.shape[0], ProductSizes(whole_BWLK.shape[:3].numel(), *matrix.shape[::-1])
    if buffer is None or dtype not in _DTYPES or not runs_in_kernel(axis, "product_scatter", sizes, matrix.dtype):
        return PLAIN_MOVES.scatter(whole, matrix, plus, dtype, route)
    row = measured_row(axis, "product_scatter", sizes, matrix.dtype)
    if not fits(buffer, whole_BWLK[:, 0], matrix, sequences * rows * columns * dtype.itemsize, row):
        return PLAIN_MOVES.scatter(whole, matrix, plus, dtype, route)
    from engine.kernels.gpu.overlap.launches import KernelCall, launch_product_scatter, launch_sum_slots

    added = None if plus is None else plus.contiguous().view(sequences, axis.size, rows, columns)
    found: list[Tensor] = []

    def call() -> Callable[[], None]:
        at = KernelCall(buffer.mailbox, buffer.next_epoch(), tile_for(row, matrix.dtype))
        launch_product_scatter(whole_BWLK, matrix, added, at, dtype)
        found.append(launch_sum_slots(sequences, rows, columns, at, dtype))
        return completion(buffer, whole.device)

    full_WBLN = torch.empty((axis.size, sequences, rows, columns), dtype=dtype, device="meta")  # its bytes are counted
    pending = axis.in_kernel("reduce_scatter", full_WBLN, route.label, call)

    def wait() -> Tensor:
        pending.wait()
        return in_shape(found[0], (*whole.shape[:-2], rows, columns))

    return wait


def in_shape(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns ``result`` in ``shape``, over the same memory. Autograd sees no view and allows in-place writes."""
    found: Tensor = torch.ops.aten._unsafe_view(result, shape)
    return found


def fits(
    buffer: SymmetricBuffer, rows_BLK: Tensor, matrix: Tensor, size: int, row: OverlapChoice | None = None
) -> bool:
    """Returns True if the communicating kernels support ``rows_BLK`` times ``matrix`` [K, N], with ``size`` bytes of
    ``buffer`` for each rank. The answer is the same on all ranks.

    ``row``: measured choice of tile, or None.
    """
    reason = _obstacle(buffer, rows_BLK, matrix, size, row)
    if reason:
        buffer.say_once(f"the product {tuple(rows_BLK.shape)} x {tuple(matrix.shape)} runs with collectives: {reason}")
    return not reason


def _obstacle(buffer: SymmetricBuffer, rows_BLK: Tensor, matrix: Tensor, size: int, row: OverlapChoice | None) -> str:
    if matrix.dtype not in _DTYPES:
        return f"no kernel multiplies {matrix.dtype}"
    if not rows_BLK.numel() or not matrix.numel():
        return "an operand is empty"
    from engine.kernels.gpu.overlap.launches import signals_of

    sequences, rows, depth = rows_BLK.shape
    if any(width * matrix.element_size() % _ALIGNED for width in (depth, matrix.shape[1])):
        return f"the rows are no multiple of {_ALIGNED} bytes"
    if not buffer.fits(size, signals_of(sequences, rows, matrix.shape[1], tile_for(row, matrix.dtype))):
        return f"a rank would send {size} bytes to every other rank; raise parallel.overlap_buffer_bytes"
    return ""


def completion(buffer: SymmetricBuffer, device: torch.device) -> Callable[[], None]:
    """Returns a function that checks the transfers of a communicating kernel after its launch. On a CPU it raises if
    data of a rank has not arrived; on a GPU it does nothing.
    """
    return buffer.check if is_host(device) else lambda: None


FUSED_MOVES = Moves(gather_in_kernel, scatter_in_kernel)
"""Implementation with kernels that communicate."""


COPIED_BYTES = 4 << 20
"""Minimum bytes of a copy, for sequences that are as long; smaller copies do not fill a link."""


@contextmanager
def copied_rows(part_BLK: Tensor, buffer: SymmetricBuffer, epoch: int, tile_rows: int) -> Iterator[None]:
    """Copies ``part_BLK``, this rank's contiguous rows, to the symmetric memory of all tensor ranks, with a signal for
    each ``tile_rows`` rows. The end of the context waits for the copies.

    ``epoch``: number of this call among all calls on ``buffer``. Products launched inside the context wait for the
    signals.
    """
    rank, ranks = buffer.mailbox.rank, buffer.mailbox.ranks
    numbers = signal_numbers(part_BLK, buffer, epoch, tile_rows)
    leave_rows(part_BLK, numbers, buffer, (rank, epoch, tile_rows))
    with buffer.copies.behind():
        for step in range(1, ranks):
            leave_rows(part_BLK, numbers, buffer, ((rank + step) % ranks, epoch, tile_rows))
    try:
        yield
    finally:
        buffer.copies.join()  # rows and numbers must stay allocated until here; nothing reads them afterwards


def signal_numbers(part_BLK: Tensor, buffer: SymmetricBuffer, epoch: int, tile_rows: int) -> Tensor:
    """Returns the arrival signals for the tiles of one sequence of ``part_BLK``, this rank's rows: int32 [tiles], all
    equal to ``epoch``, the number of this call. All sequences use the same signals.

    The tensor must stay allocated until the copies of :func:`leave_rows` have ended.
    """
    tiles = -(-part_BLK.shape[1] // tile_rows)
    return torch.full((tiles,), epoch, dtype=torch.int32, device=buffer.mailbox.status.device)


def leave_rows(part_BLK: Tensor, numbers: Tensor, buffer: SymmetricBuffer, call: tuple[int, int, int]) -> None:
    """Copies ``part_BLK``, this rank's rows, and then its arrival signals ``numbers`` to one rank's symmetric memory,
    on the current stream.

    Args:
        call: (destination rank, number of this call among all calls on ``buffer``, rows of a tile).
    """
    owner, epoch, tile_rows = call
    (sequences, rows, _), tiles = part_BLK.shape, len(numbers)
    slot_BLK = buffer.slot_at(owner, epoch, tuple(part_BLK.shape), part_BLK.dtype)
    arrivals = buffer.arrivals_at(owner, epoch)
    piece = rows_of_a_copy(part_BLK, tile_rows)
    for sequence in range(sequences):
        for row in range(0, rows, piece):
            slot_BLK[sequence, row : row + piece].copy_(part_BLK[sequence, row : row + piece], non_blocking=True)
            first, last = row // tile_rows, min(-(-(row + piece) // tile_rows), tiles)
            arrivals[sequence * tiles + first : sequence * tiles + last].copy_(numbers[first:last], non_blocking=True)


def rows_of_a_copy(part_BLK: Tensor, tile_rows: int) -> int:
    """Returns the number of rows of ``part_BLK`` that one copy transfers: the smallest multiple of ``tile_rows`` that
    has at least ``COPIED_BYTES`` bytes.
    """
    tile_bytes = tile_rows * part_BLK.shape[-1] * part_BLK.element_size()
    return tile_rows * -(-COPIED_BYTES // tile_bytes)
