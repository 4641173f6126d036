"""Comparisons of state by bit digests: of one rank's state between two updates, and of replicas between ranks.

    update s -> take                         no state may change                           compare -> update s + 1
               digests of all weights, masters and moments                      the first difference is stored

State is compared in every step, because a shard has no replica. Replicas are compared by short digests; a majority
identifies the wrong one.

    data ranks         tensors with ``StateTensor.equal``: everything at ZeRO 0, weights at ZeRO 1 and 2
    shard groups       all other tensors, if there are several groups: equal shards of all groups
    expert ranks       the same for parameters of experts, over the data ranks with equal experts
    replica's ranks    weights replicated over tensor ranks, and weights shared by pipeline ranks (ties)

Weights of a replica are compared by parameter; at ZeRO 3 digests of shards are first summed over dp. The host reads
results only every ``integrity.every`` steps.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.integrity.finding import Finding, digest_length, flipped_places, odd_factors, short_digest, write_digest
from engine.parallel.comm.agreement import gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis
from engine.parallel.shard_table import ShardRow, ShardTable
from engine.zero.flat_buckets import FlatBucket
from engine.zero.state.state_inventory import StateInventory, StateTensor

INTEGRITY = "integrity"
_PIECE = 1 << 20  # elements with int64 copies at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DataCopies:
    """Comparison of weights and optimizer state that several data ranks store as equal copies."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self._compared: list[_AxisCopies] = []

    def compare(self, held: Sequence[StateTensor], digests: Sequence[Tensor]) -> Tensor:
        """Compares tensors that must be equal on several ranks; returns a 0-dim bool tensor, True if any differ.

        All-gathers 16 bytes for each tensor and rank.

        Args:
            held: weights and optimizer state of this rank; tensors without a copy on another rank are skipped.
            digests: digest (integer sums over all bytes) of each tensor of ``held``.
        """
        pairs = dict[Axis, list[tuple[StateTensor, Tensor]]]()
        for each, digest in zip(held, digests, strict=True):
            if self.comm.grid.size(each.copies) > 1:
                pairs.setdefault(each.copies, []).append((each, digest))
        self._compared = [_AxisCopies(pairs[axis], self.comm, axis) for axis in sorted(pairs)]
        if not self._compared:
            return torch.zeros((), dtype=torch.bool, device=self.device)
        return torch.stack([each.differ for each in self._compared]).any()

    def findings(self, update: int) -> list[Finding]:
        """Returns a report for each tensor that differed between ranks in the last ``compare``. All compared ranks get
        the same reports.

        All-gathers the full digests of these tensors.

        Args:
            update: number of updates at the check before this one; each report stores it.
        """
        return [finding for each in self._compared for finding in each.findings(update, self.device)]


class _AxisCopies:
    """Comparison of the tensors that are equal along one axis, with several ranks; all-gathers their digests."""

    def __init__(self, pairs: Sequence[tuple[StateTensor, Tensor]], comm: Comm, axis: Axis) -> None:
        self._pairs, self._comm, self._axis = pairs, comm, axis
        self._table = _gathered(torch.cat([short_digest(digest) for _, digest in pairs]), comm, axis)
        self.differ = (self._table != self._table[0]).any()
        """True if copies differ, 0-dim on the device."""

    def findings(self, update: int, device: torch.device) -> list[Finding]:
        """Returns the differences, equal on all ranks of the axis."""
        found, columns = list[Finding](), self._table.view(len(self._table), -1, 2).cpu()
        for place, (each, digest) in enumerate(self._pairs):
            values = [tuple(row) for row in columns[:, place].tolist()]
            if len(set(values)) > 1:
                digests = gather_from_all(digest, self._comm, device, INTEGRITY, self._axis)
                found += list(self._named(each, values, digests, update))
        return found

    def _named(self, held: StateTensor, values: Sequence[Hashable], digests: Tensor, update: int) -> Iterator[Finding]:
        odd, most = odd_ones(values)
        peers = self._comm.grid.peers(self._axis)
        differing = next(index for index in range(len(values)) if values[index] != values[most])
        difference = (digests[differing] - digests[most]).tolist()
        for place in flipped_places(difference, held.tensor)[:1]:
            one = Finding.at_rest(held, place, update)
            one = replace(one, bit=None)  # several updates may have added to the difference
            yield copies_finding(one, [peers[index] for index in odd], peers)


