"""What one stage does in a forward, and why the values it receives are those.

    need     values that the stage makes itself: outputs of its calls, and glue on top of them
    border   values of earlier stages that the needed ones are computed from
    cut      the cheapest values, in bytes, from which glue alone gives the border; received straight from the stage
             that makes them; glue between cut and border runs here again

Stages are planned from last to first, since what a stage receives is what an earlier one has to send.

The cheapest set of vertices that separates a source from wanted vertices (maximum flow, minimum cut).

Each vertex is split in two, joined by an edge of its weight; edges between vertices never end up in the cut. Flow is
pushed along shortest paths (Edmonds and Karp 1972); among equally cheap sets, the one nearest the source is found.

    source --supply--> [in n] --weight--> [out n] --inf--> [in m] --weight--> [out m] --inf--> sink
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Literal

from engine.errors import PlanError
from engine.parallel.trace.model_trace import FromParameter, ModelTrace
from engine.parallel.trace.torch_function import checks_content

MOST_DEAD_BYTES = 64 << 20
"""Glue on absent values allocates; above this, skipping it costs less than running it."""
_REUSE = 8
"""A parameter that only recomputing would need here counts an eighth: it is here once, values in every microbatch."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of one timeline."""

    stage: int
    last: bool
    """Whether it reaches the end of the program and returns its result."""
    calls: frozenset[int]
    receives: Mapping[int, int]
    """Value -> the stage it comes from; ascending by value."""
    sends: Mapping[int, tuple[int, ...]]
    """Value -> the stages that want it, ascending; ascending by value."""
    glue: frozenset[int]
    """Glue that has to run here with real content."""
    parameters: frozenset[str]
    tier: Literal[1, 2]
    """1: absent calls give received values or NaN, and all glue runs. 2: each glue operation is looked up, and run,
    skipped or answered by a received value."""
    last_event: int
    """Nothing after it is needed."""


@dataclass
class _Draft:
    calls: set[int] = field(default_factory=set)
    receives: dict[int, int] = field(default_factory=dict)
    sends: dict[int, set[int]] = field(default_factory=dict)
    glue: set[int] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)


