"""Plan of one stage: the calls of its forward, and the values that it receives and sends.

    need     values that the stage makes: outputs of its calls, and glue computed from them
    border   values of earlier stages from which the needed values are computed
    cut      the cheapest values, in bytes, from which glue alone computes the border; the stage receives each from its
             maker, and runs the glue between cut and border again

Stages are planned from last to first, because an earlier stage must send each received value.

The cut is a minimum vertex cut that separates the source from the border (maximum flow). Each vertex becomes two nodes
joined by an edge of its weight; edges between vertices are infinite and never cut. Flow is pushed along shortest paths
(Edmonds and Karp 1972); among equally cheap cuts the result is the nearest to the source.

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
"""Bytes of operations on placeholders above which skipping them (tier 2) costs less than their execution."""
_REUSE = 8
"""Divisor of the bytes of a parameter needed only for recomputation: it is stored once, values in every microbatch."""


@dataclass(frozen=True)
class StagePlan:
    """Plan of one pipeline stage: module calls to run, tensors to receive and send, and parameters to store."""

    stage: int
    last: bool
    """True if the user's forward ends on this stage, which returns its result."""
    calls: frozenset[int]
    receives: Mapping[int, int]
    """Sending stage of each received tensor, by value number in the trace, ascending."""
    sends: Mapping[int, tuple[int, ...]]
    """Receiving stages of each sent tensor, by value number in the trace, ascending."""
    glue: frozenset[int]
    """Numbers of the operations between calls that must run on this stage with real data."""
    parameters: frozenset[str]
    tier: Literal[1, 2]
    """1: absent calls return received values or NaN, and all operations run. 2: each operation between calls is matched
    to the trace, then run, skipped, or replaced by a received value.
    """
    last_event: int
    """Number of the last traced event that the stage needs."""


@dataclass
class _Draft:
    calls: set[int] = field(default_factory=set)
    receives: dict[int, int] = field(default_factory=dict)
    sends: dict[int, set[int]] = field(default_factory=dict)
    glue: set[int] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)


class Planner:
    """Builder of the plans of all stages, given the stage of each module call.

    Args:
        trace: recorded forward of the model.
        stage_of_call: stage of each call in ``trace``.
        held: names of the parameters that each stage stores and may use; empty: no restriction.
    """

    def __init__(self, trace: ModelTrace, stage_of_call: Sequence[int], held: Sequence[Collection[str]] = ()) -> None:
        self._trace = trace
        self._held = held
        self._count = max(stage_of_call, default=0) + 1
        self._level = _levels(trace, stage_of_call)
        self._drafts = [_Draft() for _ in range(self._count)]
        for index, stage in enumerate(stage_of_call):
            self._drafts[stage].calls.add(index)

    def plan(self) -> tuple[StagePlan, ...]:
        """Returns the plans of all stages, in order of stage.

        Raises:
            PlanError: a stage needs a parameter that it does not store, or a value that cannot be sent.
        """
        # from the last stage back: a receive adds a send to an earlier stage, which must make that value
        for stage in reversed(range(self._count)):
            self._draft(stage)
        self._place_unused()
        self._check_held()
        return tuple(self._freeze(stage) for stage in range(self._count))

    # ---- one stage

    def _draft(self, stage: int) -> None:
        draft = self._drafts[stage]
        needed, border = self._follow(self._wanted(stage), stage)
        self._take_glue(draft, needed)  # its parameters are stored on the stage anyway: recomputation with them is free
        cut = self._cut(border, draft.parameters, stage) if border else ()
        self._follow_to_cut(border, cut, needed)
        self._follow_updates(draft.parameters, needed)
        for number in cut:
            draft.receives[number] = self._level[number]
            self._drafts[self._level[number]].sends.setdefault(number, set()).add(stage)
        self._take_glue(draft, needed)

    def _take_glue(self, draft: _Draft, needed: set[int]) -> None:
        for value in (self._trace.values[number] for number in needed):
            if value.maker == "glue":
                draft.glue.add(value.index)
                draft.parameters |= value.parameters

    def _wanted(self, stage: int) -> set[int]:
        """Returns the values needed for the stage's calls, sends, result and buffer writes; records their
        parameters."""
        trace, draft = self._trace, self._drafts[stage]
        wanted = set(draft.sends)
        for index in draft.calls:
            wanted |= set(trace.calls[index].inputs)
            draft.parameters |= trace.calls[index].parameters
        if stage == self._count - 1:
            wanted |= set(trace.targets)
            leaves = trace.result.leaves
            draft.parameters |= {leaf.parameter for leaf in leaves if isinstance(leaf, FromParameter)}
        for glue in trace.glue:
            if glue.buffers and max(self._level[number] for number in glue.makes) == stage:
                wanted |= set(glue.makes)
        return wanted

    def _follow(self, wanted: set[int], stage: int) -> tuple[set[int], set[int]]:
        """Follows ``wanted`` back; returns the values made here, and the values of earlier stages they are computed
        from."""
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
            if self._trace.values[number].maker == "glue":
                todo += self._trace.values[number].inputs
        return needed, border

    def _cut(self, border: set[int], own: set[str], stage: int) -> tuple[int, ...]:
        values = self._trace.values
        graph = VertexCut(border)
        todo, seen = list(border), set(border)
        while todo:
            value = values[todo.pop()]
            call = value.maker == "call"
            before = () if call else value.inputs
            # another stage runs the call: the infinite supply forces a cut at its result or after it
            supply = inf if call else self._price(value.parameters - own, stage)
            graph.add(value.number, max(value.bytes, 1) if value.movable else inf, supply, before)
            todo += [number for number in before if number not in seen]
            seen.update(before)
        cut = graph.solve()
        if cut is None:
            stuck = next(values[number] for number in sorted(border) if not values[number].movable)
            raise PlanError(
                f"stage {stage} needs {self._trace.describe(stuck.number)}, written in place to memory that other "
                "tensors share, so it cannot be sent alone; write to a copy, or start the stage elsewhere with "
                "parallel.split."
            )
        return cut

    def _price(self, parameters: frozenset[str], stage: int) -> float:
        if self._held and not parameters <= set(self._held[stage]):
            return inf
        return sum(self._trace.parameter_bytes[name] for name in parameters) / _REUSE

    def _follow_to_cut(self, border: set[int], cut: tuple[int, ...], needed: set[int]) -> None:
        """Adds to ``needed`` the values that this stage recomputes from received values."""
        todo = [number for number in border if number not in cut]
        while todo:
            number = todo.pop()
            if number not in needed and number not in cut:
                needed.add(number)
                todo += self._trace.values[number].inputs

    def _follow_updates(self, own: set[str], needed: set[int]) -> None:
        """Adds to ``needed`` the in-place writes to this stage's parameters, which depend on parameters alone."""
        todo = [number for glue in self._trace.glue if glue.updates & own for number in glue.makes]
        while todo:
            number = todo.pop()
            if number not in needed:
                needed.add(number)
                own |= self._trace.values[number].parameters
                todo += self._trace.values[number].inputs

    # ---- all stages

    def _place_unused(self) -> None:
        """Places a parameter that nothing reads on the stage of the parameter before it in the model."""
        stage = 0
        owner = {name: s for s in reversed(range(self._count)) for name in self._drafts[s].parameters}
        for name in self._trace.parameter_bytes:
            holders = [s for s, held in enumerate(self._held) if name in held]
            stage = owner.get(name, holders[0] if holders else stage)
            if name not in owner:
                self._drafts[stage].parameters.add(name)

    def _check_held(self) -> None:
        for stage, held in enumerate(self._held):
            missing = sorted(self._drafts[stage].parameters - set(held))
            if missing:
                raise PlanError(
                    f"this input makes stage {stage} need parameter {missing[0]!r}, which is on another stage; pass an "
                    "example_batch that uses it, or start the stages elsewhere with parallel.split."
                )

    def _freeze(self, stage: int) -> StagePlan:
        draft = self._drafts[stage]
        events = [self._trace.calls[index].event for index in draft.calls]
        tier = self._tier(draft, inf if stage == self._count - 1 else max(events))
        if tier == 2:
            events += [self._trace.glue[index].event for index in draft.glue]
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
        trace = self._trace
        travelling = (*draft.receives, *draft.sends)
        if self._count == 1:
            return 1
        # tier 1 replaces results of calls only
        if any(trace.values[number].maker == "glue" for number in travelling):
            return 2
        if any(glue.writes for glue in trace.glue):
            return 2
        dead = [glue for index, glue in enumerate(trace.glue) if index not in draft.glue and glue.event < stop]
        dead_bytes = sum(trace.values[number].bytes for glue in dead for number in glue.makes)
        return 2 if dead_bytes > MOST_DEAD_BYTES or any(checks_content(glue.name) for glue in dead) else 1


