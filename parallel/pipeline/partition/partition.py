"""Partition of a trace into stages: the start of each stage, and the resulting plans.

1. Stages begin before blocks; the cost of the largest stage is minimal, in FLOPs or in measured seconds. Embedding
   and head count as all other calls.
2. Each boundary then moves back over calls of other units to the position with the fewest bytes: T5's decoder
   embedding moves to the later stage, and one value is sent instead of two.

``parallel.split`` names the boundaries instead: ``h.4`` starts a stage at the first call of module ``h.4``; ``block:2``
at the third call of ``block``, counted from 0 (ALBERT calls one block many times). A module inside a unit (``h.4.mlp``)
is allowed too: the units around it are opened, so that the trace contains its calls.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate
from typing import Literal

from torch import nn

from engine.errors import PlanError
from engine.parallel.model.blocks import Units, find_units, open_around
from engine.parallel.model.name_patterns import is_inside, name_runs
from engine.parallel.pipeline.partition.cost_model import flops_of_calls
from engine.parallel.pipeline.partition.stage_plan import Planner, StagePlan
from engine.parallel.trace.model_trace import ModelTrace


@dataclass(frozen=True)
class Partition:
    """Division of a traced model into pipeline stages, with the plan of each stage."""

    stage_of_call: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    boundaries: tuple[tuple[str, int], ...]
    """First call of each stage except stage 0, as (unit, number of earlier calls of the unit)."""
    crossing_bytes: int
    """Bytes sent between stages in one forward; a tensor counts once per receiving stage."""

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Stages that store each parameter, ascending, by parameter name."""
        found: dict[str, list[int]] = {}
        for plan in self.stages:
            for name in plan.parameters:
                found.setdefault(name, []).append(plan.stage)
        return {name: tuple(stages) for name, stages in sorted(found.items())}

    def stage_of_buffer(self, trace: ModelTrace, name: str) -> int:
        """Returns the last stage that uses or writes the buffer ``name``; for an unused buffer, the pipeline's last."""
        writers = {index for index, glue in enumerate(trace.glue) if name in glue.buffers}
        stages = [plan.stage for plan in self.stages if writers & plan.glue]
        calls = enumerate(trace.calls)
        stages += [self.stage_of_call[index] for index, call in calls if is_inside(name, call.unit)]
        return max(stages, default=len(self.stages) - 1)


Split = Literal["auto"] | Sequence[str]
"""Value of ``parallel.split``: "auto", or the first called module of each stage except the first stage."""


def units_for_split(model: nn.Module, split: Split, stages: int) -> Units | None:
    """Returns the modules that a trace must record so that stages can start at the modules in ``split``.

    Returns None for ``split`` "auto" or one stage: a trace records enough by default.
    """
    if split == "auto" or stages == 1:
        return None
    return open_around(find_units(model), [_read_entry(entry)[0] for entry in split])


def make_cut(
    trace: ModelTrace, stages: int, split: Sequence[str] | None = None, costs: Sequence[float] | None = None
) -> Partition:
    """Cuts a traced forward into ``stages`` stages of even cost, or before the module calls in ``split``.

    Args:
        split: first call of each stage but stage 0: "name" for a module's first call, or "name:n" for call n, counted
            from 0; None: stages of even cost.
        costs: cost of each module call; default: FLOPs.

    Raises:
        PlanError: the forward calls fewer blocks (elements of ModuleLists and Sequentials) than ``stages``; ``split``
            has unknown or unordered calls, or a wrong number of calls; or a tensor cannot be sent between stages.
    """
    if split is not None:
        return _cut_at(trace, _read_split(trace, stages, split))
    partition = _cut_at(trace, _even_starts(trace, stages, costs))
    for boundary in range(stages - 1):
        partition = _slide(trace, partition, boundary)
    return partition


def repartition(
    trace: ModelTrace, boundaries: Sequence[tuple[str, int]], held: Sequence[Collection[str]] = ()
) -> Partition:
    """Cuts ``trace`` before the module calls at which stages begin in an earlier partition of the model.

    Args:
        trace: forward recorded with inputs of other shapes.
        boundaries: ``Partition.boundaries`` of the earlier partition.
        held: names of the parameters stored on each stage; empty: no restriction.

    Raises:
        PlanError: calls are missing or in another order, or a stage needs a parameter that it does not store.
    """
    starts = []
    for unit, occurrence in boundaries:
        found = _calls_of(trace, unit, or_around=True)
        if occurrence >= len(found):
            raise PlanError(
                f"a stage starts at call {occurrence} of {unit!r}, but this input makes {len(found)} calls of it; pass "
                "an input that takes the same path through the model, or an example_batch that takes this path."
            )
        starts.append(found[occurrence])
    if starts != sorted(set(starts)) or starts[:1] == [0]:
        names = ", ".join(unit for unit, _ in boundaries)
        raise PlanError(
            f"this input calls the units that start stages ({names}) in another order than the example_batch; pass "
            "inputs that take the same path through the model."
        )
    return _cut_at(trace, starts, held)


