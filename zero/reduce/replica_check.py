"""Checks of reduced gradients: equality on tensor ranks in the first step, and the source of a non-finite value.

A plan that calls a parameter replicated, while the model uses it on cut activations, would silently train copies that
drift apart. Their gradients differ between tensor ranks from the first step on, so :class:`ReplicaCheck` compares,
once, a bit sum of every gradient that should be equal. :class:`NonFinite` runs only when a step is skipped.
"""

import math
from collections.abc import Sequence

import torch

from engine.errors import PlanError
from engine.parallel.comm.agreement import bit_sum
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.shard_table import ShardTable
from engine.zero.flat_buckets import FlatBucket
from engine.zero.layout import Slot

PLAN_CHECK = "plan check"


class ReplicaCheck:
    """Check of ``parallel.verify_plan``: runs once, after the first step's gradients are reduced."""

    def __init__(self, table: ShardTable, buckets: Sequence[FlatBucket], comm: Comm, wanted: bool = True) -> None:
        alike = {row.name for row in table if row.dim is None} if wanted and comm.grid.tp > 1 else set()
        self._places = [
            (slot.name, flat, overlap(slot, flat.shard))
            for flat in buckets
            for slot in flat.bucket.slots
            if slot.name in alike
        ]
        self._places.sort(key=lambda place: place[0])
        self._comm = comm

    @torch.no_grad()
    def run(self, sent: Tally) -> PlanError | None:
        """Return the error found, the same on every tensor rank; ``sent`` gets the traffic, which the step leaves out.

        One all-reduce over dp and one all-gather over tp, label "plan check", 8 bytes for each parameter and 8 more;
        every rank of a stage takes part, also one whose step has failed.
        """
        places = self._places
        if not places:
            return None
        before = self._comm.tally.copy()
        grads = [flat.gradient(part) for _, flat, part in places]
        infinite = torch.stack([grad.isfinite().logical_not_().sum() for grad in grads]).sum()
        mine = torch.stack([*map(bit_sum, grads), infinite])
        # sum over dp first: tensor ranks shard their buckets differently, because their cut parameters differ in size
        self._comm.all_reduce(mine, "dp", PLAN_CHECK).wait()
        table = torch.empty((self._comm.grid.tp, len(mine)), dtype=mine.dtype, device=mine.device)
        self._comm.all_gather(table.view(-1), mine, "tp", PLAN_CHECK).wait()
        for row in self._comm.tally.since(before).rows():
            sent.add(row)
        if table[:, -1].any():
            return None  # non-finite gradients: the step will be skipped, and the next one is compared
        if table.any():
            self._places = []  # a step without any gradient would prove nothing
        differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        if not differing:
            return None
        return PlanError(
            f"parameter {places[differing[0]][0]!r} is held by all tensor ranks, but its gradients differ between "
            'them: the model uses it on cut activations; give its module the style "partial" in parallel.tensor_plan, '
            'or the style "replicate" to the layers before it.'
        )


def overlap(slot: Slot, shard: slice) -> slice:
    """Return the elements of a slot that lie in ``shard``; an empty slice if none do."""
    start = max(slot.start, shard.start)
    return slice(start, max(start, min(slot.stop, shard.stop)))


NON_FINITE = "non-finite"


class NonFinite:
    """Finds the first parameter, in the order of the plan's table, whose reduced gradient is not finite."""

    def __init__(self, table: ShardTable, buckets: Sequence[FlatBucket], comm: Comm, device: torch.device) -> None:
        self._names = [row.name for row in table]
        order = {name: number for number, name in enumerate(self._names)}
        self._places = sorted(
            ((order[slot.name], flat, overlap(slot, flat.shard)) for flat in buckets for slot in flat.bucket.slots),
            key=lambda place: place[0],
        )
        self._comm, self._device = comm, device

    @torch.no_grad()
    def find(self, loss: float, weight: float, sent: Tally) -> str:
        """Return its name on every rank; else "the loss", "the weight" or "the gradient norm", whichever is not finite.

        One all-reduce of 8 bytes over the world, label "non-finite". ``sent`` gets this traffic, which the step leaves
        out.
        """
        before = self._comm.tally.copy()
        first = next((number for number, flat, part in self._places if not flat.gradient(part).isfinite().all()), None)
        rank = 0 if first is None else len(self._names) - first  # inverted, because the ranks take the maximum
        found = torch.tensor([rank], dtype=torch.int64, device=self._device)
        self._comm.all_reduce(found, "world", NON_FINITE, "max").wait()
        for row in self._comm.tally.since(before).rows():
            sent.add(row)
        largest = int(found)
        if largest:
            return self._names[len(self._names) - largest]
        if not math.isfinite(weight):
            return "the weight"
        return "the gradient norm" if math.isfinite(loss) else "the loss"
