"""Launches of kernels that communicate through the memory of a :class:`Mailbox`.

All ranks make the same calls with equal shapes, and count epochs equally.

Shape suffixes: B sequences of L rows each on a rank, W ranks, K the dim that is summed over, N columns.

All-gather and matrix product in one kernel: a tile is multiplied when its rows have arrived.

    rank 0   push a0 to 1, 2, 3 │ a0 x B │ a3 x B │ a2 x B │ a1 x B      own rows first, then in the order in which the
    rank 1   push a1 to 2, 3, 0 │ a1 x B │ a0 x B │ a3 x B │ a2 x B      others send them: the neighbour below is the
    rank 2   push a2 to 3, 0, 1 │ a2 x B │ a1 x B │ a0 x B │ a3 x B      first to send to this rank

Ranks write rows once to their peers: a rank that read from peers would wait for every cache line. A program pushes all
its rows before it waits for rows, so no wait depends on a waiting program; on a GPU all programs run at once. The two
halves can also run one after the other (PUSHES, MULTIPLIES), for ranks of one process.

A tile of rows is within one sequence of the batch, so that this kernel can call the products of ``kernels/gpu/matmul``.
Rows of a result or product are [B, W, L].

Matrix product and reduce-scatter in two kernels: a finished tile is sent to the rank that owns the rows.

    rank 0   tiles of 1 │ of 2 │ of 3 │ own     tiles of other ranks first
             └─ slot 0 at rank 1 ..             every rank has a slot for each other rank
    then     sum slots 0, 1, 2, 3 of own tiles  each tile after all slots have arrived, always in this order

The sum is in fp32 and in the order of ranks, so equal inputs have equal bits on any machine.

Without sequence parallelism all ranks need the full sum. With EVERYWHERE each rank sends its product to all ranks and
all of them sum (one-shot: one transfer of W - 1 times the bytes, which for two ranks equals a ring). Otherwise each
rank sums its own rows and sends the sum to all (two-shot): ``forward_slots_kernel``, then ``collect_slots_kernel``.

The switch (NVLink SHARP) sums a product over the ranks if it maps the memory of all ranks to one address:

    epoch e       product, each tile into this rank's own memory │ signal to its owner
    epoch e + 1   owner: one load adds the tiles of all ranks, one store writes the sum to all │ signal to all │ collect

Without the switch an owner receives a tile from each other rank, and sends the sum to each; with the switch it receives
one sum and sends one. The switch's address and the address in a rank's memory are aliases, so accesses need a fence.
The switch adds in fp32 in its own order: all ranks get equal bits, but other machines may get other bits.

Interpreted kernels emulate only these two instructions, by reads from and writes to each rank.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.device import is_host
from engine.kernels.gpu.launch_shapes import Tile, ceil_div, processors, tile_of, tile_shape
from engine.kernels.gpu.matmul import (
    as_it_lies,
    load_tile,
    store_tile,
    tile_finish,
    tile_finish_halves,
    tile_place,
    tile_product,
)
from engine.kernels.gpu.overlap.signals import arrival_of, came, signal, slot_of
from engine.kernels.overlap import Mailbox


@triton.jit
def _push(
    part, slots, arrivals, status, rank, epoch, patience, capacity, most, B, L, K,
    RANKS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes the tiles of ``part`` [B, L, K] into this rank's slot on every rank, the next rank first, itself last."""
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
    """Sends ``part`` [B, L, K] to all W ranks, and multiplies the rows of all ranks by ``matrix`` [K, N].

    It writes ``out`` [B, W, L, N], plus ``bias`` [N] with BIAS. PUSHES: sends; MULTIPLIES: receives and multiplies.
    ``slots``, ``arrivals`` and ``status``: from a :class:`Mailbox`; ``epoch``: call number.

    Args:
        patience: polls after which a tile's signal counts as lost.
        capacity: bytes of the memory, on each rank, for the rows of one rank.
        most: maximum number of signals from one rank to another.
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


@triton.jit(do_not_specialize=("rank", "epoch"))
def product_scatter_kernel(
    whole, matrix, plus, out, slots, arrivals, status, rank, epoch, patience, capacity, most, B, L, N, K,
    RANKS: tl.constexpr, EVERYWHERE: tl.constexpr, STAYS: tl.constexpr, MATRIX_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr, PLUS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies ``whole`` by ``matrix`` [K, N], adds ``plus``, and sends the result to the W ranks of the axis.

    ``whole`` is [B, W, L, K], and each rank gets its [B, L, N] of the result. With EVERYWHERE, ``whole`` is [B, L, K],
    and each rank gets all rows. With STAYS, ranks get only signals, and the rows are written to this rank's own slots.
    ``plus`` has the product's shape, and the result has the dtype of ``out``. ``slots`` to ``most``: from a
    :class:`Mailbox`; ``epoch``: call number.
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
    """Sums the rows that all ranks have sent to this rank, in fp32 and in rank order; writes ``out`` [B, L, N].

    It waits for each tile of rows. ``slots`` to ``most``: from a :class:`Mailbox`; ``epoch``: call number.
    """
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
    """Writes ``part`` [L, N] to this rank's slot on every rank, and signals each tile with the call number ``epoch``.

    It does not wait for other ranks. ``slots`` to ``most``, except ``epoch``: from a :class:`Mailbox`.
    """
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
    """Copies into ``out`` [W, L, N] the L rows that each of W ranks has sent; waits for each tile of rows.

    ``slots`` to ``most``: from a :class:`Mailbox`; ``epoch``: call number.
    """
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


_FENCE: tl.constexpr = tl.constexpr("fence.proxy.alias; mov.u32 $0, $1;")


@triton.jit
def _by_switch(multicast, source, target, inside, tile, INSTRUCTIONS: tl.constexpr):
    """Adds the 16-byte words of all ranks at bytes ``source``, and writes the sums to all ranks at bytes ``target``."""
    places = [multicast + source, multicast + target, inside.to(tl.int32)]
    tl.inline_asm_elementwise(_FENCE, "=r,r", [tile], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(INSTRUCTIONS, "=r,l,l,r", places, dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(_FENCE, "=r,r", [tile], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _one_by_one(like, slots, source, target, inside, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """Emulates :func:`_by_switch` by reads from and writes to the memory of each rank."""
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
    """Adds up the products of all ranks for this rank's rows [L, N] through the NVLink switch; sends the sums to all
    ranks.

    The products are from call ``epoch``, and the sums are received in call ``epoch`` + 1. A tile that lacks a rank's
    product is not sent. ``like``: any tensor in the products' dtype. Without INSTRUCTIONS the switch is emulated.
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