class Planner:
    """Plans all stages, given the stage of each call.

    ``held``: the parameters that each stage has already, where others cannot come; empty: any can.
    """

    def __init__(
        self, timeline: ModelTrace, stage_of_call: Sequence[int], held: Sequence[Collection[str]] = ()
    ) -> None:
        self._timeline = timeline
        self._held = held
        self._count = max(stage_of_call, default=0) + 1
        self._level = _levels(timeline, stage_of_call)
        self._drafts = [_Draft() for _ in range(self._count)]
        for index, stage in enumerate(stage_of_call):
            self._drafts[stage].calls.add(index)

    def plan(self) -> tuple[StagePlan, ...]:
        """The plans, by stage.

        Raises:
            PlanError: only a value written in place could be sent, or a parameter would be needed that is not held.
        """
        for stage in reversed(range(self._count)):
            self._draft(stage)
        self._place_unused()
        self._check_held()
        return tuple(self._freeze(stage) for stage in range(self._count))

    # ---- one stage

    def _draft(self, stage: int) -> None:
        draft = self._drafts[stage]
        needed, border = self._follow(self._wanted(stage), stage)
        self._take_glue(draft, needed)  # its parameters are here anyway: recomputing with them is free
        cut = self._cut(border, draft.parameters, stage) if border else ()
        self._follow_to_cut(border, cut, needed)
        self._follow_updates(draft.parameters, needed)
        for number in cut:
            draft.receives[number] = self._level[number]
            self._drafts[self._level[number]].sends.setdefault(number, set()).add(stage)
        self._take_glue(draft, needed)

    def _take_glue(self, draft: _Draft, needed: set[int]) -> None:
        for value in (self._timeline.values[number] for number in needed):
            if value.maker == "glue":
                draft.glue.add(value.index)
                draft.parameters |= value.parameters

    def _wanted(self, stage: int) -> set[int]:
        """What the stage must have by its calls, its sends, the result and lasting writes; notes their parameters."""
        timeline, draft = self._timeline, self._drafts[stage]
        wanted = set(draft.sends)
        for index in draft.calls:
            wanted |= set(timeline.calls[index].inputs)
            draft.parameters |= timeline.calls[index].parameters
        if stage == self._count - 1:
            wanted |= set(timeline.targets)
            leaves = timeline.result.leaves
            draft.parameters |= {leaf.parameter for leaf in leaves if isinstance(leaf, FromParameter)}
        for glue in timeline.glue:
            if glue.buffers and max(self._level[number] for number in glue.makes) == stage:
                wanted |= set(glue.makes)
        return wanted

    def _follow(self, wanted: set[int], stage: int) -> tuple[set[int], set[int]]:
        """Back from ``wanted``: values made here, and the values of earlier stages that those start from."""
        needed: set[int] = set()
        border: set[int] = set()
        todo = list(wanted)
        while todo:
            number = todo.pop()
            if number in needed or number in border:
                continue
            if self._level[number] < stage:
                border.add(number)
                continue
            needed.add(number)
            if self._timeline.values[number].maker == "glue":
                todo += self._timeline.values[number].inputs
        return needed, border

    def _cut(self, border: set[int], own: set[str], stage: int) -> tuple[int, ...]:
        values = self._timeline.values
        graph = VertexCut(border)
        todo, seen = list(border), set(border)
        while todo:
            value = values[todo.pop()]
            call = value.maker == "call"
            before = () if call else value.inputs
            supply = inf if call else self._price(value.parameters - own, stage)
            graph.add(value.number, max(value.bytes, 1) if value.movable else inf, supply, before)
            todo += [number for number in before if number not in seen]
            seen.update(before)
        cut = graph.solve()
        if cut is None:
            stuck = next(values[number] for number in sorted(border) if not values[number].movable)
            raise PlanError(
                f"stage {stage} needs {self._timeline.describe(stuck.number)}, written in place to memory that other "
                "tensors share, so that it cannot travel alone; write to a copy, or start the stage elsewhere by "
                "parallel.split."
            )
        return cut

    def _price(self, parameters: frozenset[str], stage: int) -> float:
        if self._held and not parameters <= set(self._held[stage]):
            return inf
        return sum(self._timeline.parameter_bytes[name] for name in parameters) / _REUSE

    def _follow_to_cut(self, border: set[int], cut: tuple[int, ...], needed: set[int]) -> None:
        """Add to ``needed`` what is recomputed here from the received values."""
        todo = [number for number in border if number not in cut]
        while todo:
            number = todo.pop()
            if number not in needed and number not in cut:
                needed.add(number)
                todo += self._timeline.values[number].inputs

    def _follow_updates(self, own: set[str], needed: set[int]) -> None:
        """Add to ``needed`` what writes this stage's parameters in place: it is made of parameters alone."""
        todo = [number for glue in self._timeline.glue if glue.updates & own for number in glue.makes]
        while todo:
            number = todo.pop()
            if number not in needed:
                needed.add(number)
                own |= self._timeline.values[number].parameters
                todo += self._timeline.values[number].inputs

    # ---- all stages

    def _place_unused(self) -> None:
        """A parameter that nothing reads stays where its neighbour before it in the model is."""
        stage = 0
        owner = {name: s for s in reversed(range(self._count)) for name in self._drafts[s].parameters}
        for name in self._timeline.parameter_bytes:
            holders = [s for s, held in enumerate(self._held) if name in held]
            stage = owner.get(name, holders[0] if holders else stage)
            if name not in owner:
                self._drafts[stage].parameters.add(name)

    def _check_held(self) -> None:
        for stage, held in enumerate(self._held):
            missing = sorted(self._drafts[stage].parameters - set(held))
            if missing:
                raise PlanError(
                    f"this input makes stage {stage} need parameter {missing[0]!r}, which it does not hold; give an "
                    "example_batch that uses it, or start the stages elsewhere by parallel.split."
                )

    def _freeze(self, stage: int) -> StagePlan:
        draft = self._drafts[stage]
        events = [self._timeline.calls[index].event for index in draft.calls]
        tier = self._tier(draft, inf if stage == self._count - 1 else max(events))
        if tier == 2:
            events += [self._timeline.glue[index].event for index in draft.glue]
        return StagePlan(
            stage=stage,
            last=stage == self._count - 1,
            calls=frozenset(draft.calls),
            receives=MappingProxyType({number: draft.receives[number] for number in sorted(draft.receives)}),
            sends=MappingProxyType({number: tuple(sorted(draft.sends[number])) for number in sorted(draft.sends)}),
            glue=frozenset(draft.glue),
            parameters=frozenset(draft.parameters),
            tier=tier,
            last_event=max(events, default=-1),
        )

    def _tier(self, draft: _Draft, stop: float) -> Literal[1, 2]:
        timeline = self._timeline
        travelling = (*draft.receives, *draft.sends)
        if self._count == 1:
            return 1
        if any(timeline.values[number].maker == "glue" for number in travelling):
            return 2
        if any(glue.writes for glue in timeline.glue):
            return 2
        dead = [glue for index, glue in enumerate(timeline.glue) if index not in draft.glue and glue.event < stop]
        dead_bytes = sum(timeline.values[number].bytes for glue in dead for number in glue.makes)
        return 2 if dead_bytes > MOST_DEAD_BYTES or any(checks_content(glue.name) for glue in dead) else 1


