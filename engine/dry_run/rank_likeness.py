"""Classes of pipeline ranks with equal memory behaviour; one dry run represents all ranks of a class."""

from collections.abc import Hashable

from torch import nn

from engine.dry_run.repeating_blocks import KindNames
from engine.parallel.grid import Coord
from engine.planning.plan import Plan

NEAR = 2
"""Cap of distances, in stages or in calls before a stage: 0 none, 1 the next one, 2 farther."""


class RankLikeness:
    """Descriptions of pipeline ranks: ranks with equal descriptions have equal live bytes, action by action.

    A description contains the calls, messages and shapes of each stage with the kinds of its blocks, the layout of its
    parameters in buckets, and the split of its backwards. The walk over the schedule applies the order of the row.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan, self._names = plan, KindNames(model)

    def of(self, pp: int) -> Hashable:
        """Returns the description of pipeline rank ``pp``."""
        plan = self._plan
        if plan.partition is None or plan.trace is None:
            return pp
        stages, row = plan.stages(pp), plan.schedule.per_rank[pp]
        operations = tuple(frozenset(action.op for action in row if action.stage == stage) for stage in stages)
        return tuple(self._stage(stage) for stage in stages), operations, self._buckets(pp), self._gathers(pp)

    def _stage(self, stage: int) -> Hashable:
        assert self._plan.partition is not None and self._plan.trace is not None
        part, trace = self._plan.partition.stages[stage], self._plan.trace
        first = min(part.calls, default=0)
        glue = [trace.glue[index] for index in sorted(part.glue)]
        return (
            (stage == 0, part.last, part.tier, min(NEAR, first)),
            tuple(self._names.of(trace.calls[index].unit) for index in sorted(part.calls)),
            tuple((self._value(number), self._distance(stage, source)) for number, source in part.receives.items()),
            tuple(
                (self._value(number), tuple(self._distance(stage, target) for target in targets))
                for number, targets in part.sends.items()
            ),
            tuple((one.name, max(-1, one.calls_before - first), tuple(map(self._value, one.makes))) for one in glue),
            tuple(sorted(map(self._names.of, part.parameters))),
        )

    def _value(self, number: int) -> Hashable:
        assert self._plan.trace is not None
        value = self._plan.trace.values[number]
        return value.shape, value.stride, value.dtype, value.grad, value.rewritten

    def _distance(self, stage: int, other: int) -> int:
        """Returns the distance of a message: 0 within the rank, else stages up to NEAR: longer sends are retained
        longer."""
        ranks = self._plan.schedule.rank_of_stage
        return 0 if ranks[stage] == ranks[other] else min(NEAR, abs(stage - other))

    def _buckets(self, pp: int) -> Hashable:
        layout, stages = self._plan.layout(Coord(pp=pp)), self._plan.stages(pp)
        return tuple(
            (
                (bucket.dtype, bucket.elements, len(bucket.ties), bucket.partial, bucket.exact),
                tuple((self._names.of(slot.name), slot.shape, slot.start, slot.counted) for slot in bucket.slots),
                tuple(map(stages.index, bucket.stages)),
            )
            for bucket in (*layout.buckets, *layout.frozen)
        )

    def _gathers(self, pp: int) -> Hashable:
        gathers, stages = self._plan.gathers(Coord(pp=pp)), self._plan.stages(pp)
        if gathers is None:
            return None
        turns = tuple(stages.index(turn.stage) if turn.stage in stages else -1 for turn in gathers.order.turns)
        return turns, gathers.order.members, gathers.pinned, gathers.sizes
