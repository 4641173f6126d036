"""Where the stages of a timeline begin, and what follows for each.

    stages begin before blocks, so that the largest stage is smallest, in FLOPs or in measured seconds (embedding and
    head count as all else)
    each boundary then slides back over calls of other units to where the fewest bytes cross: T5's decoder embedding
    moves behind the cut, and one value travels instead of two

``parallel.split`` says it by names instead: ``h.4`` starts a stage at the first call of unit ``h.4``; ``block:2`` at
the call of ``block`` that two others precede (ALBERT calls one block many times).

Cuts a row of costs into stages so that the largest stage is smallest.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate

from engine.errors import PlanError
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.pipeline.partition.cost_model import flops_of_calls
from engine.parallel.pipeline.partition.stage_plan import Planner, StagePlan
from engine.parallel.trace.model_trace import ModelTrace


@dataclass(frozen=True)
class Partition:
    """A timeline cut into stages."""

    stage_of_call: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    boundaries: tuple[tuple[str, int], ...]
    """(unit, how many of its calls come before) of the call that starts each stage but the first."""
    crossing_bytes: int
    """All transfers of one forward: each value once for each stage that receives it."""

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> the stages that hold it, ascending; every parameter has one. Several add up their gradients."""
        found: dict[str, list[int]] = {}
        for plan in self.stages:
            for name in plan.parameters:
                found.setdefault(name, []).append(plan.stage)
        return {name: tuple(stages) for name, stages in sorted(found.items())}

    def stage_of_buffer(self, timeline: ModelTrace, name: str) -> int:
        """The stage whose copy of a buffer is kept up to date: the last that writes it or calls the unit around it.

        What free code writes is up to date where the program runs to its end: on the last stage.
        """
        writers = {index for index, glue in enumerate(timeline.glue) if name in glue.buffers}
        stages = [plan.stage for plan in self.stages if writers & plan.glue]
        calls = enumerate(timeline.calls)
        stages += [self.stage_of_call[index] for index, call in calls if is_inside(name, call.unit)]
        return max(stages, default=len(self.stages) - 1)


def make_cut(
    timeline: ModelTrace, stages: int, split: Sequence[str] | None = None, costs: Sequence[float] | None = None
) -> Partition:
    """Cut into ``stages``, evenly or where ``split`` names the calls that start stages 1 to ``stages`` - 1.

    ``costs``: what each call costs, in any one unit, to divide evenly; default: its FLOPs and those of the glue
    behind it.

    Raises:
        PlanError: fewer calls of blocks than stages, a wrong ``split``, or a value that cannot travel.
    """
    if split is not None:
        return _cut_at(timeline, _read_split(timeline, stages, split))
    cut = _cut_at(timeline, _even_starts(timeline, stages, costs))
    for boundary in range(stages - 1):
        cut = _slide(timeline, cut, boundary)
    return cut


def repartition(
    timeline: ModelTrace, boundaries: Sequence[tuple[str, int]], held: Sequence[Collection[str]] = ()
) -> Partition:
    """Cut a timeline of another input signature at the same calls.

    ``held``: the parameters of each stage; nothing is planned that needs others.

    Raises:
        PlanError: those calls do not exist here or come in another order, or a parameter is needed but not held.
    """
    starts = []
    for unit, occurrence in boundaries:
        found = _calls_of(timeline, unit, or_around=True)
        if occurrence >= len(found):
            raise PlanError(
                f"a stage starts at call {occurrence} of {unit!r}, but this input makes {len(found)} calls of it; give "
                "an input that takes the same path through the model, or an example_batch that takes this one."
            )
        starts.append(found[occurrence])
    if starts != sorted(set(starts)) or starts[:1] == [0]:
        names = ", ".join(unit for unit, _ in boundaries)
        raise PlanError(
            f"this input calls the units that start stages ({names}) in another order than the example_batch; give "
            "inputs that take the same path through the model."
        )
    return _cut_at(timeline, starts, held)


def _cut_at(timeline: ModelTrace, starts: Sequence[int], held: Sequence[Collection[str]] = ()) -> Partition:
    stage_of_call = tuple(sum(start <= index for start in starts) for index in range(len(timeline.calls)))
    plans = Planner(timeline, stage_of_call, held).plan()
    return Partition(
        stage_of_call=stage_of_call,
        stages=plans,
        boundaries=tuple(timeline.occurrence(start) for start in starts),
        crossing_bytes=sum(timeline.values[number].bytes for plan in plans for number in plan.receives),
    )


