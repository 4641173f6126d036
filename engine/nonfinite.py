"""Which gradient was not finite, where a step is skipped: looked for then, and only then."""

import math
from collections.abc import Sequence

import torch

from engine.copies import overlap
from engine.parallel.comm import Comm
from engine.parallel.traffic import Tally
from engine.plan import Plan
from engine.step import Control
from engine.zero.storage import FlatBucket

LABEL = "non-finite"


class NonFinite:
    """Finds the first parameter, in the order of the plan's table, whose reduced gradient is not finite anywhere."""

    def __init__(self, plan: Plan, buckets: Sequence[FlatBucket], comm: Comm, device: torch.device) -> None:
        self._names = [row.name for row in plan.table]
        order = {name: number for number, name in enumerate(self._names)}
        self._places = sorted(
            ((order[slot.name], flat, overlap(slot, flat.shard)) for flat in buckets for slot in flat.bucket.slots),
            key=lambda place: place[0],
        )
        self._comm, self._device = comm, device

    @torch.no_grad()
    def find(self, control: Control, sent: Tally) -> str:
        """Its name, on every rank; else "the loss", "the weight" or "the gradient norm", whichever is to blame.

        One all-reduce of 8 bytes over the world, label "non-finite". ``sent`` takes it in: it is no part of a step's.
        """
        before = self._comm.tally.copy()
        first = next((number for number, flat, part in self._places if not flat.gradient(part).isfinite().all()), None)
        rank = 0 if first is None else len(self._names) - first  # the first name has the largest
        found = torch.tensor([rank], dtype=torch.int64, device=self._device)
        self._comm.all_reduce(found, "world", LABEL, "max").wait()
        for row in self._comm.tally.since(before).rows():
            sent.add(row)
        largest = int(found)
        if largest:
            return self._names[len(self._names) - largest]
        if not math.isfinite(control.weight):
            return "the weight"
        return "the gradient norm" if math.isfinite(control.loss) else "the loss"
