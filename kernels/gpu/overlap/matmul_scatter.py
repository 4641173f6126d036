"""Matrix product and reduce-scatter in two kernels: a tile goes to the rank that owns its rows when it is done.

    rank 0   tiles of 1 │ of 2 │ of 3 │ own     farthest first: what has to travel leaves first
             └─ slot 0 at rank 1 ..             every rank has a slot for each other rank
    then     sum slots 0, 1, 2, 3 of own tiles  each when all of its parts have come, always in this order

The sum is in fp32 and in the order of ranks, so equal inputs give equal bits on any machine.

Without sequence parallelism the sum has to be whole on all ranks. With EVERYWHERE each rank sends its product to all
ranks and all of them sum (one-shot: one journey, W times the bytes), which is quicker for small products; for others
each rank sums its part and sends it on, which is a gather after this (two-shot).

Shape suffixes: B sequences of L rows each that a rank owns, W ranks; rows of the product are [B, W, L].
"""

import triton
import triton.language as tl

from engine.kernels.gpu.matmul import load_tile, store_tile, tile_finish, tile_place, tile_product
from engine.kernels.gpu.overlap.signals import arrival_of, came, released, signal, slot_of


@triton.jit
def product_scatter_kernel(
    whole, matrix, plus, out, slots, arrivals, departures, status, rank, epoch, patience, capacity, most, B, L, N, K,
    RANKS: tl.constexpr, EVERYWHERE: tl.constexpr, MATRIX_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    PLUS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply ``whole`` [B, W, L, K] with ``matrix`` [K, N], add ``plus``, and send rows [B, w, L, N] to rank w.

    With EVERYWHERE ``whole`` is [B, L, K], and all rows go to all ranks. ``out`` tells the dtype that travels.
    """
    each = tl.cdiv(L, BM)
    rows = B * each
    columns = tl.cdiv(N, BN)
    for index in range(tl.program_id(0), RANKS * rows * columns, tl.num_programs(0)):
        owner = (rank + 1 + index // (rows * columns)) % RANKS
        tile, tile_column = tile_place(index % (rows * columns), rows, columns, GROUP)
        if released(departures, status, rank, owner, epoch, patience):
            sequence = tl.cast(tile // each, tl.int64)
            row = tile % each * BM
            column = tile_column * BN
            place = sequence if EVERYWHERE else sequence * RANKS + owner
            sums = tile_product(
                whole + place * L * K, matrix, row, column, L, N, K, False, MATRIX_TRANSPOSED, PRECISION, BM, BN, BK,
                False,
            )  # fmt: skip
            added = plus + place * L * N if PLUS else None
            slot = slot_of(slots, owner, rank, epoch, capacity, RANKS, out) + sequence * L * N
            tile_finish(sums, None, added, None, slot, row, column, L, N, "none", False, PLUS, False, BM, BN, False)
            signal(arrival_of(arrivals, owner, rank, tile * columns + tile_column, epoch, most, RANKS), epoch)


@triton.jit
def sum_slots_kernel(
    out, slots, arrivals, status, rank, epoch, patience, capacity, most, B, L, N,
    RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [B, L, N] = the sum of what all ranks have sent."""
    each = tl.cdiv(L, BM)
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), B * each * columns, tl.num_programs(0)):
        start = tl.cast(tile // columns // each, tl.int64) * L * N
        row = tile // columns % each * BM
        column = tile % columns * BN
        sums = tl.zeros((BM, BN), tl.float32)
        for source in range(RANKS):
            if came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS):
                slot = slot_of(slots, rank, source, epoch, capacity, RANKS, out) + start
                sums += load_tile(slot, row, column, L, N, BM, BN, False, False).to(tl.float32)
        store_tile(out + start, sums, row, column, L, N, BM, BN, False)