class ReplicaCopies:
    """Comparison of weights that must be equal on several tensor or pipeline ranks of a replica (one full model)."""

    def __init__(self, table: ShardTable, buckets: Sequence[FlatBucket], comm: Comm) -> None:
        self._comm, self._buckets = comm, buckets
        tp = comm.grid.tp > 1
        self._rows = [row for row in table if len(row.owners) > 1 or (row.equal_on_tensor_ranks and tp)]
        self._rows = [row for row in self._rows if row.trainable]
        self._places = {slot.name: (flat, slot) for flat in buckets for slot in flat.bucket.slots}
        self._sharded = any(flat.sharded for flat in buckets)
        self._found = torch.zeros(0)

    def compare(self, device: torch.device) -> Tensor:
        """Compares weights that must be equal on several tensor or pipeline ranks of a replica (one full model);
        returns a 0-dim bool tensor, True if any differ.

        All-gathers digests (sums over a weight's elements), 8 bytes for each weight and rank, over axis "replica". In
        ZeRO 3, digests of shards are first all-reduced over the data ranks. ``device`` is the device of the digests and
        the result.
        """
        if not self._rows or self._comm.grid.size("replica") == 1:
            return torch.zeros((), dtype=torch.bool, device=device)
        own = torch.stack([self._digest(row.name, device) for row in self._rows])
        if self._sharded:
            self._comm.all_reduce(own, self._comm.grid.sharding, INTEGRITY).wait()
        self._found = _gathered(own, self._comm, "replica")
        differs = [
            (self._found[members, column] != self._found[members[0], column]).any()
            for column, row in enumerate(self._rows)
            for members in self._members(row)
        ]
        return torch.stack(differs).any()

    def findings(self, update: int) -> list[Finding]:
        """Returns a report for each weight that differed between ranks in the last ``compare``. All ranks of a replica
        get the same reports.

        Args:
            update: number of updates at the check before this one; each report stores it.
        """
        found, peers, table = [], self._comm.grid.peers("replica"), self._found.tolist()
        for column, row in enumerate(self._rows if self._found.numel() else ()):
            for members in self._members(row):
                values = [table[index][column] for index in members]
                if len(set(values)) > 1:
                    one = Finding(how="copies", kind="weight", name=row.name, update=update)
                    odd, ranks = odd_ones(values)[0], [peers[index] for index in members]
                    found.append(copies_finding(one, [ranks[index] for index in odd], ranks))
        return found

    def _members(self, row: ShardRow) -> list[list[int]]:
        """Returns groups of indices in the replica with the same elements of a parameter."""
        tp = self._comm.grid.tp
        if row.equal_on_tensor_ranks:
            return [[stage * tp + index for stage in row.owners for index in range(tp)]]
        return [[stage * tp + index for stage in row.owners] for index in range(tp)]

    def _digest(self, name: str, device: torch.device) -> Tensor:
        """Returns the sum of this rank's elements of a parameter as integers, each times the odd factor of its
        index."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        if name not in self._places:
            return total
        flat, slot = self._places[name]
        part = flat.owned if flat.sharded else slice(0, flat.bucket.elements)
        start, stop = max(slot.start, part.start), min(slot.stop, part.stop)
        memory = (flat.kept if flat.sharded else flat.params).detach()
        whole = memory.view(_INTEGERS[memory.element_size()])
        for first in range(start, stop, _PIECE):
            last = min(first + _PIECE, stop)
            values = whole[first - part.start : last - part.start].to(device, torch.int64)
            total += (values * odd_factors(first - slot.start, last - slot.start, device)).sum()
        return total


def odd_ones(values: Sequence[Hashable]) -> tuple[list[int], int]:
    """Returns (indices of the elements of ``values`` that differ from the majority, index of one element of the
    majority).

    Without a majority, returns (all indices, index of one most frequent value).
    """
    (value, count), *_ = Counter(values).most_common()
    most = values.index(value)
    if 2 * count <= len(values):
        return list(range(len(values))), most
    return [index for index, other in enumerate(values) if other != value], most


def copies_finding(one: Finding, odd: Sequence[int], ranks: Sequence[int]) -> Finding:
    """Returns a copy of the report ``one`` with ``odd`` as the faulty ranks; ``ranks``: all compared ranks."""
    values = one.to_json() | {"how": "copies", "ranks": odd, "others": [rank for rank in ranks if rank not in odd]}
    return Finding.from_json(values)


def _gathered(own: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """All-gathers ``own`` over an axis into rows on the device; the host does not wait."""
    table = own.new_zeros(comm.grid.size(axis), own.numel())
    here = comm.grid.index(axis)
    table[here] = own
    comm.all_gather(table.view(-1), table[here], axis, INTEGRITY).wait()
    return table


class Writes:
    """Snapshot of torch's version counters of some tensors. A write by an operator increases a counter; a flipped bit
    does not.

    A replaced tensor object counts as written; a write through ``parameter.data`` does not.
    """

    def __init__(self, held: Sequence[StateTensor]) -> None:
        self._seen = [(each.tensor, _versions(each)) for each in held]

    def since(self, held: Sequence[StateTensor]) -> list[bool] | None:
        """Returns, for each tensor of ``held``, True if it was written or replaced since the snapshot.

        Returns None if the number of tensors has changed.
        """
        if len(held) != len(self._seen):
            return None
        return [
            before is not each.tensor or versions != _versions(each)
            for each, (before, versions) in zip(held, self._seen, strict=True)
        ]


def _versions(held: StateTensor) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor._version for tensor in (held.tensor, *held.writers))


class AtRest:
    """Digests of this rank's weights, fp32 masters and moments after each update; a changed digest before the next
    update shows corrupted memory.
    """

    def __init__(self, inventory: StateInventory, device: torch.device) -> None:
        self._inventory, self._device = inventory, device
        self._lasting = [
            each
            for each in (*inventory.weights(), *inventory.masters())
            if each.tensor.numel() and not each.tensor.is_meta
        ]
        self.held: list[StateTensor] = []
        self._writes: Writes | None = None
        self._taken = self._now = self._fault = torch.zeros(0, dtype=torch.int64, device=device)
        self._update = torch.full((), -1, dtype=torch.int64, device=device)
        """Number of the update before the difference in ``_fault``; -1: no difference."""
        self._found: list[Finding] = []
        self._taken_after = 0

    def take(self, update: int) -> None:
        """Stores the digests of all weights, masters and moments of this rank after update number ``update``."""
        held = self._all()
        sizes = [digest_length(each.tensor) for each in held]
        if sizes != [digest_length(each.tensor) for each in self.held]:
            self._keep_found()
            self._taken = torch.zeros(sum(sizes), dtype=torch.int64, device=self._device)
            self._now, self._fault = torch.zeros_like(self._taken), torch.zeros_like(self._taken)
        self.held, self._taken_after = held, update
        self._write(self._taken, [True] * len(held))
        self._writes = Writes(held)

    def _all(self) -> list[StateTensor]:
        return [*self._lasting, *self._inventory.moments()]

    def compare(self) -> None:
        """Compares the digests of the last ``take`` with digests of the current tensors, without host synchronization.

        ``noticed`` has the result. Tensors that operators wrote since then are skipped. Differences that an earlier
        call has stored are not overwritten.
        """
        held = self._all()
        written = self._writes.since(held) if self._writes is not None else None
        if written is None:
            return
        self._now.copy_(self._taken)
        self._write(self._now, [not each for each in written])
        difference = self._now.sub_(self._taken)
        # selects on the device: the host must not wait, and later differences may follow from the first
        first = (difference != 0).any() & (self._update < 0)
        self._fault = torch.where(first, difference, self._fault)
        self._update = torch.where(first, self._taken_after, self._update)

    @property
    def noticed(self) -> Tensor:
        """0-dim bool tensor on the device: True if ``compare`` has found a difference."""
        return (self._update >= 0) | bool(self._found)

    def findings(self, rank: int) -> list[Finding]:
        """Returns reports of the corruption that ``compare`` has found since the last call of this method, with
        ``rank`` as the faulty rank. The host waits for the device.
        """
        self._keep_found()
        found, self._found = self._found, []
        return [finding.of(rank) for finding in found]

    def forget(self) -> None:
        """Drops all digests and recorded differences."""
        self.held, self._writes, self._found = [], None, []
        self._update.fill_(-1)

    def digests(self) -> list[Tensor]:
        """Returns the digests of the last ``take``, one for each weight, master and moment of this rank."""
        return self._parts(self._taken)

    def _write(self, target: Tensor, wanted: Sequence[bool]) -> None:
        for each, out, now in zip(self.held, self._parts(target), wanted, strict=True):
            if now:
                write_digest(each.tensor, out)

    def _parts(self, digests: Tensor) -> list[Tensor]:
        """Returns the digest of each tensor."""
        return list(torch.split(digests, [digest_length(each.tensor) for each in self.held]))

    def _keep_found(self) -> None:
        """Converts a difference to findings while its tensors are still known."""
        update = int(self._update)
        if update < 0:
            return
        self._update = torch.full_like(self._update, -1)
        for each, difference in zip(self.held, self._parts(self._fault.cpu()), strict=True):
            for place in flipped_places(difference.tolist(), each.tensor):
                self._found.append(Finding.at_rest(each, place, update))
