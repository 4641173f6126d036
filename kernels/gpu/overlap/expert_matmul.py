"""All-to-all and products of experts, in one kernel for the dispatch and two for the return.

    dispatch   push rows to 1, 2, 3, own │ own x B │ 3 x B │ of 2 │ of 1              a tile after its rows have arrived
    return     tiles of 1 │ of 2 │ of 3 │ own │ collect rows from own, 3, 2, 1          a finished tile is sent at once

Each expert has a matrix. A tile is within the rows of one rank for one expert, so it waits for one signal, and these
kernels call the products of ``kernels/gpu/matmul``. :class:`ExpertRows` makes the table of tiles. Two ranks without
rows for each other still exchange a signal of an empty tile: slots may be overwritten only because every rank waits for
all others in each call (:mod:`engine.kernels.overlap`). Numbers that change from call to call are not specialised,
because other ranks wait while a rank compiles.

Shape suffixes: T rows of a rank, R rows for the experts of a rank, X experts of a rank, K the dim that is summed over,
N columns. ``launches`` describes the rules for all kernels that communicate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import tile_shape
from engine.kernels.gpu.matmul import as_it_lies, load_tile, store_tile, tile_finish, tile_place, tile_product
from engine.kernels.gpu.overlap.launches import Half, KernelCall
from engine.kernels.gpu.overlap.signals import arrival_of, came, signal, slot_of
from engine.kernels.overlap import ExpertRows


@triton.jit
def _fields(tiles, index):
    """Loads a row of the table: other rank, tile number, expert, first row in the slot, rows, first row of this
    rank."""
    place = tiles + index * 6
    return (
        tl.load(place), tl.load(place + 1), tl.load(place + 2),
        tl.cast(tl.load(place + 3), tl.int64), tl.load(place + 4), tl.cast(tl.load(place + 5), tl.int64),
    )  # fmt: skip


@triton.jit
def _push_rows(
    tokens, sent, tiles, slots, arrivals, rank, epoch, capacity, most, K,
    RANKS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes the ``tiles`` tiles of ``tokens`` [T, K] in the table ``sent`` into this rank's slots."""
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        target, tile, _, there, rows, here = _fields(sent, index)
        slot = slot_of(slots, target, rank, epoch, capacity, RANKS, tokens) + there * K
        if rows > 0:
            for column in range(0, K, BK):
                values = load_tile(tokens + here * K, 0, column, rows, K, BM, BK, False, False)
                store_tile(slot, values, 0, column, rows, K, BM, BK, False)
        signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)


