"""The sum of a product over the ranks by the switch between them (NVLink SHARP), where its memory is one address.

    epoch e       product, each tile into this rank's own memory │ signal to its owner
    epoch e + 1   owner: one load adds the tiles of all ranks, one store gives the sum to all │ signal to all │ collect

Without the switch an owner takes in a tile of each other rank, and sends its sum to each; here one sum comes and one
leaves. An address of the switch and one of a rank's memory are aliases, which a fence puts in order. The switch adds in
fp32 in an order of its own: all ranks get the same bits, but no other machine need.

Where kernels are interpreted the two instructions, and nothing else, are emulated: each rank is read, and written.

Shape suffixes: L rows that a rank owns, N columns.
"""

import triton
import triton.language as tl

from engine.kernels.gpu.overlap.signals import arrival_of, came, signal

_FENCE: tl.constexpr = tl.constexpr("fence.proxy.alias; mov.u32 $0, $1;")


@triton.jit
def _by_switch(multicast, source, target, inside, tile, INSTRUCTIONS: tl.constexpr):
    """Add what all ranks have at bytes ``source``, and give all of them the sum at ``target``, 16 bytes an element."""
    places = [multicast + source, multicast + target, inside.to(tl.int32)]
    tl.inline_asm_elementwise(_FENCE, "=r,r", [tile], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(INSTRUCTIONS, "=r,l,l,r", places, dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(_FENCE, "=r,r", [tile], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _one_by_one(like, slots, source, target, inside, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """The same, from the memory of each rank and to the memory of each rank."""
    elements = tl.arange(0, WIDE)[None, None, :]
    there = inside[:, :, None]
    sums = tl.zeros((source.shape[0], source.shape[1], WIDE), tl.float32)
    for rank in range(RANKS):
        start = (tl.load(slots + rank) + source).to(like.dtype)
        sums += tl.load(start[:, :, None] + elements, mask=there, other=0.0).to(tl.float32)
    for rank in range(RANKS):
        start = (tl.load(slots + rank) + target).to(like.dtype)
        tl.store(start[:, :, None] + elements, sums.to(like.dtype.element_ty), mask=there)


@triton.jit
def multicast_sum_kernel(
    like, multicast, slots, arrivals, status, rank, epoch, patience, capacity, most, L, N,
    RANKS: tl.constexpr, INSTRUCTIONS: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the tiles [L, N] of this rank's rows that all ranks keep, and send the sums to all of them in ``epoch`` + 1.

    A tile that some rank has not written is not sent. ``like`` tells the dtype, of BYTES an element; without
    INSTRUCTIONS the switch is emulated.
    """
    columns = tl.cdiv(N, BN)
    wide: tl.constexpr = 16 // BYTES
    own = tl.cast(rank, tl.int64)
    kept = ((epoch % 2) * RANKS + own) * capacity
    given = ((epoch + 1) % 2 * RANKS + own) * capacity
    for tile in range(tl.program_id(0), tl.cdiv(L, BM) * columns, tl.num_programs(0)):
        missing = 0
        for source in range(RANKS):
            if not came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS):
                missing += 1
        if missing == 0:
            r = tile // columns * BM + tl.arange(0, BM)
            c = tile % columns * BN + tl.arange(0, BN // wide) * wide
            inside = (r < L)[:, None] & (c < N)[None, :]
            place = (r.to(tl.int64)[:, None] * N + c[None, :]) * BYTES
            if INSTRUCTIONS is None:
                _one_by_one(like, slots, kept + place, given + place, inside, RANKS, wide)
            else:
                _by_switch(multicast, kept + place, given + place, inside, tile, INSTRUCTIONS)
            for hop in range(RANKS):
                target = (rank + 1 + hop) % RANKS
                signal(arrival_of(arrivals, target, rank, tile, epoch + 1, most, RANKS), epoch + 1)
