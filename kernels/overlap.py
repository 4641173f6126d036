"""Data of kernels that communicate: measured launch choices, peer memory, and rows of experts, without Triton.

A row of ``overlap.json`` is for one operation, GPU, dtype, number of ranks, and columns and depth of a product; it
applies from its number of rows up to the next row of the same product. A product without a row runs without a measured
choice. ``python -m benchmarks overlap`` writes the rows.

A :class:`Mailbox` contains the addresses of memory that all ranks can write:

    of each rank   2 x W slots     data from the ranks, alternating between two epochs
                   2 x W x most    arrivals: the epoch in which a rank has written a tile, alternating
    of this rank   W ended         words of the host: a rank has ended, so kernels must not wait for it

An *epoch* is the number of a call, from 1, equal on all ranks. Nothing is ever reset, so a late or repeated signal has
an old epoch and no effect.

Each rank waits for every other rank in every call, so no rank signals that it has read a slot: a rank that writes in
epoch e has ended epoch e - 1, which all others began after they had read the slot's tiles of epoch e - 2. An arrival
above e in epoch e means that ranks make different calls.

Experts are numbered over all ranks; rank r owns experts r*X to (r+1)*X. A rank's tokens are sorted by expert, so the
rows for another rank are one run. An owner stores received rows sorted by expert, then by rank:

    rank 0   a a b c c c d     counts [4, 0..]      rank 0 owns a, b    a0 a0 a1 b0 b1 b1
    rank 1   a b b d                                rank 1 owns c, d    c0 c0 c0 d0 d1

Shape suffixes: W ranks, E experts of all ranks, X experts of a rank, T rows of a rank, R rows for the experts of a
rank.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.errors import EngineError

Operation = Literal["gather_product", "product_scatter", "product_sum"]
Way = Literal["fused", "copied", "chunks", "collectives"]
IN_KERNEL: frozenset[Way] = frozenset({"fused", "copied"})
"""Ways with a communicating kernel; "copied": copy engines send rows to a waiting kernel."""


class ProductSizes(NamedTuple):
    """Sizes of a matrix product [rows, depth] x [depth, columns]; ``rows`` counts the rows of all ranks."""

    rows: int
    columns: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapChoice:
    """Row of ``overlap.json``: the fastest measured way to overlap a matrix product with its communication.

    It applies to products with exactly ``columns`` columns and depth ``depth``, and with at least ``rows`` rows.
    """

    operation: Operation
    device: str
    """Glob pattern for the GPU name, as ``device_name`` returns it."""
    dtype: str
    ranks: int
    rows: int
    """Minimum number of rows to which the choice applies."""
    columns: int
    depth: int
    way: Way
    speedup: float
    """Time of the fastest implementation without a communicating kernel divided by that of the fastest with one."""
    tile: tuple[int, int, int, int, int] | None = None
    """Tile (rows, columns, depth, warps, stages); None: the default tile."""

    @property
    def fuses(self) -> bool:
        """True if a kernel multiplies while it communicates."""
        return self.way in IN_KERNEL


class OverlapChoices:
    """Rows of ``overlap.json`` for one type of GPU and one number of ranks."""

    def __init__(self, rows: Iterable[OverlapChoice]) -> None:
        self.rows = tuple(rows)

    def find(self, operation: Operation, sizes: ProductSizes, dtype: torch.dtype) -> OverlapChoice | None:
        """Returns the choice for ``operation`` on a product of ``sizes`` in ``dtype``; None if there is none.

        Among the choices with the columns and depth of ``sizes``, it has the largest ``rows`` up to ``sizes.rows``.
        """
        product = (sizes.columns, sizes.depth)
        held = [
            row for row in self._of(operation, dtype) if (row.columns, row.depth) == product and row.rows <= sizes.rows
        ]
        return max(held, key=lambda row: row.rows, default=None)

    def may_fuse(
        self, operation: Operation, rows: int, dtype: torch.dtype, *, columns: int | None = None,
        depth: int | None = None,
    ) -> bool:  # fmt: skip
        """Returns True if a kernel that multiplies while it communicates may be the fastest for ``operation``.

        The product has ``rows`` rows. For ``columns`` or ``depth`` of None, True means that such a kernel is the
        fastest at one measured size or more.
        """
        products = {
            ProductSizes(rows, row.columns, row.depth)
            for row in self._of(operation, dtype)
            if row.columns == (columns or row.columns) and row.depth == (depth or row.depth)
        }
        found = (self.find(operation, sizes, dtype) for sizes in products)
        return any(row is not None and row.fuses for row in found)

    def _of(self, operation: Operation, dtype: torch.dtype) -> list[OverlapChoice]:
        name = str(dtype).removeprefix("torch.")
        return [row for row in self.rows if row.operation == operation and fnmatchcase(name, row.dtype)]


def read_overlap(text: str) -> tuple[OverlapChoice, ...]:
    """Parses JSON text like ``overlap.json``; returns its rows."""
    rows = json.loads(text)["winners"]
    return tuple(OverlapChoice(**(row | {"tile": tuple(row["tile"])} if row.get("tile") else row)) for row in rows)


@cache
def shipped_overlap() -> tuple[OverlapChoice, ...]:
    """Returns the rows of the shipped ``overlap.json``: measured ways to overlap matrix products with communication."""
    return read_overlap((Path(__file__).resolve().parent / "overlap.json").read_text(encoding="utf-8"))


def overlap_choices(device: str, ranks: int) -> OverlapChoices:
    """Returns the rows of the shipped ``overlap.json`` for the GPU named ``device`` and for ``ranks`` ranks."""
    return OverlapChoices(row for row in shipped_overlap() if row.ranks == ranks and fnmatchcase(device, row.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """Memory addresses of the buffers through which the ranks of a parallel axis exchange messages.

    Each rank can write to the buffers of all ranks. The addresses are valid only in the process of ``rank``.
    """

    rank: int
    slots: Tensor
    """Addresses of the slots of each rank, int64 [W]."""
    arrivals: Tensor
    """Memory addresses, int64 [W + 1]: of each rank's arrival signals, then of this rank's flags for ended ranks (int32
    [W]).
    """
    status: Tensor
    """Status word of this rank, int64 [1]: the first missing signal; 0 if all signals have arrived."""
    capacity: int
    """Size of a slot in bytes."""
    most: int
    """Maximum number of tiles that a rank can signal in a call."""
    patience: int
    """Number of polls after which a signal counts as lost."""
    multicast: int = 0
    """Multicast address of the slots of all ranks; 0: no multicast."""

    @property
    def ranks(self) -> int:
        """Number of ranks that exchange messages."""
        return len(self.slots)


class Missing(NamedTuple):
    """First tile that did not arrive: its sender's rank, its number, and the number of the kernel call (``epoch``)."""

    rank: int
    tile: int
    epoch: int