@triton.jit(do_not_specialize=("sent_tiles", "received_tiles", "rank", "epoch"))
def dispatch_product_kernel(
    tokens, matrices, out, sent, received, sent_tiles, received_tiles,
    slots, arrivals, status, rank, epoch, patience, capacity, most, N, K,
    RANKS: tl.constexpr, PUSHES: tl.constexpr, MULTIPLIES: tl.constexpr, MATRIX_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sends rows of ``tokens`` [T, K] to the ranks of their experts, and multiplies the rows that this rank receives.

    It writes ``out`` [R, N]: received rows times their experts' matrices in ``matrices`` [X, K, N]. ``sent`` and
    ``received`` are tables of ``sent_tiles`` and ``received_tiles`` tiles (:class:`ExpertRows`). PUSHES: sends;
    MULTIPLIES: receives and multiplies. ``epoch``: call number; the other arguments from ``slots`` to ``most`` come
    from a :class:`Mailbox`.
    """
    if PUSHES:
        _push_rows(tokens, sent, sent_tiles, slots, arrivals, rank, epoch, capacity, most, K, RANKS, BM, BK)
    if MULTIPLIES:
        columns = tl.cdiv(N, BN)
        for index in range(tl.program_id(0), received_tiles * columns, tl.num_programs(0)):
            place, tile_column = tile_place(index, received_tiles, columns, GROUP)
            source, tile, expert, there, rows, here = _fields(received, place)
            has_come = came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS)
            if has_come & (rows > 0):
                column = tile_column * BN
                slot = slot_of(slots, rank, source, epoch, capacity, RANKS, tokens) + there * K
                matrix = matrices + tl.cast(expert, tl.int64) * K * N
                sums = tile_product(
                    slot, matrix, 0, column, rows, N, K, False, MATRIX_TRANSPOSED, PRECISION, BM, BN, BK, False
                )
                target = out + here * N
                tile_finish(
                    sums, None, None, None, target, 0, column, rows, N, "none", False, False, False, BM, BN, False
                )


@triton.jit(do_not_specialize=("received_tiles", "rank", "epoch"))
def product_return_kernel(
    whole, matrices, out, received, received_tiles,
    slots, arrivals, status, rank, epoch, patience, capacity, most, N, K,
    RANKS: tl.constexpr, MATRIX_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies rows of ``whole`` [R, K] by the matrices of their experts; sends the products to the tokens' ranks.

    ``matrices`` is [X, K, N]; ``received`` is a table of tiles (:class:`ExpertRows`). ``out`` is not
    written; it provides the products' dtype. ``slots`` to ``most``: from a :class:`Mailbox`; ``epoch``: call number.
    """
    columns = tl.cdiv(N, BN)
    for index in range(tl.program_id(0), received_tiles * columns, tl.num_programs(0)):
        place, tile_column = tile_place(index, received_tiles, columns, GROUP)
        source, tile, expert, there, rows, here = _fields(received, place)
        if rows > 0:
            column = tile_column * BN
            matrix = matrices + tl.cast(expert, tl.int64) * K * N
            sums = tile_product(
                whole + here * K, matrix, 0, column, rows, N, K,
                False, MATRIX_TRANSPOSED, PRECISION, BM, BN, BK, False,
            )  # fmt: skip
            slot = slot_of(slots, source, rank, epoch, capacity, RANKS, out) + there * N
            tile_finish(sums, None, None, None, slot, 0, column, rows, N, "none", False, False, False, BM, BN, False)
        signal(arrival_of(arrivals, source, rank, tile * columns + tile_column, epoch, most, RANKS), epoch)


@triton.jit(do_not_specialize=("sent_tiles", "rank", "epoch"))
def collect_rows_kernel(
    out, sent, sent_tiles, slots, arrivals, status, rank, epoch, patience, capacity, most, N,
    RANKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Copies into ``out`` [T, N] the rows that the experts' ranks have returned to this rank.

    ``sent`` is a table of tiles of this rank's T rows (:class:`ExpertRows`). ``slots`` to ``most``: from a
    :class:`Mailbox`; ``epoch``: call number.
    """
    columns = tl.cdiv(N, BN)
    for index in range(tl.program_id(0), sent_tiles * columns, tl.num_programs(0)):
        owner, tile, _, there, rows, here = _fields(sent, index // columns)
        tile_column = index % columns
        number = tile * columns + tile_column
        has_come = came(arrivals, status, rank, owner, number, epoch, patience, most, RANKS)
        if has_come & (rows > 0):
            slot = slot_of(slots, rank, owner, epoch, capacity, RANKS, out) + there * N
            values = load_tile(slot, 0, tile_column * BN, rows, N, BM, BN, False, False)
            store_tile(out + here * N, values, 0, tile_column * BN, rows, N, BM, BN, False)


def launch_dispatch_product(
    tokens_TK: Tensor, matrices_XKN: Tensor, rows: ExpertRows, call: KernelCall, half: Half = "both"
) -> Tensor:
    """Sends rows of ``tokens_TK`` to the ranks of their experts; returns received rows times their expert's matrix, [R,
    N].

    ``tokens_TK`` is contiguous, sorted by expert, in the dtype of ``matrices_XKN``. ``rows``: counts of the sent rows.
    ``half``: "push" only sends, and its result is undefined; "multiply" only receives and multiplies.
    """
    matrices, transposed = as_it_lies(matrices_XKN)
    depth, columns = matrices_XKN.shape[1:]
    shape, mailbox = call.shape(matrices.dtype), call.mailbox
    sent = rows.source_tiles(shape.rows, sends=True).to(tokens_TK.device, non_blocking=True)
    received = rows.owner_tiles(shape.rows, sends=False).to(tokens_TK.device, non_blocking=True)
    out = matrices.new_empty((rows.here, columns))
    dispatch_product_kernel[call.grid(tokens_TK.device)](
        tokens_TK, matrices, out, sent, received, len(sent), len(received),
        mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, columns, depth,
        RANKS=mailbox.ranks, PUSHES=half != "multiply", MULTIPLIES=half != "push", MATRIX_TRANSPOSED=transposed,
        **tile_shape(shape),
    )  # fmt: skip
    return out


def launch_product_return(rows_RK: Tensor, matrices_XKN: Tensor, rows: ExpertRows, call: KernelCall) -> None:
    """Multiplies rows of ``rows_RK`` by the matrices of their experts; sends the products to the tokens' ranks.

    ``rows_RK`` is contiguous and sorted by expert, with the counts ``rows``. :func:`launch_collect_rows` receives
    the products.
    """
    matrices, transposed = as_it_lies(matrices_XKN)
    depth, columns = matrices_XKN.shape[1:]
    shape, mailbox = call.shape(matrices.dtype), call.mailbox
    received = rows.owner_tiles(shape.rows, sends=True).to(rows_RK.device, non_blocking=True)
    product_return_kernel[call.grid(rows_RK.device)](
        rows_RK, matrices, matrices.new_empty(0), received, len(received),
        mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, columns, depth,
        RANKS=mailbox.ranks, MATRIX_TRANSPOSED=transposed, **tile_shape(shape),
    )  # fmt: skip


def launch_collect_rows(columns: int, rows: ExpertRows, call: KernelCall, dtype: torch.dtype) -> Tensor:
    """Returns the rows that the experts' ranks have sent with :func:`launch_product_return`, [T, columns].

    They are in the order of this rank's T tokens.
    """
    shape, mailbox = call.shape(dtype), call.mailbox
    device = mailbox.status.device
    out = torch.empty((rows.own, columns), dtype=dtype, device=device)
    sent = rows.source_tiles(shape.rows, sends=False).to(device, non_blocking=True)
    collect_rows_kernel[call.grid(out.device)](
        out, sent, len(sent), mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, columns,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip
    return out
