"""Periodic comparison of weights that several ranks store, without extra collectives.

    digest     a number of each rank, which is 0 in the sum over all ranks as long as copies are equal: the copies of a
               weight have factors whose sum is 0. It travels in the control sum
    compare    only if the sum is another number: which weight differs

Copies are weights that tensor ranks hold whole, weights that stages share, and what data ranks hold alike: everything
below ZeRO 3, the shards of all shard groups at ZeRO 3. They drift apart where code computes something else on one rank:
by numbers of a generator of its own, by the name of its host, by a write that only one rank makes.
"""

import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.parallel.comm.agreement import bit_sum, gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.grid import Axis
from engine.parallel.shard_table import ShardRow, ShardTable
from engine.zero.flat_buckets import FlatBucket

logger = logging.getLogger("trine")

COPIES = "copies"
_PRIME = (1 << 31) - 1
"""Digests are numbers modulo this, so that fp64 adds them exactly over any number of ranks."""


class _Part(NamedTuple):
    """Part on this rank of a weight that other ranks hold too."""

    name: str
    memory: FlatBucket
    start: int
    stop: int
    factor: int


class WeightCopies:
    """Check that the copies of each weight in ``buckets`` on several ranks are bitwise equal."""

    def __init__(self, table: ShardTable, buckets: Sequence[FlatBucket], comm: Comm) -> None:
        self._comm, self._told = comm, False
        self._rows = {row.name: row for row in table}
        self._parts = [part for flat in buckets for part in self._of_bucket(flat)]

    def _of_bucket(self, flat: FlatBucket) -> Iterator[_Part]:
        held = flat.owned if flat.sharded else slice(0, flat.bucket.elements)
        grid = self._comm.grid
        alike = _equal_over(flat)
        for slot in flat.bucket.slots:
            start, stop = max(slot.start, held.start) - held.start, min(slot.stop, held.stop) - held.start
            index, count = self._place(self._rows[slot.name])
            salt = zlib.crc32(slot.name.encode()) | 1
            factor = salt * _factor(index, count) + 3 * salt * _factor(grid.index(alike), grid.size(alike))
            if count > 1 or grid.size(alike) > 1:
                yield _Part(slot.name, flat, start, max(start, stop), factor % _PRIME)

    def _place(self, row: ShardRow) -> tuple[int, int]:
        """Returns this rank's number among ranks of its replica with equal elements, and the number of these ranks."""
        coord, tp = self._comm.grid.coord(), self._comm.grid.tp
        owner, owners = row.owners.index(coord.pp), len(row.owners)
        return (owner * tp + coord.tp, owners * tp) if row.equal_on_tensor_ranks else (owner, owners)

    @torch.no_grad()
    def digest(self) -> Tensor | float:
        """Returns a digest (fp64 scalar) of the weights on this rank that other ranks store too, or 0.0 without such
        weights. If all copies are equal, the digests of all ranks sum to 0 modulo 2^31 - 1.
        """
        if not self._parts:
            return 0.0
        # factors are numbers of the host: a tensor of them would be copied to the device, for which the host waits
        sums = torch.stack([_bits(part).remainder(_PRIME) * part.factor for part in self._parts])
        return sums.remainder(_PRIME).sum().remainder(_PRIME).double()

    @torch.no_grad()
    def compare(self, total: float, sent: Tally) -> None:
        """Logs on rank 0 the first weight with differing copies. Does nothing after the first log, or if ``total``, the
        sum of all digests, is 0 modulo 2^31 - 1. Every rank must call it.

        Sends at most 8 bytes per weight over tp and over each data axis, and 16 bytes over the world, label "copies".
        Counts them in ``sent``.
        """
        if self._told or int(total) % _PRIME == 0:
            return
        self._told = True
        before = self._comm.tally.copy()
        sharded = any(part.memory.sharded for part in self._parts)
        whole_on_tp = [part for part in self._parts if self._rows[part.name].dim is None]
        equal = dict[Axis, list[_Part]]()
        for part in self._parts:
            equal.setdefault(_equal_over(part.memory), []).append(part)
        among_data = max((self._first_differing(axis, equal[axis]) for axis in sorted(equal)), default=0)
        first = torch.tensor([self._first_differing("tp", whole_on_tp, sharded), among_data])
        device = _memory(self._parts[0]).device if self._parts else first.device
        first = first.to(device)
        self._comm.all_reduce(first, "world", COPIES, "max").wait()
        for row in self._comm.tally.since(before).rows():
            sent.add(row)
        if self._comm.grid.rank == 0:
            places = zip(("tensor ranks", "data ranks"), first.tolist(), strict=True)
            found = [
                f"parameter {list(self._rows)[-number]!r} differs between {who}" for who, number in places if number
            ]
            logger.warning(
                "%s, although all of them hold the same weight, so they have computed different gradients or one has "
                "written it; look in the model, its loss and its hooks for what differs from rank to rank: a generator "
                "of random numbers that is seeded by rank, a question for the rank or the host, a write on one rank.",
                " and ".join(found) or "a weight that several stages share differs between them",
            )

    def _first_differing(self, axis: Axis, parts: Sequence[_Part], sharded: bool = False) -> int:
        """Returns the place of the first weight that differs along ``axis``, counted from the end of the table; 0: none
        does."""
        if self._comm.grid.size(axis) == 1 or not parts:
            return 0
        parts = sorted(parts, key=lambda part: part.name)
        own = torch.stack([_bits(part) for part in parts])
        if sharded:  # tensor ranks shard their buckets differently, so whole weights are compared
            self._comm.all_reduce(own, parts[0].memory.bucket.spread.sharding, COPIES).wait()
        table = gather_from_all(own, self._comm, own.device, COPIES, axis)
        differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        names = list(self._rows)
        return max((len(names) - names.index(parts[place].name) for place in differing), default=0)


def _factor(index: int, count: int) -> int:
    """Returns the factor of copy ``index`` of ``count``; the factors sum to 0, and one copy has the factor 0."""
    return 0 if count == 1 else 1 if index < count - 1 else 1 - count


def _equal_over(flat: FlatBucket) -> Axis:
    """Returns the axis along which ranks have equal copies of this rank's part of a bucket."""
    return flat.bucket.spread.shard_copies if flat.sharded else flat.bucket.spread.copies


def _memory(part: _Part) -> Tensor:
    """Returns the memory of this rank's part of a bucket."""
    return part.memory.kept if part.memory.sharded else part.memory.params


def _bits(part: _Part) -> Tensor:
    held = _memory(part)[part.start : part.stop]
    if held.element_size() == 8:  # whose sum could leave 64 bits
        return held.detach().view(torch.int64).remainder(_PRIME).sum()
    return bit_sum(held)
