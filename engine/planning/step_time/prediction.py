"""Prediction of a step's time from a plan, the compute seconds of one rank, and link speeds. Pure arithmetic.

    pipeline   actions of the schedule. Tensor ranks divide the compute time of a stage, except a fixed part (norms,
               launches, Python). Tensor-parallel sums are waited for, except sums of column inputs in the backward,
               which overlap with weight gradients. Context ranks divide all of it, and wait for their messages.
               ZeRO 3 gathers parameters one group ahead: a pass waits for the first group, or for all groups minus
               its compute time, whichever is longer.
               Messages leave a pipeline rank one by one while it computes; a stage waits for its inputs.
    experts    shared experts exchange rows in both passes, without overlap; routing is even.
    reduce     a bucket is reduced once the last backward has completed it, during the rest of that backward; deferred
               buckets (tied, partial over tp) come last. The rest after the last action is waited for.
    control    batch check and control sum: the latency of their axes.
    update     every rank updates its shard; ZeRO 1 and 2 then gather parameters without overlap.

Not predicted: quantization, axes that share a link, tied stages on one rank, and the first steps.

Speed of the axes of a grid, from the hosts of its ranks and their links:

    host 0   rank 0 --- rank 1        within a host: NVLink
                |          |
             ===+====++====+===       network of a host, shared by its ranks
                     ||
    host 1   rank 2 --- rank 3

A rank's rate over an axis is the rate of its host, divided by the bytes that leave the host per byte of a rank:

    collective    a ring: a rank sends to the next one alone, so a group of adjacent ranks leaves a host once
    hop           a pipeline rank sends to the next one, for all data and tensor coordinates at once

A call costs the latency of its longest chain of messages: 2 (N-1) for an all-reduce in a ring of N, N-1 for others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from engine.errors import GridError
from engine.parallel.comm.traffic import Traffic
from engine.parallel.grid import Axis, Coord, Grid
from engine.parallel.pipeline.partition.cost_model import flops_of_calls
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.simulate import Span, StepTimeline
from engine.parallel.pipeline.schedule.validate import complete_rules
from engine.parallel.tensor.collectives import COLUMN_INPUTS, LOSS
from engine.planning.budgets import (
    pipeline_format,
    reduces_each_microbatch,
    reduction_traffic,
    shards_parameters,
    stage_traffic,
    tensor_format,
    wire_formats,
)
from engine.planning.cost_model.links import LinkSpeed
from engine.planning.plan import Plan

Pattern = Literal["all_reduce", "all_gather"]
"""Collective of a ring; "all_gather" also represents reduce-scatters and all-to-alls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """Link speeds inside and between the hosts of a cluster."""

    within: LinkSpeed
    """Link between two ranks of a host; the rate per rank while all of them send."""
    between: LinkSpeed
    """Link between hosts; the rate of a host, which its ranks share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLinks:
    """Link speeds of one grid, for the collectives of each axis and for each pair of pipeline ranks."""

    collectives: Mapping[tuple[Axis, Pattern], LinkSpeed]
    """Link speed of each axis and collective: seconds per call, bytes per second and rank."""
    hops: Mapping[tuple[int, int], LinkSpeed]
    """Link speed between each pair of pipeline ranks."""


def place_axes(grid: Grid, hosts: Sequence[str], links: HostLinks) -> AxisLinks:
    """Returns the link speeds of ``grid`` with rank r on ``hosts[r]``; equal names are one host.

    Raises:
        GridError: the number of hosts is not the number of ranks.
    """
    if len(hosts) != grid.world_size:
        raise GridError(f"hosts has {len(hosts)} hosts for {grid.world_size} ranks; give one host for each rank.")
    axes = dict.fromkeys(("tp", "dp", "cp", grid.sharding, *grid.data_axes, "replica", "world"))
    lines = list(grid.groups("pp"))
    patterns: tuple[Pattern, ...] = ("all_reduce", "all_gather")
    return AxisLinks(
        collectives={
            (axis, pattern): _collective(list(grid.groups(axis)), pattern, hosts, links)
            for axis in axes
            if grid.size(axis) > 1
            for pattern in patterns
        },
        hops={
            (source, target): _hop(lines, (source, target), hosts, links)
            for source in range(grid.pp)
            for target in range(grid.pp)
            if source != target
        },
    )


def _collective(groups: Sequence[Sequence[int]], pattern: Pattern, hosts: Sequence[str], links: HostLinks) -> LinkSpeed:
    steps = (2 if pattern == "all_reduce" else 1) * (len(groups[0]) - 1)
    leaving = _leaving((pair for group in groups for pair in pairwise((*group, group[0]))), hosts)
    if not leaving:
        return LinkSpeed(steps * links.within.latency, links.within.rate)
    rate = min(links.within.rate, links.between.rate / max(leaving.values()))
    return LinkSpeed(steps * links.between.latency, rate)


def _leaving(flows: Iterable[tuple[int, int]], hosts: Sequence[str]) -> dict[str, int]:
    """Returns bytes that leave each host for each byte that a rank sends, from (sender, receiver) of all messages."""
    found: dict[str, int] = {}
    for here, there in flows:
        if hosts[here] != hosts[there]:
            found[hosts[here]] = found.get(hosts[here], 0) + 1
    return found


def _hop(lines: Sequence[Sequence[int]], ends: tuple[int, int], hosts: Sequence[str], links: HostLinks) -> LinkSpeed:
    if leaving := _leaving([(line[ends[0]], line[ends[1]]) for line in lines], hosts):
        return LinkSpeed(links.between.latency, min(links.within.rate, links.between.rate / max(leaving.values())))
    return links.within


_Key = tuple[Op, int]
"""Operation and stage."""
Hop = Callable[[Action, int], tuple[float, float]]
"""Function (action, target rank) that returns (seconds to send the action's result, further seconds until it
arrives).
"""
_COMPLETING = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
"""Actions after which a stage has its weight gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """Compute seconds of one rank with the whole model: forward and backward per microbatch, update per step."""

    forward: float
    """Forward seconds of a microbatch."""
    backward: float
    """Backward seconds of a microbatch; half of it is W in split backwards."""
    fixed: float = 0.0
    """Fraction (0 to 1) of both that every tensor rank repeats, such as norms and launches."""
    update: float = 0.0
    """Seconds per step of norm, clipping and optimizer."""
    exchange: tuple[float, float] = (0.0, 0.0)
    """Seconds that the forward and the backward of a microbatch wait for expert rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of a step, by part."""

    computation: float
    """Compute seconds of the slowest rank."""
    bubble: float
    """Seconds in which pipeline ranks wait for each other."""
    communication: Mapping[Axis, float] = field(default_factory=dict)
    """Seconds in which ranks wait for communication, by axis."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.computation + self.bubble + sum(self.communication.values())


def predict_step(plan: Plan, computation: Computation, links: AxisLinks) -> StepTime:
    """Returns the predicted time of a training step of ``plan`` after warm-up.

    ``computation``: compute seconds of a rank that has the whole model. ``links``: link speeds of the plan's grid.
    """
    return _Prediction(plan, computation, links).step()


def play_schedule(
    schedule: Schedule, seconds: Mapping[tuple[Op, int], float], hop: Hop = lambda action, target: (0.0, 0.0)
) -> StepTimeline:
    """Simulates ``schedule`` and returns its timeline.

    An action starts once its rank is free and all its inputs have arrived. A rank sends one message at a time. Without
    ``hop``, messages take no time.

    Args:
        seconds: duration by (operation, stage).
        hop: function (action, target rank) that returns (seconds to send, additional seconds until arrival).

    Raises:
        ScheduleError: the schedule is incomplete or deadlocks.
    """
    rules = complete_rules(schedule)
    takers: dict[int, list[int]] = {}
    for taker, need in enumerate(rules.needs[1]):
        if need >= 0 and rules.rank[need] != rules.rank[taker]:
            takers.setdefault(need, []).append(taker)
    begins, ends, arrived = ([0.0] * len(rules.actions) for _ in range(3))
    free, out_free = ([0.0] * len(rules.rows) for _ in range(2))
    for number in rules.needs_order:
        action, rank = rules.actions[number], rules.rank[number]
        begins[number] = max(free[rank], arrived[number])
        free[rank] = ends[number] = begins[number] + seconds[action.op, action.stage]
        for taker in takers.get(number, ()):
            out, further = hop(action, rules.rank[taker])
            out_free[rank] = max(ends[number], out_free[rank]) + out
            arrived[taker] = out_free[rank] + further
    spans = list(map(Span, rules.actions, begins, ends))
    return StepTimeline(schedule, tuple(tuple(spans[row.start : row.stop]) for row in rules.rows))


class _Prediction:
    """Prediction of one step: the state that its parts share."""

    def __init__(self, plan: Plan, computation: Computation, links: AxisLinks) -> None:
        self._plan, self._computation, self._links = plan, computation, links
        self._config, self._grid = plan.config, plan.grid(0)

    def step(self) -> StepTime:
        schedule, seconds = self._plan.schedule, self._seconds_by_action()
        tensor = _with_waits(seconds, self._tensor_waits(seconds))
        context = _with_waits(tensor, self._context_waits())
        gathers = _with_waits(context, self._gather_waits(seconds))
        exchanged = _with_waits(gathers, self._exchange_waits())
        played = play_schedule(schedule, exchanged, self._hop)
        waiting = (seconds, tensor, context, gathers, exchanged)
        spans = [play_schedule(schedule, each).makespan for each in waiting] + [played.makespan]
        reduced = [self._reduced(pp, played) for pp in range(self._grid.pp)]
        ties = max(self._late(pp, "pp") for pp in range(self._grid.pp))
        partial = max(self._late(pp, "tp") for pp in range(self._grid.pp))
        computed = max(sum(seconds[op, stage] for op, stage, _ in row) for row in schedule.per_rank)
        communication: dict[Axis, float] = {
            "tp": spans[1] - spans[0] + partial,
            "cp": spans[2] - spans[1],
            "ep": spans[4] - spans[3],
            "dp_replicate": max(self._replica_sums(pp) for pp in range(self._grid.pp)),
            "pp": spans[5] - spans[4] + ties,
            "replica": self._latency("replica"),
            "world": self._latency("world"),
        }
        state = spans[3] - spans[2] + max(0.0, max(reduced) - spans[5]) + self._gathered()
        communication[self._grid.sharding] = communication.get(self._grid.sharding, 0.0) + state
        return StepTime(
            computation=computed + self._update(),
            bubble=max(0.0, spans[0] - computed),
            communication={axis: seconds for axis, seconds in communication.items() if self._grid.size(axis) > 1},
        )

    # ------------------------------------------------------------------ what ranks compute

    def _shares(self) -> list[float]:
        """Returns the share of each stage in the model's FLOPs."""
        plan = self._plan
        if plan.partition is None or plan.trace is None:
            return [1.0]
        flops = [0] * plan.schedule.stages
        for stage, count in zip(plan.partition.stage_of_call, flops_of_calls(plan.trace), strict=True):
            flops[stage] += count
        return [count / sum(flops) for count in flops]

    def _seconds_by_action(self) -> dict[_Key, float]:
        """Returns the computation of every action, without waiting."""
        one, found = self._computation, {}
        left = (one.fixed + (1 - one.fixed) / self._grid.tp) / self._grid.cp
        for stage, share in enumerate(self._shares()):
            forward, backward = one.forward * share * left, one.backward * share * left
            for op, seconds in zip(Op, (forward, backward, backward / 2, backward / 2), strict=True):
                found[op, stage] = seconds
        return found

    def _update(self) -> float:
        """Returns the update: every rank runs at once; each has its part of sharded states."""
        whole = max(1, sum(row.elements for row in self._plan.table))
        parts = self._config.shards if self._config.zero_optimization.stage else 1
        held = max(sum(bucket.elements for bucket in self._layout(pp)) for pp in range(self._grid.pp))
        return self._computation.update * min(1.0, held / whole) / parts

    # ------------------------------------------------------------------ what is sent between their computations

    def _seconds(self, row: Traffic, pattern: Pattern) -> float:
        return self._links.collectives[row.axis, pattern].seconds(row.calls, row.bytes)

    def _sums(self, row: Traffic) -> Pattern:
        """Returns the collective of tensor ranks: messages in fewer bits use exchanges and gathers."""
        form = tensor_format(self._config)
        return "all_gather" if form is not None and row.label in form.labels else "all_reduce"

    def _latency(self, axis: Axis) -> float:
        link = self._links.collectives.get((axis, "all_reduce"))
        return link.latency if link is not None else 0.0

    def _tensor_waits(self, computed: Mapping[_Key, float]) -> dict[_Key, float]:
        waits: dict[_Key, float] = {}
        for stage, tally in self._plan.tensor_traffic.items():
            rows = (row for row in tally.rows() if row.axis == "tp")
            seconds = [(row.label == COLUMN_INPUTS, self._seconds(row, self._sums(row))) for row in rows]
            backward = sum(one for is_input, one in seconds if is_input)
            backward = max(0.0, backward - computed[Op.BACKWARD_WEIGHT, stage])
            waits[Op.FORWARD, stage] = sum(one for is_input, one in seconds if not is_input)
            waits[Op.BACKWARD, stage] = waits[Op.BACKWARD_INPUT, stage] = backward
        return waits

    def _context_waits(self) -> dict[_Key, float]:
        """Returns the waits for keys, values and their gradients, half of them in each pass."""
        waits: dict[_Key, float] = {}
        for stage, tally in self._plan.tensor_traffic.items():
            rows = [row for row in tally.rows() if row.axis == "cp"]
            whole = sum(self._seconds(row, "all_reduce" if row.label == LOSS else "all_gather") for row in rows)
            for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
                waits[op, stage] = whole / 2
        return waits

    def _gather_waits(self, computed: Mapping[_Key, float]) -> dict[_Key, float]:
        """Returns the part of each pass's ZeRO 3 gathers that prefetching one group ahead does not hide; the passes of
        a rank share it equally."""
        waits: dict[_Key, float] = {}
        for pp in range(self._grid.pp) if shards_parameters(self._config) else ():
            passes = self._plan.schedule.passes(pp)
            groups = max(1, len(self._layout(pp)))
            whole = sum(
                self._seconds(row, "all_gather") for row in self._rows(pp, self._grid.sharding, "parameters")
            ) / len(passes)
            for op, stage, _ in passes:
                waits[op, stage] = max(whole / groups, whole - computed[op, stage] * (groups - 1) / groups)
        return waits

    def _exchange_waits(self) -> dict[_Key, float]:
        """Returns the waits for rows of experts, of which each stage has its share."""
        forward, backward = self._computation.exchange
        waits: dict[_Key, float] = {}
        for stage, share in enumerate(self._shares()):
            waits[Op.FORWARD, stage] = share * forward
            waits[Op.BACKWARD, stage] = waits[Op.BACKWARD_INPUT, stage] = share * backward
        return waits

    def _hop(self, action: Action, target: int) -> tuple[float, float]:
        """Returns (seconds to send, latency) of a stage's messages to the next rank."""
        source = self._plan.schedule.rank_of_stage[action.stage]
        link = self._links.hops[source, target]
        flow = "forward" if action.op is Op.FORWARD else "backward"
        rows = [row for row in self._boundaries[action.stage] if row.label == flow]
        return sum(row.bytes for row in rows) / link.rate, link.latency

    @cached_property
    def _boundaries(self) -> Mapping[int, tuple[Traffic, ...]]:
        plan = self._plan
        if plan.partition is None or plan.trace is None:
            return {}
        ranks, values = plan.schedule.rank_of_stage, plan.trace.values
        form = pipeline_format(plan.config)
        return {stage.stage: stage_traffic(stage, values, ranks, 1, form).rows() for stage in plan.partition.stages}

    # ------------------------------------------------------------------ the end of a step

    def _layout(self, pp: int) -> tuple["_Bucket", ...]:
        formats, sharded = wire_formats(self._config, self._plan.precision), self._config.zero_optimization.stage > 0
        found = []
        for bucket in self._plan.layout(Coord(pp=pp)).buckets:
            rows = reduction_traffic(bucket, self._grid, formats, self._wire_bytes(bucket.dtype), sharded)
            found.append(_Bucket(bucket.elements, sum(row.bytes for row in rows), bucket.late))
        return tuple(found)

    def _wire_bytes(self, dtype: str) -> int:
        precision = self._plan.precision
        return (precision.wire or precision.widths(dtype).sums).itemsize

    def _reduced(self, pp: int, played: StepTimeline) -> float:
        """Returns the second of the step at which the gradients of a pipeline rank are reduced."""
        spans = played.spans[pp]
        last = spans[-1]
        if self._config.shards == 1:
            return last.end
        sharded = self._config.zero_optimization.stage > 0
        link = self._links.collectives[self._grid.sharding, "all_gather" if sharded else "all_reduce"]
        buckets = sorted(self._layout(pp), key=lambda bucket: bucket.late)
        sizes = [bucket.sent for bucket in buckets]
        free, made, eager = 0.0, 0, sum(bucket.elements for bucket in buckets if not bucket.late)
        if reduces_each_microbatch(self._config) and len(spans) > 2:
            free = self._earlier(pp, played, sum(link.seconds(1, size) for size in sizes))
        for bucket, size in zip(buckets, sizes, strict=True):
            made += bucket.elements
            ready = last.end if bucket.late else last.start + (last.end - last.start) * made / eager
            free = max(free, ready) + link.seconds(1, size)
        return max(free, last.end)

    def _replica_sums(self, pp: int) -> float:
        """Sums of the shards over shard groups; the overlap of all but the last one with backward is left out."""
        return sum(self._seconds(row, "all_reduce") for row in self._rows(pp, "dp_replicate", "gradients"))

    def _earlier(self, pp: int, played: StepTimeline, seconds: float) -> float:
        """Returns the end of reductions before the last backward; all stages of a rank together send ``seconds``."""
        free, stages = 0.0, len(self._plan.stages(pp))
        done = [span for span in played.spans[pp] if span.action.op in _COMPLETING]
        for span in done[:-1]:
            free = max(free, span.end) + seconds / stages
        return free

    def _late(self, pp: int, axis: Axis) -> float:
        """Sums of tied gradients over stages, or of partial ones over tensor ranks."""
        if axis == "tp":
            found = self._plan.rank(self._grid.rank_at(pp=pp)).traffic
            stages = {(row.axis, row.label) for tally in self._plan.tensor_traffic.values() for row in tally.rows()}
            return sum(
                self._seconds(row, "all_reduce")
                for row in found
                if row.axis == "tp" and (row.axis, row.label) not in stages
            )
        hops = [link for (source, _), link in self._links.hops.items() if source == pp]
        return sum(hops[0].seconds(2 * row.calls, row.bytes) for row in self._rows(pp, "pp", "ties")) if hops else 0.0

    def _gathered(self) -> float:
        """Returns parameters after the update of ZeRO 1 and 2."""
        if shards_parameters(self._config):
            return 0.0
        found = [
            sum(self._seconds(row, "all_gather") for row in self._rows(pp, self._grid.sharding, "parameters"))
            for pp in range(self._grid.pp)
        ]
        return max(found)

    def _rows(self, pp: int, axis: Axis, label: str) -> Iterator[Traffic]:
        for row in self._plan.rank(self._grid.rank_at(pp=pp)).traffic:
            if (row.axis, row.label) == (axis, label):
                yield row


def _with_waits(seconds: Mapping[_Key, float], waits: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: each + waits.get(key, 0.0) for key, each in seconds.items()}


@dataclass(frozen=True, slots=True)
class _Bucket:
    elements: int
    sent: int
    """Bytes that a rank sends to reduce it."""
    late: bool