def _levels(timeline: ModelTrace, stage_of_call: Sequence[int]) -> list[int]:
    """The earliest stage at which each value can be made."""
    level: list[int] = []
    for value in timeline.values:
        own = stage_of_call[value.index] if value.maker == "call" else 0
        level.append(max([own, *(level[number] for number in value.inputs)]))
    return level


_Node = tuple[str, int]
_SOURCE, _SINK = ("source", 0), ("sink", 0)


class VertexCut:
    """A graph that is filled vertex by vertex and then cut."""

    def __init__(self, wanted: Iterable[int]) -> None:
        self._room: dict[_Node, dict[_Node, float]] = defaultdict(lambda: defaultdict(float))
        self._vertices: set[int] = set()
        for vertex in wanted:
            self._room["out", vertex][_SINK] = inf

    def add(self, vertex: int, weight: float, supply: float, after: Iterable[int]) -> None:
        """A vertex: ``weight`` to cut it, ``supply`` from the source straight into it, the vertices before it."""
        self._vertices.add(vertex)
        self._room["in", vertex]["out", vertex] = weight
        if supply:
            self._room[_SOURCE]["in", vertex] = supply
        for before in after:
            self._room["out", before]["in", vertex] = inf

    def solve(self) -> tuple[int, ...] | None:
        """The vertices of the cheapest cut, ascending; None where every cut takes a vertex of infinite weight."""
        while True:
            parent = self._reach()
            if _SINK not in parent:
                return tuple(sorted(n for n in self._vertices if ("in", n) in parent and ("out", n) not in parent))
            path = []
            node = _SINK
            while node != _SOURCE:
                path.append((parent[node], node))
                node = parent[node]
            flow = min(self._room[a][b] for a, b in path)
            if flow == inf:
                return None
            for a, b in path:
                self._room[a][b] -= flow
                self._room[b][a] += flow

    def _reach(self) -> dict[_Node, _Node]:
        """Every node that the source reaches through edges with room, and the node before it."""
        parent = {_SOURCE: _SOURCE}
        queue = deque([_SOURCE])
        while queue and _SINK not in parent:
            node = queue.popleft()
            for following, room in self._room[node].items():
                if room > 0 and following not in parent:
                    parent[following] = node
                    queue.append(following)
        return parent
