"""Rows that copies carry to the other ranks while a product waits for them tile by tile.

    this stream   own rows │ product: own rows, then each other rank's as they come ──────────── │ join
    side stream            └ rows to the next rank, their signals │ rows to the one after it, .. ┘

The processors of a GPU only multiply: its copy engines move the rows. A copy begins when the one before it in its
stream has ended, so a signal comes after its rows. Signals are copies too, of numbers that were written beforehand,
since a kernel might not begin while a product occupies every processor. On a CPU a copy is done when its call returns.

Shape suffixes: B sequences of L rows each that a rank holds, K the dim that is summed over.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.parallel.comm.symmetric_memory import SymmetricBuffer

COPIED_BYTES = 4 << 20
"""Of a copy, at least, where a sequence has so many: smaller ones do not fill a link."""


@contextmanager
def copied_rows(part_BLK: Tensor, buffer: SymmetricBuffer, epoch: int, tile_rows: int) -> Iterator[None]:
    """Send ``part_BLK``, contiguous, to all ranks in the call ``epoch``, each ``tile_rows`` rows with a signal.

    A product that is launched inside waits for them (``launch_gather_product`` with half "multiply").
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
        buffer.copies.join()  # from here on nothing reads the rows, nor the numbers, which live until here


def signal_numbers(part_BLK: Tensor, buffer: SymmetricBuffer, epoch: int, tile_rows: int) -> Tensor:
    """The signals of a sequence, int32 [tiles], as :func:`leave_rows` copies them; they have to live until it has."""
    tiles = -(-part_BLK.shape[1] // tile_rows)
    return torch.full((tiles,), epoch, dtype=torch.int32, device=buffer.mailbox.status.device)


def leave_rows(part_BLK: Tensor, numbers: Tensor, buffer: SymmetricBuffer, call: tuple[int, int, int]) -> None:
    """Copy rows, and their signals, to one rank, on the current stream. The rows may lie in pinned memory of the host.

    Args:
        call: that rank, the epoch, and the rows of a tile.
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
    """The fewest rows, a multiple of those of a tile, that have ``COPIED_BYTES``."""
    tile_bytes = tile_rows * part_BLK.shape[-1] * part_BLK.element_size()
    return tile_rows * -(-COPIED_BYTES // tile_bytes)