def _levels(trace: ModelTrace, stage_of_call: Sequence[int]) -> list[int]:
    """Returns the earliest stage on which each value can be made."""
    level: list[int] = []
    for value in trace.values:
        own = stage_of_call[value.index] if value.maker == "call" else 0
        level.append(max([own, *(level[number] for number in value.inputs)]))
    return level


_Node = tuple[str, int]
_SOURCE, _SINK = ("source", 0), ("sink", 0)


class VertexCut:
    """Weighted graph; :meth:`solve` finds the cheapest vertices that block all paths from a source to the targets.

    ``wanted``: the targets.
    """

    def __init__(self, wanted: Iterable[int]) -> None:
        self._room: dict[_Node, dict[_Node, float]] = defaultdict(lambda: defaultdict(float))
        self._vertices: set[int] = set()
        for vertex in wanted:
            self._room["out", vertex][_SINK] = inf

    def add(self, vertex: int, weight: float, supply: float, after: Iterable[int]) -> None:
        """Adds ``vertex``, and an edge of capacity ``supply`` from the source. A cut of the vertex costs ``weight``.

        ``after``: predecessors of the vertex, which may be added later.
        """
        self._vertices.add(vertex)
        self._room["in", vertex]["out", vertex] = weight
        if supply:
            self._room[_SOURCE]["in", vertex] = supply
        for before in after:
            self._room["out", before]["in", vertex] = inf

    def solve(self) -> tuple[int, ...] | None:
        """Returns the vertices of the cheapest cut, ascending; None if every cut has infinite weight.

        Among equally cheap cuts it returns the nearest to the source.
        """
        while True:
            # shortest augmenting paths (Edmonds and Karp), so the number of rounds has a bound without the weights
            parent = self._reach()
            if _SINK not in parent:
                return tuple(sorted(n for n in self._vertices if ("in", n) in parent and ("out", n) not in parent))
            path = []
            node = _SINK
            while node != _SOURCE:
                path.append((parent[node], node))
                node = parent[node]
            flow = min(self._room[a][b] for a, b in path)
            # no edge of this path can be cut
            if flow == inf:
                return None
            for a, b in path:
                self._room[a][b] -= flow
                self._room[b][a] += flow

    def _reach(self) -> dict[_Node, _Node]:
        """Returns the predecessor of every node reachable from the source through edges with room."""
        parent = {_SOURCE: _SOURCE}
        queue = deque([_SOURCE])
        while queue and _SINK not in parent:
            node = queue.popleft()
            for following, room in self._room[node].items():
                if room > 0 and following not in parent:
                    parent[following] = node
                    queue.append(following)
        return parent
