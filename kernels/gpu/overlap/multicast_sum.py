"""The sum of a product over the ranks by the switch between them (NVLink SHARP), where its memory is one address.

    epoch e       product, each tile into this rank's own memory │ signal to its owner
    epoch e + 1   owner: one load adds the tiles of all ranks, one store gives the sum to all │ signal to all │ collect

Without the switch an owner takes in a tile of each other rank, and sends its sum to each; here one sum comes and one
leaves. An address of the switch and one of a rank's memory are aliases, which a fence puts in order. The switch
adds in fp32 in an order of its own: all ranks get the same bits, but no other machine need.

Where kernels are interpreted the two instructions are emulated: rank after rank is read, and written.

Shape suffixes: L rows that a rank owns, N columns.
"""

import triton
import triton.language as tl

from engine.kernels.gpu.matmul import load_tile, store_tile
from engine.kernels.gpu.overlap.signals import arrival_of, came, signal, slot_of

_FENCE: tl.constexpr = tl.constexpr("fence.proxy.alias; mov.u32 $0, $1;")


@triton.jit
def _by_switch(
    multicast, source, target, row, column, L, N,
    INSTRUCTIONS: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add what all ranks have at byte ``source`` and give all of them the sum at ``target``, 16 bytes at a time."""
    tl.inline_asm_elementwise(_FENCE, "=r,r", [row], dtype=tl.int32, is_pure=False, pack=1)
    wide: tl.constexpr = 16 // BYTES
    r = row + tl.arange(0, BM)
    c = column + tl.arange(0, BN // wide) * wide
    inside = (r < L)[:, None] & (c < N)[None, :]
    place = (r.to(tl.int64)[:, None] * N + c[None, :]) * BYTES
    tl.inline_asm_elementwise(
        INSTRUCTIONS, "=r,l,l,r", [multicast + source + place, multicast + target + place, inside.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(_FENCE, "=r,r", [row], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _one_by_one(
    like, slots, rank, epoch, capacity, row, column, L, N, RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The same, from each rank's memory and to each rank's memory."""
    sums = tl.zeros((BM, BN), tl.float32)
    for source in range(RANKS):
        slot = slot_of(slots, source, rank, epoch, capacity, RANKS, like)
        sums += load_tile(slot, row, column, L, N, BM, BN, False, False).to(tl.float32)
    for target in range(RANKS):
        slot = slot_of(slots, target, rank, epoch + 1, capacity, RANKS, like)
        store_tile(slot, sums, row, column, L, N, BM, BN, False)


@triton.jit
def multicast_sum_kernel(
    like, multicast, slots, arrivals, status, rank, epoch, patience, capacity, most, L, N,
    RANKS: tl.constexpr, INSTRUCTIONS: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the tiles [L, N] of this rank's rows that all ranks keep, and send the sums to all of them in ``epoch`` + 1.

    A tile that some rank has not written is not sent. ``like`` tells the dtype; without INSTRUCTIONS the switch is
    emulated.
    """
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(L, BM) * columns, tl.num_programs(0)):
        row = tile // columns * BM
        column = tile % columns * BN
        missing = 0
        for source in range(RANKS):
            if not came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS):
                missing += 1
        if missing == 0:
            if INSTRUCTIONS is None:
                _one_by_one(like, slots, rank, epoch, capacity, row, column, L, N, RANKS, BM, BN)
            else:
                own = tl.cast(rank, tl.int64)
                source_byte = ((epoch % 2) * RANKS + own) * capacity
                target_byte = ((epoch + 1) % 2 * RANKS + own) * capacity
                _by_switch(multicast, source_byte, target_byte, row, column, L, N, INSTRUCTIONS, BYTES, BM, BN)
            for hop in range(RANKS):
                target = (rank + 1 + hop) % RANKS
                signal(arrival_of(arrivals, target, rank, tile, epoch + 1, most, RANKS), epoch + 1)
