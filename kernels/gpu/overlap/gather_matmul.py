"""All-gather and matrix product in one kernel: a tile is multiplied when its rows have arrived.

    rank 0   push a0 to 1, 2, 3 │ a0 x B │ a3 x B │ a2 x B │ a1 x B      own rows first, then in the order in which the
    rank 1   push a1 to 2, 3, 0 │ a1 x B │ a0 x B │ a3 x B │ a2 x B      others send them: the neighbour below is the
    rank 2   push a2 to 3, 0, 1 │ a2 x B │ a1 x B │ a0 x B │ a3 x B      first to send to this rank

Rows travel once, by writes: a rank that read from its peers would wait for every cache line. A program pushes all of
its share before it waits for rows, so no wait depends on a program that waits; on a GPU all programs run at once. The
two halves can also run one after the other (PUSHES, MULTIPLIES), as where ranks of one process take turns.

A tile of rows lies within one sequence of the batch, so that the products are those of ``kernels/gpu/matmul``, which
this kernel calls.

Shape suffixes: B sequences of L rows each that a rank holds, W ranks; rows of the result are [B, W, L].
"""

import triton
import triton.language as tl

from engine.kernels.gpu.matmul import load_tile, store_tile, tile_finish, tile_place, tile_product
from engine.kernels.gpu.overlap.signals import arrival_of, came, signal, slot_of


@triton.jit
def _push(
    part, slots, arrivals, status, rank, epoch, patience, capacity, most, B, L, K,
    RANKS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the tiles of ``part`` [B, L, K] into this rank's slot at every rank, the next rank first, itself last."""
    each = tl.cdiv(L, BM)
    tiles = B * each
    for index in range(tl.program_id(0), RANKS * tiles, tl.num_programs(0)):
        target = (rank + 1 + index // tiles) % RANKS
        tile = index % tiles
        start = tl.cast(tile // each, tl.int64) * L * K
        row = tile % each * BM
        slot = slot_of(slots, target, rank, epoch, capacity, RANKS, part)
        for column in range(0, K, BK):
            values = load_tile(part + start, row, column, L, K, BM, BK, False, False)
            store_tile(slot + start, values, row, column, L, K, BM, BK, False)
        signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)


@triton.jit(do_not_specialize=("rank", "epoch"))
def gather_product_kernel(
    part, matrix, bias, out, slots, arrivals, status, rank, epoch, patience, capacity, most, B, L, N, K,
    RANKS: tl.constexpr, PUSHES: tl.constexpr, MULTIPLIES: tl.constexpr, MATRIX_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Push ``part`` [B, L, K] to all ranks; out [B, W, L, N] = rows of all ranks times ``matrix`` [K, N] + ``bias``.

    Args:
        capacity: bytes of a slot.
        most: signals that a rank has for each other rank.
    """
    if PUSHES:
        _push(part, slots, arrivals, status, rank, epoch, patience, capacity, most, B, L, K, RANKS, BM, BK)
    if MULTIPLIES:
        each = tl.cdiv(L, BM)
        rows = B * each
        columns = tl.cdiv(N, BN)
        for index in range(tl.program_id(0), RANKS * rows * columns, tl.num_programs(0)):
            source = (rank + RANKS - index // (rows * columns)) % RANKS
            tile, tile_column = tile_place(index % (rows * columns), rows, columns, GROUP)
            if came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS):
                sequence = tl.cast(tile // each, tl.int64)
                row = tile % each * BM
                column = tile_column * BN
                there = slot_of(slots, rank, source, epoch, capacity, RANKS, part) + sequence * L * K
                sums = tile_product(
                    there, matrix, row, column, L, N, K, False, MATRIX_TRANSPOSED, PRECISION, BM, BN, BK, False
                )
                target = out + (sequence * RANKS + source) * L * N
                tile_finish(
                    sums, bias, None, None, target, row, column, L, N, "none", BIAS, False, False, BM, BN, False
                )