def _even_starts(timeline: ModelTrace, stages: int, costs: Sequence[float] | None) -> list[int]:
    blocks = set(timeline.blocks)
    every = [index for index, call in enumerate(timeline.calls) if call.unit in blocks]
    starts = list(timeline.starts)
    if len(starts) < stages:  # opened blocks: between their parts too
        starts = every
    if stages > 1 and len(starts) < stages:
        hint = "name the calls that start stages in parallel.split" if len(timeline.calls) >= stages else "use fewer"
        raise PlanError(
            f"parallel.pipeline cuts the model into {stages} stages, but its forward calls only {len(starts)} blocks "
            f"(elements of a ModuleList or Sequential of one class); {hint}."
        )
    return balance(costs or flops_of_calls(timeline), starts[1:], stages) if stages > 1 else []


def _slide(timeline: ModelTrace, cut: Partition, boundary: int) -> Partition:
    blocks = set(timeline.blocks)
    starts = [cut.stage_of_call.index(stage) for stage in range(1, len(cut.stages))]
    best = cut
    while starts[boundary] > 1 and timeline.calls[starts[boundary] - 1].unit not in blocks:
        starts[boundary] -= 1
        trial = _cut_at(timeline, starts)
        if trial.crossing_bytes < best.crossing_bytes:
            best = trial
    return best


def _read_split(timeline: ModelTrace, stages: int, split: Sequence[str]) -> list[int]:
    if len(split) != stages - 1:
        raise PlanError(
            f"parallel.split names {len(split)} calls, but {stages} stages begin at {stages - 1}; name the call that "
            "starts each stage but the first."
        )
    starts = [_find(timeline, entry) for entry in split]
    for before, after, entry in zip([0, *starts], starts, split, strict=False):
        if after <= before:
            why = "is the first call of all" if after == 0 else "does not come after the one before it"
            raise PlanError(
                f"parallel.split: {entry!r} {why}; name calls in the order in which the forward makes them, and not "
                "its first."
            )
    return starts


def _find(timeline: ModelTrace, entry: str) -> int:
    name, colon, number = entry.rpartition(":")
    if not colon:
        name, number = entry, "0"
    found = _calls_of(timeline, name) if name else []
    if not found:
        near = get_close_matches(name, dict.fromkeys(call.unit for call in timeline.calls), 3, 0.4)
        hint = f"near names are {', '.join(near)}" if near else "the plan lists the names"
        raise PlanError(f"parallel.split: {entry!r} is no unit that the forward calls; {hint}.")
    if not number.isdecimal() or int(number) >= len(found):
        raise PlanError(
            f"parallel.split: {entry!r} asks for call {number} of {name!r}, which is called {len(found)} times, "
            f"counted from 0; give a number up to {len(found) - 1}."
        )
    return found[int(number)]


def _calls_of(timeline: ModelTrace, name: str, or_around: bool = False) -> list[int]:
    """The calls of a unit; of an opened unit, those at which it starts; ``or_around``: of the unit it lies in."""
    calls = list(enumerate(timeline.calls))
    found = [index for index, call in calls if call.unit == name]
    if not found:
        found = [index for index, call in calls if is_inside(call.unit, name) and call.starts_block]
    if not found and or_around:
        found = [index for index, call in calls if is_inside(name, call.unit)]
    return found


def balance(cost: Sequence[float], edges: Sequence[int], stages: int) -> list[int]:
    """Where stages 1 to ``stages`` - 1 start, each at one of ``edges``; the earliest of equally good cuts.

    ``edges`` ascend, without 0, and there are at least ``stages`` - 1.
    """
    before = [0, *accumulate(cost)]
    ends = [0, *edges, len(cost)]
    # best[j]: the smallest possible largest stage of what lies before ends[j], and the starts that give it
    best: list[tuple[float, list[int]] | None] = [(0, []), *[None] * (len(ends) - 1)]
    for _ in range(stages):
        best = [None, *(_extend(best, before, ends, j) for j in range(1, len(ends)))]
    found = best[-1]
    assert found is not None  # there are enough edges
    return found[1][:-1]


def _extend(
    best: Sequence[tuple[float, list[int]] | None], before: Sequence[float], ends: Sequence[int], j: int
) -> tuple[float, list[int]] | None:
    options = [
        (max(known[0], before[ends[j]] - before[ends[i]]), [*known[1], ends[j]])
        for i, known in enumerate(best[:j])
        if known is not None
    ]
    return min(options, default=None)