def _cut_at(trace: ModelTrace, starts: Sequence[int], held: Sequence[Collection[str]] = ()) -> Partition:
    stage_of_call = tuple(sum(start <= index for start in starts) for index in range(len(trace.calls)))
    plans = Planner(trace, stage_of_call, held).plan()
    return Partition(
        stage_of_call=stage_of_call,
        stages=plans,
        boundaries=tuple(trace.occurrence(start) for start in starts),
        crossing_bytes=sum(trace.values[number].bytes for plan in plans for number in plan.receives),
    )


def _even_starts(trace: ModelTrace, stages: int, costs: Sequence[float] | None) -> list[int]:
    blocks = set(trace.blocks)
    every = [index for index, call in enumerate(trace.calls) if call.unit in blocks]
    starts = list(trace.starts)
    if len(starts) < stages:  # stages may also start between calls inside opened blocks
        starts = every
    if stages > 1 and len(starts) < stages:
        hint = "name the calls that start stages in parallel.split" if len(trace.calls) >= stages else "use fewer"
        raise PlanError(
            f"parallel.pipeline cuts the model into {stages} stages, but its forward calls only {len(starts)} blocks "
            f"(elements of a ModuleList or Sequential); {hint}."
        )
    return balance(costs or flops_of_calls(trace), starts[1:], stages) if stages > 1 else []


def _slide(trace: ModelTrace, partition: Partition, boundary: int) -> Partition:
    blocks = set(trace.blocks)
    starts = [partition.stage_of_call.index(stage) for stage in range(1, len(partition.stages))]
    best = partition
    while starts[boundary] > 1 and trace.calls[starts[boundary] - 1].unit not in blocks:
        starts[boundary] -= 1
        trial = _cut_at(trace, starts)
        if trial.crossing_bytes < best.crossing_bytes:
            best = trial
    return best


def _read_split(trace: ModelTrace, stages: int, split: Sequence[str]) -> list[int]:
    if len(split) != stages - 1:
        raise PlanError(
            f"parallel.split names {len(split)} calls, but {stages} stages need {stages - 1}; name the call that "
            "starts each stage except the first."
        )
    starts = [_find(trace, entry) for entry in split]
    for before, after, entry, earlier in zip([0, *starts], starts, split, ["", *split], strict=False):
        if after <= before:
            first = "names the first module call of the forward, but stage 0 starts there without an entry"
            why = first if after == 0 else f"does not come after the entry {earlier!r} in the forward"
            raise PlanError(
                f"parallel.split: the entry {entry!r} {why}; list the module calls that start the stages after stage "
                "0, in the order of the forward."
            )
    return starts


def _find(trace: ModelTrace, entry: str) -> int:
    name, number = _read_entry(entry)
    found = _calls_of(trace, name) if name else []
    if not found:
        raise PlanError(f"parallel.split: the forward calls no unit {entry!r}; {_names_instead(trace, name)}.")
    if not number.isdecimal() or int(number) >= len(found):
        numbers = "0" if len(found) == 1 else f"a number from 0 to {len(found) - 1}"
        raise PlanError(
            f"parallel.split: {entry!r} names call {number} of {name!r}, but the forward makes {len(found)} "
            f"call{'s' * (len(found) > 1)} of it and the first has number 0; write {numbers} after the colon."
        )
    return found[int(number)]


def _read_entry(entry: str) -> tuple[str, str]:
    """Returns the module of an entry, and the number of earlier calls as text."""
    name, colon, number = entry.rpartition(":")
    return (name, number) if colon else (entry, "0")


def _names_instead(trace: ModelTrace, name: str) -> str:
    """Returns the names that an entry of ``split`` may have: the most similar ones, and the units that forward
    calls."""
    called = list(dict.fromkeys(call.unit for call in trace.calls))
    inside = (parameter.rpartition(".")[0] for parameter in trace.parameter_bytes)
    known = list(dict.fromkeys([*called, *(module for path in inside for module in _paths(path))]))
    ends = [module for module in known if name and module.endswith(f".{name}")]
    # ``name`` itself may exist without any call
    close = [module for module in get_close_matches(name, known, 4, 0.4) if module != name]
    near = (ends or close)[:3]
    similar = f"similar names are {', '.join(near)}; " if near else ""
    return f"{similar}name a module that it calls ({name_runs(called)}), or a module with parameters inside one of them"


def _paths(path: str) -> list[str]:
    """Returns a module and the modules around it: ``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    return list(accumulate(path.split("."), lambda outer, key: f"{outer}.{key}")) if path else []


def _calls_of(trace: ModelTrace, name: str, or_around: bool = False) -> list[int]:
    """Returns the calls of a unit, or the first calls of an opened unit, or (``or_around``) of the unit that contains
    it."""
    calls = list(enumerate(trace.calls))
    found = [index for index, call in calls if call.unit == name]
    if not found:
        found = [index for index, call in calls if is_inside(call.unit, name) and call.starts_block]
    if not found and or_around:
        found = [index for index, call in calls if is_inside(name, call.unit)]
    return found


def balance(cost: Sequence[float], edges: Sequence[int], stages: int) -> list[int]:
    """Divides ``cost`` into ``stages`` groups of consecutive entries so that the largest sum of a group is minimal.

    ``edges``: allowed start indices, ascending, without 0. Returns the start of each group except the first.
    """
    before = [0, *accumulate(cost)]
    ends = [0, *edges, len(cost)]
    # best[j]: the minimum of the largest stage's cost before ends[j], and the starts of this minimum
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
