"""The step of a plan on the processors of a host: its operators by their measured seconds, its schedule and traffic.

stage       seconds of the operators of a microbatch, forward and backward, and what is recomputed
sums        each gradient is copied or added into its bucket when backward has made it
update      norm, clipping and optimizer of what a rank owns
engine      what was measured of the engine on a model of next to no width: of a step, a microbatch, an operator
waits       of the plan's own schedule and bytes (:mod:`~engine.planning.step_time.prediction`), by the measured
            seconds of each collective
"""

from collections.abc import Sequence
from math import prod

from engine.errors import PlanError
from engine.parallel.comm.traffic import Op, sent_bytes
from engine.parallel.grid import Axis, Coord, Grid
from engine.planning.cost_model.links import LinkSpeed
from engine.planning.host_step.host_rates import HostRates, measured_link
from engine.planning.host_step.operator_trace import OperatorCall, trace_operators
from engine.planning.plan import Plan
from engine.planning.step_time.axis_links import AxisLinks, Pattern
from engine.planning.step_time.prediction import Computation, StageSeconds, StepTime, predict_step
from engine.program.batch import Batch
from engine.program.program import Program

_OPS: tuple[tuple[Pattern, Op], ...] = (
    ("ring", "all_reduce"), ("direct", "reduce_scatter"), ("gather", "all_gather"),
)  # fmt: skip


def predict_on_host(program: Program, plan: Plan, row: Batch, rates: HostRates) -> StepTime:
    """The seconds of a step.

    Args:
        program: the model on the meta device, whole.
        row: a microbatch; its shapes are read.

    Raises:
        PlanError: the rates were measured for another number of busy ranks.
    """
    return predict_from_calls(plan, trace_operators(program, plan, row), rates)


def predict_from_calls(plan: Plan, calls: Sequence[OperatorCall], rates: HostRates) -> StepTime:
    """The seconds of a step whose microbatches call these operators.

    Raises:
        PlanError: the rates were measured for another number of busy ranks.
    """
    if plan.grid(0).world_size != rates.ranks:
        raise PlanError(
            f"the rates are those of {rates.ranks} busy ranks, and the plan has {plan.grid(0).world_size}; measure "
            f"them by trine plan --calibrate FILE --world {plan.grid(0).world_size}."
        )
    computation = Computation(
        forward=0.0,
        backward=0.0,
        stages=tuple(_stage(calls, stage, plan, rates) for stage in range(plan.schedule.stages)),
        handover=rates.engine.handover,
        owned_update=max(_update(plan, pp, rates) for pp in range(plan.config.pp)) + rates.engine.step,
        overlap=rates.overlap,
        gather=rates.engine.gather,
    )
    return predict_step(plan, computation, host_axes(plan.grid(0), rates))


def operator_seconds(calls: Sequence[OperatorCall], rates: HostRates) -> float:
    """Of these calls one after another."""
    return sum(_seconds(call, rates) for call in calls)


def _seconds(call: OperatorCall, rates: HostRates) -> float:
    own = call.times * rates.seconds(call.kind, *call.sizes) if call.kind else 0.0
    return own + rates.engine.operator


def _stage(calls: Sequence[OperatorCall], stage: int, plan: Plan, rates: HostRates) -> StageSeconds:
    own = [call for call in calls if call.stage == stage]
    forward = operator_seconds([call for call in own if not call.backward], rates)
    backward = operator_seconds([call for call in own if call.backward], rates)
    again = operator_seconds([call for call in own if call.repeats], rates)
    return StageSeconds(
        forward=forward + rates.engine.microbatch,
        backward=backward + again + _sums(plan, stage, rates),
    )


def _sums(plan: Plan, stage: int, rates: HostRates) -> float:
    """Of the gradients of a stage and microbatch: the first of a step is copied, the others are added."""
    pp = plan.schedule.rank_of_stage[stage]
    stages, microbatches = max(1, len(plan.stages(pp))), plan.config.accumulation
    sizes = [prod(row.local_shape(0)) for row in plan.table.held_by(pp) if row.trainable]
    copied, added = (sum(rates.seconds(kind, float(size)) for size in sizes) for kind in ("copy", "add"))
    return (copied + (microbatches - 1) * added) / microbatches / stages


def _update(plan: Plan, pp: int, rates: HostRates) -> float:
    parts = plan.config.shards if plan.config.zero_optimization.stage else 1
    buckets = [bucket.elements / parts for bucket in plan.layout(Coord(pp=pp)).buckets]
    shards = [bucket.elements / plan.config.shards for bucket in plan.layout(Coord(pp=pp)).buckets]
    norms = sum(rates.seconds("squared norm", size) for size in shards)
    return norms + sum(rates.seconds("update", size) for size in buckets)


def host_axes(grid: Grid, rates: HostRates) -> AxisLinks:
    """The links of a grid whose ranks all run on this host; those of one axis have the speed of that axis alone."""
    found: dict[tuple[Axis, Pattern], LinkSpeed] = {}
    axes: tuple[Axis, ...] = ("tp", "dp", *grid.data_axes, "replica", "world")
    for axis in axes:
        ranks = grid.size(axis)
        if ranks == 1:
            continue
        carrier = "tp" if grid.peers(axis) == grid.peers("tp") else "dp"
        for pattern, op in _OPS:
            share = sent_bytes(op, ranks << 20, ranks) / (ranks << 20)
            found[axis, pattern] = measured_link(rates.collectives[f"{carrier} {op}"], share)
    pairs = [(source, target) for source in range(grid.pp) for target in range(grid.pp) if source != target]
    hops = {pair: measured_link(rates.collectives["pp send"], 1.0) for pair in pairs}
    return AxisLinks(collectives=found, hops=hops, through_memory=grid.tp > 1)


def seconds_by_class(calls: Sequence[OperatorCall], rates: HostRates) -> dict[str, float]:
    """Seconds of the calls of a microbatch by table, what recomputation repeats twice; to see what is off."""
    found: dict[str, float] = {}
    for call in calls:
        name = call.kind or "views"
        found[name] = found.get(name, 0.0) + (1 + call.repeats) * _seconds(call, rates)
    return found
