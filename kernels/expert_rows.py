"""Which rows travel between ranks that own experts, and the tiles in which they do.

Experts are numbered over all ranks; rank r owns experts r*X to (r+1)*X. A rank's tokens are sorted by expert, so what
it sends to another rank is one run of its rows. An owner keeps what has come sorted by expert, then by rank:

    rank 0   a a b c c c d     counts [4, 0..]      rank 0 owns a, b    a0 a0 a1 b0 b1 b1
    rank 1   a b b d                                rank 1 owns c, d    c0 c0 c0 d0 d1

Shape suffixes: W ranks, E experts of all ranks, X experts of a rank, T rows of a rank, R rows that its experts get.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.errors import EngineError

TILE_FIELDS = 6
"""Numbers that describe a tile: the other rank, its number between the two, the expert among those of its owner, its
first row among what travels between the two, its rows, and its first row among all those of this rank."""


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """How many rows every rank sends to every expert, as ``rank`` sees it. All ranks know all counts."""

    counts: Tensor
    """Integers [W, E] on the host."""
    rank: int

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.dim() != 2 or counts.is_floating_point() or counts.shape[1] % len(counts) or counts.min() < 0:
            raise EngineError(
                f"counts of rows are {counts.dtype} {tuple(counts.shape)}, but every rank has a number from 0 on for "
                "each expert, and all ranks own equally many experts; pass integers [ranks, experts]."
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    @property
    def experts(self) -> int:
        """Experts of a rank."""
        return self.counts.shape[1] // self.ranks

    @cached_property
    def sent(self) -> Tensor:
        """Rows that this rank sends to each expert of each rank, [W, X]."""
        return self.counts[self.rank].view(self.ranks, -1).long()

    @cached_property
    def received(self) -> Tensor:
        """Rows that this rank's experts get from each rank, [W, X]."""
        return self.counts.view(self.ranks, self.ranks, -1)[:, self.rank].long()

    @property
    def own(self) -> int:
        """T: rows of this rank."""
        return int(self.sent.sum())

    @property
    def here(self) -> int:
        """R: rows that its experts get."""
        return int(self.received.sum())

    @property
    def sizes(self) -> Tensor:
        """Rows of each of its experts, [X]."""
        return self.received.sum(0)

    def most_rows(self) -> int:
        """Most rows that any rank sends to another."""
        return int(self.counts.view(self.ranks, self.ranks, -1).sum(2).max())

    def most_tiles(self, height: int) -> int:
        """Most tiles of ``height`` rows that any rank sends to another; without rows it still sends one signal."""
        tiles = -(-self.counts.view(self.ranks, self.ranks, -1) // height)
        return max(1, int(tiles.sum(2).max()))

    def source_tiles(self, height: int, *, sends: bool) -> Tensor:
        """Tiles of this rank's own rows, int32 [n, 6]: what it ``sends`` to the owners, or gets back from them."""
        starts = (self.sent.flatten().cumsum(0) - self.sent.flatten()).view_as(self.sent)
        return self._tiles(self.sent, starts, height, sends)

    def owner_tiles(self, height: int, *, sends: bool) -> Tensor:
        """Tiles of the rows that this rank's experts get, int32 [n, 6], or that it ``sends`` back."""
        return self._tiles(self.received, self._starts(), height, sends)

    def by_expert(self, parts: Sequence[Tensor]) -> Tensor:
        """What has come from each rank, [rows, ..] each, sorted by expert, then by rank: [R, ..]."""
        pieces = [torch.split(part, rows.tolist()) for part, rows in zip(parts, self.received, strict=True)]
        return torch.cat([piece[expert] for expert in range(self.experts) for piece in pieces])

    def by_rank(self, rows: Tensor) -> list[Tensor]:
        """The opposite of :meth:`by_expert`."""
        pieces = torch.split(rows, self.received.t().flatten().tolist())
        return [torch.cat(pieces[rank :: self.ranks]) for rank in range(self.ranks)]

    def to_owners(self, tokens: Tensor) -> list[Tensor]:
        """The rows of each owner in ``tokens`` [T, ..], which are sorted by expert."""
        return list(torch.split(tokens, self.sent.sum(1).tolist()))

    def _starts(self) -> Tensor:
        """First row of each rank and expert among all that come, [W, X]."""
        sizes = self.received.t().flatten()
        return (sizes.cumsum(0) - sizes).view(self.experts, self.ranks).t()

    def _tiles(self, rows: Tensor, starts: Tensor, height: int, sends: bool) -> Tensor:
        step = torch.arange(self.ranks)
        peers = (self.rank + 1 + step) % self.ranks if sends else (self.rank - step) % self.ranks
        rows, starts = rows[peers], starts[peers]
        tiles = -(-rows // height)
        tiles[:, 0] += tiles.sum(1) == 0  # a signal without rows: in every call each rank waits for every other one
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