def read_status(word: int) -> Missing | None:
    """Decodes the status word of a :class:`Mailbox`; returns the first missing tile, or None if all arrived."""
    return Missing(word >> 24 & 0xFF, (word & 0xFFFFFF) - 1, word >> 32) if word else None


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Counts of the token rows that each rank sends to each expert.

    All ranks have the same ``counts``. In the properties and methods, "this rank" is ``rank``.
    """

    counts: Tensor
    """Number of rows from each rank to each expert, integers [W, E] on the host."""
    rank: int

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.dim() != 2 or counts.is_floating_point() or counts.shape[1] % len(counts) or counts.min() < 0:
            least = counts.min().item() if counts.numel() else "none"
            raise EngineError(
                f"ExpertRows was given {counts.dtype} counts of shape {list(counts.shape)} with minimum {least}, but "
                "it takes integers of at least 0 in shape [ranks, experts], and experts must be a multiple of ranks; "
                "pass the number of rows from each rank to each expert."
            )

    @property
    def ranks(self) -> int:
        """Number of ranks among which the experts are divided."""
        return len(self.counts)

    @property
    def experts(self) -> int:
        """Number of experts on each rank."""
        return self.counts.shape[1] // self.ranks

    @cached_property
    def sent(self) -> Tensor:
        """Number of rows that this rank sends to each expert, int64 [ranks, experts of a rank]."""
        return self.counts[self.rank].view(self.ranks, -1).long()

    @cached_property
    def received(self) -> Tensor:
        """Number of rows that each rank sends to each of this rank's experts, int64 [ranks, experts of this rank]."""
        return self.counts.view(self.ranks, self.ranks, -1)[:, self.rank].long()

    @property
    def own(self) -> int:
        """Number of rows that this rank sends to all experts."""
        return int(self.sent.sum())

    @property
    def here(self) -> int:
        """Number of rows that this rank's experts receive from all ranks."""
        return int(self.received.sum())

    @property
    def sizes(self) -> Tensor:
        """Number of rows that each of this rank's experts receives from all ranks, int64 [experts of this rank]."""
        return self.received.sum(0)

    def most_rows(self) -> int:
        """Returns the largest number of rows from one rank to the experts of one rank."""
        return int(self.counts.view(self.ranks, self.ranks, -1).sum(2).max())

    def most_tiles(self, height: int) -> int:
        """Returns the maximum, over all pairs of ranks, of the tiles from one to the experts of the other; at least 1.

        A tile is a run of at most ``height`` rows for one expert.
        """
        tiles = -(-self.counts.view(self.ranks, self.ranks, -1) // height)
        return max(1, int(tiles.sum(2).max()))

    def source_tiles(self, height: int, *, sends: bool) -> Tensor:
        """Divides this rank's rows into tiles of at most ``height`` rows for one expert.

        Returns a table on the host, int32 [n, 6]. Its columns are peer rank, tile number for this peer, expert, first
        row among the rows for this peer, number of rows, and first row among all of this rank's rows.

        ``sends`` True: peers are in the order of sending, from ``rank`` + 1 upward; False: in the order in which their
        results come back, from ``rank`` downward.
        """
        starts = (self.sent.flatten().cumsum(0) - self.sent.flatten()).view_as(self.sent)
        return self._tiles(self.sent, starts, height, sends)

    def owner_tiles(self, height: int, *, sends: bool) -> Tensor:
        """Divides the rows that all ranks send to this rank's experts into tiles of at most ``height`` rows.

        Returns a table like :meth:`source_tiles`, but the peer is the rank that sent the rows, and the last column is
        the first row in the result of :meth:`by_expert`. ``sends`` True: the tiles are in the order of sending results
        back; False: in the order of receiving rows.
        """
        return self._tiles(self.received, self._starts(), height, sends)

    def by_expert(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the rows received from all ranks to one tensor [R, ..], sorted by expert, then by rank.

        ``parts``: one tensor [rows, ..] from each rank, in rank order, each sorted by expert.
        """
        pieces = [torch.split(part, rows.tolist()) for part, rows in zip(parts, self.received, strict=True)]
        return torch.cat([piece[expert] for expert in range(self.experts) for piece in pieces])

    def by_rank(self, rows: Tensor) -> list[Tensor]:
        """Splits ``rows`` [R, ..] of this rank's experts by source rank; returns one tensor per rank.

        ``rows`` has the order of the result of :meth:`by_expert`.
        """
        pieces = torch.split(rows, self.received.t().flatten().tolist())
        return [torch.cat(pieces[rank :: self.ranks]) for rank in range(self.ranks)]

    def to_owners(self, tokens: Tensor) -> list[Tensor]:
        """Splits this rank's ``tokens`` [T, ..] by the rank of their experts; returns one tensor per rank.

        ``tokens`` is sorted by expert.
        """
        return list(torch.split(tokens, self.sent.sum(1).tolist()))

    def _starts(self) -> Tensor:
        """Returns the index of the first received row of each rank and expert, [W, X]."""
        sizes = self.received.t().flatten()
        return (sizes.cumsum(0) - sizes).view(self.experts, self.ranks).t()

    def _tiles(self, rows: Tensor, starts: Tensor, height: int, sends: bool) -> Tensor:
        step = torch.arange(self.ranks)
        peers = (self.rank + 1 + step) % self.ranks if sends else (self.rank - step) % self.ranks
        rows, starts = rows[peers], starts[peers]
        tiles = -(-rows // height)
        tiles[:, 0] += tiles.sum(1) == 0  # a signal without rows: each rank waits for all others in every call
        first = tiles.flatten().cumsum(0) - tiles.flatten()
        chunk = torch.repeat_interleave(torch.arange(tiles.numel()), tiles.flatten())
        peer, expert = chunk // self.experts, chunk % self.experts
        number = torch.arange(len(chunk))
        before = (number - first[chunk]) * height
        found = (
            peers[peer],
            number - first[peer * self.experts],
            expert,
            (rows.cumsum(1) - rows).flatten()[chunk] + before,
            (rows.flatten()[chunk] - before).clamp(max=height),
            starts.flatten()[chunk] + before,
        )
        return torch.stack(found, 1).int()
