"""Whether tensor ranks find equal gradients for the parameters that all of them hold: looked at in the first step.

A plan that calls a parameter replicated, though the model uses it on cut activations, would train copies that
drift apart, without a word. Its gradients differ between tensor ranks from the first step on. So the bits of
all gradients that should be equal are summed, per parameter, and compared, once.
"""

from collections.abc import Sequence

import torch

from engine.bits import bit_sum
from engine.errors import PlanError
from engine.parallel.comm import Comm
from engine.parallel.traffic import Tally
from engine.plan import Plan
from engine.zero.layout import Slot
from engine.zero.storage import FlatBucket

LABEL = "plan check"


class CopiesCheck:
    """``parallel.verify_plan``: compares once, after the first step's gradients are reduced."""

    def __init__(self, plan: Plan, buckets: Sequence[FlatBucket], comm: Comm) -> None:
        wanted = plan.config.parallel.verify_plan and plan.config.tp > 1
        alike = {row.name for row in plan.table if row.dim is None} if wanted else set()
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
        """The mistake found, on every tensor rank alike. ``sent`` takes the traffic in: it is no part of a step's.

        One all-reduce over dp and one all-gather over tp, label "plan check", 8 bytes a parameter and 8 more; every
        rank of a stage makes them, also one whose step has failed.
        """
        places = self._places
        if not places:
            return None
        before = self._comm.tally.copy()
        grads = [flat.gradient(part) for _, flat, part in places]
        infinite = torch.stack([grad.isfinite().logical_not_().sum() for grad in grads]).sum()
        mine = torch.stack([*map(bit_sum, grads), infinite])
        # data ranks hold different pieces on different tensor ranks, whose cut parameters have other sizes
        self._comm.all_reduce(mine, "dp", LABEL).wait()
        table = torch.empty((self._comm.grid.tp, len(mine)), dtype=mine.dtype, device=mine.device)
        self._comm.all_gather(table.view(-1), mine, "tp", LABEL).wait()
        for row in self._comm.tally.since(before).rows():
            sent.add(row)
        if table[:, -1].any():
            return None  # gradients that are not finite: the step will be skipped, the next one is compared
        if table.any():
            self._places = []  # a step without any gradient has proven nothing
        differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        if not differing:
            return None
        return PlanError(
            f"parameter {places[differing[0]][0]!r} is held by all tensor ranks, but their gradients differ: the model "
            'uses it on activations that are cut; give its module the style "partial" in parallel.tensor_plan, or '
            '"replicate" to the layers before it.'
        )


def overlap(slot: Slot, shard: slice) -> slice:
    """The elements of a slot that lie in ``shard``; empty where none does."""
    start = max(slot.start, shard.start)
    return slice(start, max(start, min(slot.stop, shard.stop)))