Half = Literal["push", "multiply", "both"]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Parameters of one call of kernels that communicate between ranks.

    All ranks pass the same call number ``epoch`` (from 1) and launch shape.
    """

    mailbox: Mailbox
    epoch: int
    tile: Tile | None = None
    """Tile of the products; None: the default tile of the dtype."""
    programs: int | None = None
    """Number of concurrent programs of a kernel; None: one per processor. Ranks on one GPU divide the processors."""

    def shape(self, dtype: torch.dtype) -> Tile:
        """Returns the tile shape for products in ``dtype``: ``self.tile``, or the default."""
        return self.tile or tile_of(dtype)

    def grid(self, device: torch.device) -> tuple[int]:
        """Returns the launch grid for ``device``: (number of programs,); 1 on the CPU.

        All programs must run at once, because they wait for each other.
        """
        return (1 if is_host(device) else self.programs or processors(device),)

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """Arguments of a kernel: (rank, epoch, patience, capacity, most), from this call and its mailbox."""
        box = self.mailbox
        return box.rank, self.epoch, box.patience, box.capacity, box.most


def launch_gather_product(
    part_BLK: Tensor, matrix_KN: Tensor, bias: Tensor | None, call: KernelCall, half: Half = "both"
) -> Tensor:
    """Sends ``part_BLK`` to all ranks; returns the rows of all W ranks times ``matrix_KN``, plus ``bias``, [B, W, L,
    N].

    ``part_BLK`` is contiguous, in the dtype of the matrix. ``half``: "push" only sends, and its result is undefined;
    "multiply" only receives and multiplies.
    """
    matrix, transposed = as_it_lies(matrix_KN)
    (sequences, rows, depth), columns = part_BLK.shape, matrix_KN.shape[1]
    shape, mailbox = call.shape(matrix.dtype), call.mailbox
    out = matrix.new_empty((sequences, mailbox.ranks, rows, columns))
    gather_product_kernel[call.grid(out.device)](
        part_BLK, matrix, bias, out, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers,
        sequences, rows, columns, depth,
        RANKS=mailbox.ranks, PUSHES=half != "multiply", MULTIPLIES=half != "push", MATRIX_TRANSPOSED=transposed,
        BIAS=bias is not None, **tile_shape(shape),
    )  # fmt: skip
    return out


def launch_product_scatter(
    whole: Tensor, matrix_KN: Tensor, plus: Tensor | None, call: KernelCall, dtype: torch.dtype, stays: bool = False
) -> None:
    """Multiplies ``whole`` [B, W, L, K] by ``matrix_KN``, adds ``plus``, and sends each of W ranks its [B, L, N] of the
    result, in ``dtype``.

    ``plus`` has the product's shape. If ``whole`` is [B, L, K], all rows are sent to all ranks. With ``stays``
    only signals are sent, and the rows are written to this rank's own memory, for :func:`launch_multicast_sum`.
    """
    everywhere = whole.dim() == 3
    matrix, transposed = as_it_lies(matrix_KN)
    sequences, (rows, depth), columns = whole.shape[0], whole.shape[-2:], matrix_KN.shape[1]
    shape, mailbox = call.shape(matrix.dtype), call.mailbox
    product_scatter_kernel[call.grid(whole.device)](
        whole, matrix, plus, whole.new_empty(0, dtype=dtype), mailbox.slots, mailbox.arrivals, mailbox.status,
        *call.numbers, sequences, rows, columns, depth,
        RANKS=mailbox.ranks, EVERYWHERE=everywhere, STAYS=stays, MATRIX_TRANSPOSED=transposed,
        PLUS=plus is not None, **tile_shape(shape),
    )  # fmt: skip


def launch_sum_slots(sequences: int, rows: int, columns: int, call: KernelCall, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the rows that all ranks have sent to this rank with :func:`launch_product_scatter`.

    The result is [``sequences``, ``rows``, ``columns``] in ``dtype``. The sum is computed in fp32, in rank order.
    """
    shape, mailbox = call.shape(dtype), call.mailbox
    out = torch.empty((sequences, rows, columns), dtype=dtype, device=mailbox.status.device)
    sum_slots_kernel[call.grid(out.device)](
        out, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, sequences, rows, columns,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip
    return out


def launch_multicast_sum(rows: int, columns: int, call: KernelCall, dtype: torch.dtype) -> None:
    """Adds up the products of all ranks for this rank's rows through the NVLink switch; sends the sums to all ranks.

    :func:`launch_product_scatter` with ``stays`` computes the products, with the same ``call.epoch``.
    :func:`launch_collect_slots` receives the sums, with the next ``call.epoch``.
    """
    shape, mailbox = call.shape(dtype), call.mailbox
    like = torch.empty(0, dtype=dtype, device=mailbox.status.device)
    multicast_sum_kernel[call.grid(like.device)](
        like, mailbox.multicast, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, rows, columns,
        RANKS=mailbox.ranks, INSTRUCTIONS=None if is_host(like.device) else _add_and_give(dtype),
        BYTES=dtype.itemsize, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip


def _add_and_give(dtype: torch.dtype) -> str:
    """Returns PTX that adds 16 bytes over all memories at address $1, and stores them to all at $2, if $3."""
    kind = {torch.float32: "v4.f32", torch.float16: "v4.f16x2", torch.bfloat16: "v4.bf16x2"}[dtype]
    wide = "" if dtype == torch.float32 else ".acc::f32"
    return f"""{{ .reg .pred p; .reg .b32 w<4>;
        setp.ne.s32 p, $3, 0;
        @p multimem.ld_reduce.relaxed.sys.global.add{wide}.{kind} {{w0, w1, w2, w3}}, [$1];
        @p multimem.st.relaxed.sys.global.{kind} [$2], {{w0, w1, w2, w3}};
        mov.u32 $0, $3; }}"""


def launch_forward_slots(part_LN: Tensor, call: KernelCall) -> None:
    """Sends the contiguous ``part_LN`` to all ranks, which call :func:`launch_collect_slots` to receive it."""
    rows, columns = part_LN.shape
    shape, mailbox = call.shape(part_LN.dtype), call.mailbox
    forward_slots_kernel[call.grid(part_LN.device)](
        part_LN, mailbox.slots, mailbox.arrivals, mailbox.rank, call.epoch, mailbox.capacity, mailbox.most,
        rows, columns,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip


def launch_collect_slots(part_LN: Tensor, call: KernelCall) -> Tensor:
    """Returns the rows that all W ranks have sent with :func:`launch_forward_slots`, [W, L, N] in rank order.

    Each rank's rows have the shape and dtype of ``part_LN``.
    """
    shape, mailbox = call.shape(part_LN.dtype), call.mailbox
    out = part_LN.new_empty((mailbox.ranks, *part_LN.shape))
    collect_slots_kernel[call.grid(out.device)](
        out, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, *part_LN.shape,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip
    return out


def signals_of(sequences: int, rows: int, columns: int, tile: Tile) -> int:
    """Returns the maximum number of signals from one rank to another in a call: one for each tile of the product.

    The product has ``sequences`` x ``rows`` rows; a tile has rows of one sequence.
    """
    return int(sequences * ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns))
