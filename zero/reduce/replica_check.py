"""Checks of reduced gradients: equality on tensor ranks in the first step, and the origin of a non-finite number.

A plan that calls a parameter replicated, while the model uses it on cut activations, would silently train copies that
drift apart. Their gradients differ between tensor ranks from the first step on, so :class:`ReplicaCheck` compares,
once, a bit sum of every gradient that should be equal. :class:`NonFinite` runs only when a step is skipped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import PlanError
from engine.parallel.comm.agreement import bit_sum, gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.shard_table import ShardTable
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Slot

PLAN_CHECK = "plan check"


class ReplicaCheck:
    """One-time check (``parallel.check_replicas``) before the first update: the reduced gradient of a parameter that
    all tensor ranks store in full must be bitwise equal on them.
    """

    def __init__(self, table: ShardTable, buckets: Sequence[FlatBucket], comm: Comm) -> None:
        # shards of experts are summed over other data ranks
        alike = {row.name for row in table if row.dim is None and not row.experts}
        self.places = [
            (slot.name, flat, overlap(slot, flat.shard))
            for flat in buckets
            for slot in flat.bucket.slots
            if slot.name in alike
        ]
        """Parameters that are still to be compared."""
        self.places.sort(key=lambda place: place[0])
        self._comm = comm

    @torch.no_grad()
    def run(self, sent: Tally) -> PlanError | None:
        """Compares the reduced gradients of replicated parameters across tensor ranks. Returns the same error on all
        tensor ranks, about the first parameter that differs. Returns None if all are equal, or if a gradient is not
        finite.

        Sends one all-reduce over the sharding axis and one all-gather over tp, label "plan check", each with 8 bytes
        per parameter and 8 extra bytes; counts them in ``sent``. Every rank of a stage must call it.
        """
        places = self.places
        before = self._comm.tally.copy()
        grads = [flat.gradient(part) for _, flat, part in places]
        infinite = torch.stack([grad.isfinite().logical_not_().sum() for grad in grads]).sum()
        mine = torch.stack([*map(bit_sum, grads), infinite])
        # sum over shards first: tensor ranks shard their buckets differently, as their cut parameters differ in size
        self._comm.all_reduce(mine, self._comm.grid.sharding, PLAN_CHECK).wait()
        table = gather_from_all(mine, self._comm, mine.device, PLAN_CHECK, "tp")
        for row in self._comm.tally.since(before).rows():
            sent.add(row)
        if table[:, -1].any():
            return None  # non-finite gradients: the step will be skipped, and the next one is compared
        if table.any():
            self.places = []  # a step without any gradient would prove nothing
        differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        if not differing:
            return None
        return PlanError(
            f"parameter {places[differing[0]][0]!r} is on all tensor ranks, but its gradients differ between them, "
            'because the model uses it on sharded activations; give its module the style "partial" in '
            'parallel.tensor_plan, or the style "replicate" to the layers before it.'
        )


def overlap(slot: Slot, shard: slice) -> slice:
    """Returns the bucket elements that are both in ``slot`` (the range of one parameter) and in ``shard``; an empty
    slice if there are none.
    """
    start = max(slot.start, shard.start)
    return slice(start, max(start, min(slot.stop, shard.stop)))


NON_FINITE = "non-finite"


@dataclass(frozen=True, slots=True)
class NonFiniteSource:
    """Result of the search for the origin of a NaN or infinity in a step, the same on all ranks."""

    name: str
    """Name: "the loss", "the weight", "the gradient norm", or the first parameter with a non-finite gradient."""
    ranks: tuple[int, ...]
    """Global ranks with the source; empty if unknown after the sum over data ranks."""

    @property
    def subject(self) -> str:
        """Name of the source for an error message, as "the loss on ranks 0, 3" or "the gradient of 'head.weight'"."""
        what = self.name if self.name.startswith("the ") else f"the gradient of {self.name!r}"
        return f"{what} on rank{'s' * (len(self.ranks) > 1)} {_listed(self.ranks)}" if self.ranks else what


class NonFinite:
    """Search for the origin of a NaN or infinity: the loss, or the first parameter with a non-finite gradient."""

    def __init__(self, table: ShardTable, buckets: Sequence[FlatBucket], comm: Comm, device: torch.device) -> None:
        self._names = [row.name for row in table]
        order = {name: number for number, name in enumerate(self._names)}
        self._places = sorted(
            ((order[slot.name], flat, overlap(slot, flat.shard)) for flat in buckets for slot in flat.bucket.slots),
            key=lambda place: place[0],
        )
        self._comm, self._device = comm, device

    @torch.no_grad()
    def find(self, loss: Tensor, weight: float, own: bool, sent: Tally) -> NonFiniteSource:
        """Returns the source of the NaN or infinity that has caused a skipped step: the sum of loss weights, the loss,
        a parameter's gradient or the gradient norm. All ranks must call it.

        Sends one all-gather of 24 bytes per rank over the world, label "non-finite"; counts it in ``sent``.

        Args:
            loss: this rank's sum of losses, 0-dim.
            weight: sum of loss weights over all ranks.
            own: True if a gradient of this rank was not finite before its reduction.
        """
        before = self._comm.tally.copy()
        first = next((number for number, flat, part in self._places if not flat.gradient(part).isfinite().all()), None)
        absent = len(self._names)
        grid = self._comm.grid
        arose = own or (first is not None and grid.size(grid.sums) == 1)
        mine = torch.tensor(
            [absent if first is None else first, int(arose), int(not loss.isfinite())],
            dtype=torch.int64, device=self._device,
        )  # fmt: skip
        table = gather_from_all(mine, self._comm, self._device, NON_FINITE)
        for row in self._comm.tally.since(before).rows():
            sent.add(row)
        numbers, arisen, losses = (column.tolist() for column in table.unbind(dim=1))
        if not math.isfinite(weight):
            return NonFiniteSource("the weight", ())
        if any(losses):
            return NonFiniteSource("the loss", _ranks(losses))
        lowest = min(numbers)
        return NonFiniteSource(self._names[lowest] if lowest < absent else "the gradient norm", _ranks(arisen))


def _ranks(flags: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank, flag in enumerate(flags) if flag)


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + f" and {len(ranks) - most} more" * (len(ranks) > most)
