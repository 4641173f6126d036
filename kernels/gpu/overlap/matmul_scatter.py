"""Matrix product and reduce-scatter in two kernels: a tile goes to the rank that owns its rows when it is done.

    rank 0   tiles of 1 │ of 2 │ of 3 │ own     farthest first: what has to travel leaves first
             └─ slot 0 at rank 1 ..             every rank has a slot for each other rank
    then     sum slots 0, 1, 2, 3 of own tiles  each when all of its parts have come, always in this order

The sum is in fp32 and in the order of ranks, so equal inputs give equal bits on any machine.

Without sequence parallelism the sum has to be whole on all ranks. With EVERYWHERE each rank sends its product to all
ranks and all of them sum (one-shot: one journey, W - 1 times the bytes, which for two ranks is what a ring sends).
Otherwise each rank sums its part and sends it on (two-shot): ``forward_slots_kernel``, then ``collect_slots_kernel``.

Shape suffixes: B sequences of L rows each that a rank owns, W ranks; rows of the product are [B, W, L].
"""

import triton
import triton.language as tl

from engine.kernels.gpu.matmul import load_tile, store_tile, tile_finish, tile_finish_halves, tile_place, tile_product
from engine.kernels.gpu.overlap.signals import arrival_of, came, signal, slot_of


@triton.jit(do_not_specialize=("rank", "epoch"))
def product_scatter_kernel(
    whole, matrix, plus, out, slots, arrivals, status, rank, epoch, patience, capacity, most, B, L, N, K,
    RANKS: tl.constexpr, EVERYWHERE: tl.constexpr, STAYS: tl.constexpr, MATRIX_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr, PLUS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply ``whole`` [B, W, L, K] with ``matrix`` [K, N], add ``plus``, and send rows [B, w, L, N] to rank w.

    With EVERYWHERE ``whole`` is [B, L, K], and all rows go to all ranks. With STAYS a tile stays in the memory of this
    rank, where its owner looks for it. ``out`` tells the dtype that travels.
    """
    each = tl.cdiv(L, BM)
    rows = B * each
    columns = tl.cdiv(N, BN)
    hops: tl.constexpr = RANKS if EVERYWHERE else 1
    for index in range(tl.program_id(0), RANKS // hops * rows * columns, tl.num_programs(0)):
        first = (rank + 1 + index // (rows * columns)) % RANKS
        tile, tile_column = tile_place(index % (rows * columns), rows, columns, GROUP)
        sequence = tl.cast(tile // each, tl.int64)
        row = tile % each * BM
        column = tile_column * BN
        place = sequence if EVERYWHERE else sequence * RANKS + first
        sums = tile_product(
            whole + place * L * K, matrix, row, column, L, N, K, False, MATRIX_TRANSPOSED, PRECISION, BM, BN, BK, False
        )
        added = plus + place * L * N if PLUS else None
        for hop in range(hops):
            owner = (first + hop) % RANKS
            holder = rank if STAYS else owner
            writer = owner if STAYS else rank
            slot = slot_of(slots, holder, writer, epoch, capacity, RANKS, out) + sequence * L * N
            if EVERYWHERE:
                tile_finish_halves(
                    sums, None, added, None, slot, row, column, L, N, "none", False, PLUS, False, BM, BN, False
                )
            else:
                tile_finish(sums, None, added, None, slot, row, column, L, N, "none", False, PLUS, False, BM, BN, False)
            signal(arrival_of(arrivals, owner, rank, tile * columns + tile_column, epoch, most, RANKS), epoch)


@triton.jit(do_not_specialize=("rank", "epoch"))
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


@triton.jit(do_not_specialize=("rank", "epoch"))
def forward_slots_kernel(
    part, slots, arrivals, rank, epoch, capacity, most, L, N,
    RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write ``part`` [L, N] into this rank's slot at every rank, the next rank first, itself last."""
    columns = tl.cdiv(N, BN)
    tiles = tl.cdiv(L, BM) * columns
    for index in range(tl.program_id(0), RANKS * tiles, tl.num_programs(0)):
        target = (rank + 1 + index // tiles) % RANKS
        tile = index % tiles
        row = tile // columns * BM
        column = tile % columns * BN
        values = load_tile(part, row, column, L, N, BM, BN, False, False)
        slot = slot_of(slots, target, rank, epoch, capacity, RANKS, part)
        store_tile(slot, values, row, column, L, N, BM, BN, False)
        signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)


@triton.jit(do_not_specialize=("rank", "epoch"))
def collect_slots_kernel(
    out, slots, arrivals, status, rank, epoch, patience, capacity, most, L, N,
    RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [W, L, N] = what all ranks have sent."""
    columns = tl.cdiv(N, BN)
    tiles = tl.cdiv(L, BM) * columns
    for index in range(tl.program_id(0), RANKS * tiles, tl.num_programs(0)):
        source = (rank + RANKS - index // tiles) % RANKS
        tile = index % tiles
        if came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS):
            row = tile // columns * BM
            column = tile % columns * BN
            slot = slot_of(slots, rank, source, epoch, capacity, RANKS, out)
            values = load_tile(slot, row, column, L, N, BM, BN, False, False)
            store_tile(out + tl.cast(source, tl.int64) * L * N, values, row, column, L, N, BM, BN, False)
