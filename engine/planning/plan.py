"""Plan: state, actions and traffic of every rank, made without processes and executed unchanged.

It is built from shapes alone, so the model may be on the meta device. Measured bytes are compared with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from engine.config import Config
from engine.config.outer_section import site_optimizer
from engine.errors import ScheduleError
from engine.kernels.codecs.weight_format import WeightFormat
from engine.kernels.optim.matrix_rule import MatrixRule
from engine.optim.built_in import GroupState, MatrixOwners, factor_routes, kept_state, layer_routes, refuse_experts
from engine.optim.param_groups import assign_groups
from engine.parallel.activation_checkpointing.tiles import TilePlan
from engine.parallel.comm.backend import Channel, Link, state_link
from engine.parallel.comm.traffic import Tally, Traffic
from engine.parallel.context.recurrence.followed import ContextPlan
from engine.parallel.context.rows.rowwise import RowwiseModule
from engine.parallel.experts.router_bias import RouterBias
from engine.parallel.grid import Coord, Grid
from engine.parallel.kernel_injection.inject import Replacement
from engine.parallel.pipeline.partition.auto_schedule import ScheduleDecision
from engine.parallel.pipeline.partition.partition import Partition
from engine.parallel.pipeline.schedule.actions import Schedule
from engine.parallel.pipeline.schedule.kinds import make_schedule, training_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import forward_only, there_and_back
from engine.parallel.pipeline.schedule.simulate import Cost
from engine.parallel.pipeline.schedule.validate import check
from engine.parallel.shard_table import Division, ShardRow, ShardTable, build_table
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.trace.model_trace import ModelTrace
from engine.planning.analysis import Analysis, PlanRequest, analyze
from engine.planning.budgets import (
    GatherPlan,
    RankPlan,
    StateBytes,
    control_traffic,
    factor_bytes,
    feedback_bytes,
    frozen_bytes,
    gather_traffic,
    gradient_traffic,
    hosted_buckets,
    meets_each_microbatch,
    optimizer_bytes,
    pipeline_format,
    ranks_with_secondary_shards,
    shards_parameters,
    stage_traffic,
    state_bytes,
    stored_bytes,
    wire_formats,
)
from engine.planning.expert_plan import (
    ExpertPlan,
    ReplayPlan,
    find_expert_plan,
    find_replay_plan,
    find_router_biases,
)
from engine.planning.flat_layouts import FlatLayouts, Users, without_unread_heads
from engine.planning.host_state import refuse_limit, refuse_unknown, setting_notes, smallest_ratio, with_ratio
from engine.precision.dtypes import Precision, make_precision
from engine.precision.frozen_weights import find_quantized, quantized_note, refuse_outside_reads
from engine.program.expert_load import ExpertStack, find_experts
from engine.zero.gather.gather_groups import GatherGroups, find_gather_groups
from engine.zero.gather.gather_schedule import gather_order
from engine.zero.gather.secondary_shards import NO_SHARDS, SecondaryLayout
from engine.zero.layout import FlatLayout
from engine.zero.optim.inner_optimizer import GroupOptions
from engine.zero.optim.rules.adafactor import FactorRoutes
from engine.zero.optim.rules.layerwise import LayerRoutes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a run: grid, shard table, flat layouts (buckets), partition, schedule and budgets."""

    config: Config
    table: ShardTable
    layouts: FlatLayouts
    """Flat layout (buckets) of every grid position."""
    groups: tuple[GroupOptions, ...]
    precision: Precision
    schedule: Schedule
    moments: tuple[GroupState, ...] | None
    """Optimizer state of each parameter group; None for an optimizer of the script, because its state is unknown."""
    notes: tuple[str, ...]
    tensor: TensorPlan | None = None
    """Tensor-parallel plan of layers; None for one tensor rank."""
    trace: ModelTrace | None = None
    """Trace of the example batch; None if none was needed, or if the model cannot be traced and needs no pipeline."""
    partition: Partition | None = None
    """Partition into stages; None without a pipeline."""
    layer_traffic: tuple[Mapping[int, Tally], ...] = ()
    """Traffic of a rank over tp and cp for one microbatch, by context rank and stage; empty if none is known."""
    context: ContextPlan = field(default_factory=ContextPlan)
    """Modules of a model over sharded sequences that need full ones."""
    gather_groups: GatherGroups | None = None
    """Modules that gather their parameters together; None if parameters are not sharded."""
    decision: ScheduleDecision | None = None
    """Comparison of schedules by which "auto" chose; None if the configuration names one."""
    replacements: tuple[Replacement, ...] = ()
    """Modules whose forward is replaced by an engine operator."""
    experts: tuple[ExpertStack, ...] = ()
    """MoE modules with counted tokens; () without ``monitor.expert_load``."""
    own_rule: MatrixRule | None = None
    """Rule of the script's optimizer, if it updates whole matrices."""
    own_schedule: str | None = None
    """Words for the learning-rate schedule that the script passes, "" without one; None: unknown, without a run."""
    router_biases: tuple[RouterBias, ...] = ()
    """Bias buffers of routers that each step adjusts towards an even load."""
    replay: ReplayPlan | None = None
    """Routers that take the experts of each row from a batch; None: routers choose."""
    shared_experts: ExpertPlan | None = None
    """Experts divided among data ranks; None: every data rank has all experts."""
    rowwise: tuple[RowwiseModule, ...] = ()
    """Modules that treat positions one by one; () without context ranks."""
    tiles: TilePlan | None = None
    """Modules that run in tiles of tokens; None: not configured."""

    def grid(self, rank: int) -> Grid:
        """Returns the grid of all ranks as ``rank`` sees it: ``coord()`` returns this rank's coordinates."""
        return self.config.grid(rank)

    def layout(self, coord: Coord) -> FlatLayout:
        """Returns the flat layout at the grid position ``coord``: its parameters in buckets (flat buffers)."""
        return self.layouts[self.grid(0).holder(coord)]

    def hosted(self, coord: Coord) -> frozenset[int]:
        """Returns the indices of the buckets (flat buffers) at grid position ``coord`` that the CPU updates."""
        return hosted_buckets(self.layout(coord), self.config, self.precision)

    def owner_of_buffer(self, name: str) -> int:
        """Returns the pipeline rank of the last stage that uses or writes the module buffer ``name``, and so has its
        current value after a forward; 0 without a pipeline.
        """
        if self.partition is None or self.trace is None:
            return 0
        return self.schedule.rank_of_stage[self.partition.stage_of_buffer(self.trace, name)]

    def forwards(self, microbatches: int) -> Schedule:
        """Returns a forward-only pipeline schedule for this number of microbatches."""
        return forward_only(self.schedule.stages_of_rank, microbatches)

    def steps_of(self, microbatches: int) -> Schedule:
        """Returns a training schedule of this plan's kind (such as "1f1b") for ``microbatches`` microbatches.

        If the kind does not allow that number, all forwards come before all backwards.
        """
        if microbatches == self.schedule.microbatches:
            return self.schedule
        try:
            schedule = make_schedule(self.schedule.name, self.config.pp, microbatches, len(self.stages(0)))
        except ScheduleError:
            schedule = there_and_back(self.schedule.stages_of_rank, microbatches)
        check(schedule)
        return schedule

    @cached_property
    def last_rank(self) -> int:
        """Pipeline rank of the last stage, which computes the loss."""
        return self.schedule.rank_of_stage[-1]

    def stages(self, pp: int) -> tuple[int, ...]:
        """Returns the numbers of the stages on the pipeline rank ``pp``, ascending."""
        return self.schedule.stages_of_rank[pp]

    @property
    def places(self) -> str:
        """Text with the boundaries and pipeline ranks of all stages; equal for plans with equal stages."""
        return "" if self.partition is None else f"{self.partition.boundaries} on {self.schedule.stages_of_rank}"

    @property
    def tie_owners(self) -> tuple[tuple[int, ...], ...]:
        """Groups of pipeline ranks that share tied parameters; all ranks get the groups in the same order."""
        return tuple(sorted({row.owners for row in self.table if len(row.owners) > 1}))

    @property
    def links(self) -> tuple[Link, ...]:
        """Point-to-point links between pipeline ranks: for activations and gradients, and for sending full state dicts
        to rank 0.
        """
        links = {state_link(rank, 0) for rank in range(1, self.config.pp)}
        for plan in self.partition.stages if self.partition is not None else ():
            for other in plan.receives.values():
                source, target = (self.schedule.rank_of_stage[stage] for stage in (other, plan.stage))
                if source != target:
                    links.add(Link(Channel("forward", other, plan.stage), source, target))
                    links.add(Link(Channel("backward", plan.stage, other), target, source))
        return tuple(sorted(links))

    def rank(self, rank: int) -> RankPlan:
        """Returns the planned state bytes and traffic of ``rank``."""
        coord = self.grid(rank).coord()
        holder = self.grid(0).holder(coord)
        held = sum(row.local_elements(holder) for row in self.table.held_by(holder))
        state = self.state(coord)
        return RankPlan(
            coord, held, state.device, state.host, state.disk, self._traffic(coord, self.config.accumulation)
        )

    def traffic_of(self, rank: int, counts: Sequence[int]) -> tuple[Traffic, ...]:
        """Returns the planned traffic of ``rank`` in one step; ``counts``: number of microbatches of each data rank."""
        grid = self.grid(rank)
        own = counts[grid.row_rank]
        met = max(counts) if meets_each_microbatch(self.config) else max(own, 1)
        config = replace(
            self.config, gradient_accumulation_steps=met, train_batch_size=met * self.config.micro * grid.dp
        )
        return replace(self, config=config, schedule=self.steps_of(met))._traffic(grid.coord(), own)

    def state(self, coord: Coord) -> StateBytes:
        """Returns the bytes of state between steps at grid position ``coord``, by memory and by kind of state."""
        holder = self.grid(0).holder(coord)
        rows = self.table.held_by(holder)
        sharded = {slot.name for bucket in self.layout(coord).frozen for slot in bucket.slots}
        whole = [row for row in rows if not row.trainable and row.name not in sharded]
        frozen = sum(frozen_bytes(row, holder, self.precision) for row in whole)
        groups, precision = self._moments, self.precision
        grid = self.grid(self.grid(0).rank_at(**coord))
        owned = partial(optimizer_bytes, groups=groups, grid=grid, config=self.config, precision=precision)
        state = state_bytes(self.layout(coord), frozen, precision, self.config, owned)
        device = dict(state.device)
        device["optimizer"] += factor_bytes(rows, groups, precision)
        if self.matrix_owners is not None:
            device["optimizer"] += self.matrix_owners.state_bytes(coord)
        if (gathers := self.gathers(coord)) is not None and gathers.within.buckets:
            device["secondary shards"] = gathers.secondary_bytes
        if kept := self._feedback_bytes(coord.pp):
            device["error feedback"] = device.get("error feedback", 0) + kept
        return StateBytes(device, state.host, state.disk)

    def _feedback_bytes(self, pp: int) -> int:
        """Returns bytes of the residuals of gradients in the messages of a pipeline rank."""
        if self.partition is None or self.trace is None:
            return 0
        cut, values, ranks = self.partition.stages, self.trace.values, self.schedule.rank_of_stage
        return sum(feedback_bytes(cut[stage], values, ranks, self.config) for stage in self.stages(pp))

    @property
    def stored_bytes(self) -> int:
        """Bytes of a checkpoint over all ranks, without buffers and random states."""
        matrices = self.matrix_owners.stored_bytes() if self.matrix_owners is not None else 0
        return stored_bytes(self.table, self.precision, self.config, self._moments) + matrices

    @property
    def _moments(self) -> tuple[GroupState, ...]:
        return self.moments or (GroupState(),) * len(self.groups)

    @cached_property
    def matrix_owners(self) -> MatrixOwners | None:
        """Owner ranks of matrices that optimizers like Muon update as a whole; None if there are none."""
        if self.own_rule is not None:
            own: dict[int, MatrixRule] = dict.fromkeys(range(len(self.groups)), self.own_rule)
            refuse_experts(self.table, own)
            return MatrixOwners(self.config, self.table.rows, own, self.layouts, ways=3)
        rules = {index: kept.matrices for index, kept in enumerate(self._moments) if kept.matrices is not None}
        refuse_experts(self.table, rules)
        return MatrixOwners(self.config, self.table.rows, rules, self.layouts) if rules else None

    def factors(self, coord: Coord) -> FactorRoutes | None:
        """Returns the all-reduces of Adafactor's statistics at ``coord``; None if Adafactor updates nothing there."""
        groups = frozenset(index for index, kept in enumerate(self._moments) if kept.factored)
        return factor_routes(self._summed(coord), groups, self.config)

    def layers(self, coord: Coord) -> LayerRoutes | None:
        """Returns the all-reduces of norms for LAMB and LARS at ``coord``; None if they update no parameter there."""
        groups = frozenset(index for index, kept in enumerate(self._moments) if kept.layerwise)
        return layer_routes(self._summed(coord), groups, self.config)

    def _summed(self, coord: Coord) -> Iterator[ShardRow]:
        """Yields the parameters of a pipeline coordinate, with those of experts that other data ranks hold."""
        return (row for row in self.table if coord.pp in row.owners)

    def gathers(self, coord: Coord) -> GatherPlan | None:
        """Returns the all-gathers of sharded parameters in a step at grid position ``coord``; None below ZeRO 3."""
        if self.gather_groups is None:
            return None
        zero, layout, stages = self.config.zero_optimization, self.layout(coord), self.stages(coord.pp)
        order = gather_order(layout, [stage for stage in stages if self._is_fed(stage)], stages)
        sizes = tuple(bucket.elements * getattr(torch, bucket.dtype).itemsize for bucket in order.buckets)
        limit = None if zero.gather == "step" else zero.keep_gathered_bytes
        formats = wire_formats(self.config, self.precision)
        wire = tuple(formats.gathered_bytes(b, getattr(torch, b.dtype).itemsize) for b in order.buckets)
        pinned, node = order.pinned(limit, sizes), ranks_with_secondary_shards(self.config)
        apart = {index for index, b in enumerate(order.buckets) if b.spread.sharding != self.grid(0).sharding}
        within = SecondaryLayout(node, frozenset(range(len(sizes))) - pinned - apart) if node > 1 else NO_SHARDS
        return GatherPlan(order, self.schedule.passes(coord.pp), pinned, sizes, wire, within)

    @property
    def tensor_traffic(self) -> Mapping[int, Tally]:
        """Traffic over tp and cp for one microbatch, by stage, on the first context rank; empty if unknown."""
        return self.layer_traffic[0] if self.layer_traffic else {}

    def _is_fed(self, stage: int) -> bool:
        """Returns True if an earlier stage has trained parameters, so that this stage computes gradients of its
        inputs."""
        if self.partition is None:
            return False
        trained = {row.name for row in self.table if row.trainable}
        return any(plan.parameters & trained for plan in self.partition.stages[:stage])

    def _traffic(self, coord: Coord, microbatches: int) -> tuple[Traffic, ...]:
        rows = self.table.held_by(self.grid(0).holder(coord))
        parts = [gradient_traffic(self.layout(coord), rows, self.config, self.precision)]
        if (gathers := self.gathers(coord)) is not None:
            parts.append(gather_traffic(gathers, self.config))
        if self.matrix_owners is not None:
            parts.append(Tally(self.matrix_owners.traffic(coord)))
        if (factors := self.factors(coord)) is not None:
            parts.append(Tally(factors.traffic()))
        if (layers := self.layers(coord)) is not None:
            parts.append(Tally(layers.traffic()))
        counted = sum(stack.experts for stack in self.experts)
        parts.append(control_traffic(self.config, self.grid(0).world_size, counted))
        by_stage = self.layer_traffic[coord.cp] if self.layer_traffic else {}
        for stage in self.stages(coord.pp):
            parts.append(by_stage.get(stage, Tally()).times(microbatches))
            if self.partition is not None and self.trace is not None:
                ranks = self.schedule.rank_of_stage
                form, values = pipeline_format(self.config), self.trace.values
                parts.append(stage_traffic(self.partition.stages[stage], values, ranks, microbatches, form))
        return Tally(row for part in parts for row in part.rows()).rows()


def stages_wanted(config: Config) -> int:
    """Returns the number of pipeline stages for which to trace the model; for schedule "auto", one per rank."""
    return config.pp if config.parallel.schedule == "auto" else _schedule(config).stages


def build_plan(config: Config, request: PlanRequest) -> Plan:
    """Returns the plan of a training run of ``request.program.model``; reads only shapes, dtypes and names.

    Raises:
        ConfigError: a pattern in the optimizer groups matches nothing.
        PlanError: nothing is trainable, a dtype cannot be trained, sizes do not divide, or no partition exists.
        ScheduleError: the schedule is unknown, or does not suit the number of ranks or microbatches.
    """
    model, given = request.program.model, request.given
    assigned, groups = (given.assigned, given.groups) if given else assign_groups(model, config.optimizer)
    precision = make_precision(config, model)
    groups = groups or (GroupOptions(),)  # of a model that is frozen altogether
    requested = None if config.parallel.schedule == "auto" and config.pp > 1 else _schedule(config)
    analysis, request = _analyzed(config, request, requested.stages if requested else config.pp)
    schedule = analysis.decision.schedule if analysis.decision else requested or _schedule(config)
    if analysis.measured is not None and config.parallel.schedule_costs is None:
        schedule = _made(config, config.parallel.schedule, analysis.measured)
    quantized = find_quantized(model, config)
    table = build_table(model, assigned, _division(config, analysis, schedule, quantized, request.shared_experts))
    refuse_outside_reads(table)
    gathers = _gather_groups(config, request, analysis)
    users = Users(schedule.stages_of_rank, analysis.partition, analysis.trace, gathers)
    layouts = FlatLayouts(table, config, precision, users)
    replacements, full = without_unread_heads(model, request.replacements, layouts)
    return _settled(Plan(
        config=config,
        table=table,
        layouts=layouts,
        groups=groups,
        precision=precision,
        schedule=schedule,
        moments=None if request.own_optimizer else kept_state(site_optimizer(config.outer, config.optimizer), groups),
        notes=(*_notes(config, request, precision, schedule, analysis, quantized), *full),
        tensor=analysis.tensor,
        trace=analysis.trace,
        partition=analysis.partition,
        layer_traffic=analysis.traffic,
        context=analysis.context,
        gather_groups=gathers,
        decision=analysis.decision,
        replacements=replacements,
        own_rule=request.own_rule,
        own_schedule=request.own_schedule,
        shared_experts=request.shared_experts,
        experts=find_experts(model) if config.monitor.expert_load or config.router_bias_update_rate else (),
        router_biases=find_router_biases(model, config),
        rowwise=analysis.rowwise,
        tiles=analysis.tiles,
        replay=find_replay_plan(model, config),
    ))  # fmt: skip


def _analyzed(config: Config, request: PlanRequest, stages: int) -> tuple[Analysis, PlanRequest]:
    """Returns the analysis of the example, and the request with the experts that data ranks share."""
    request = replace(request, shared_experts=find_expert_plan(request.program.model, config))
    analysis = analyze(config, request, stages)
    return analysis, replace(request, shared_experts=analysis.shared_experts or request.shared_experts)


def _notes(
    config: Config, request: PlanRequest, precision: Precision, schedule: Schedule, analysis: Analysis,
    quantized: Mapping[str, WeightFormat],
) -> tuple[str, ...]:  # fmt: skip
    """Returns the notes of a plan, in the order of the banner."""
    return (
        *setting_notes(request.program, config, precision, wire_formats(config, precision)),
        *schedule.notes,
        *analysis.notes,
        *(request.shared_experts.notes if request.shared_experts else ()),
        *quantized_note(request.program.model, quantized, precision),
    )


def _gather_groups(config: Config, request: PlanRequest, analysis: Analysis) -> GatherGroups | None:
    """Returns the groups of modules that gather their parameters together; a block with shared experts is one group.

    None if parameters are not sharded.
    """
    if not shards_parameters(config):
        return None
    calls = [call.unit for call in analysis.trace.calls] if analysis.trace else []
    shared = request.shared_experts
    return find_gather_groups(request.program.model, calls, shared.blocks if shared is not None else ())


def _settled(plan: Plan) -> Plan:
    """Returns ``plan`` with the smallest part of the optimizer state on the host that fits, if the configuration has
    "auto".

    Raises:
        PlanError: nothing fits, or the state of the optimizer is unknown.
    """
    offload = plan.config.zero_optimization.offload_optimizer
    if offload.ratio != "auto" or offload.memory_limit is None:
        return plan
    if plan.moments is None:
        raise refuse_unknown()
    positions = [plan.grid(0).rank_at(pp=at.pp, tp=at.tp, ep=at.ep) for at in plan.layouts]
    if len(set(plan.moments)) > 1:  # data ranks have different shares of each optimizer
        positions = list(range(plan.grid(0).world_size))

    def at(ratio: float) -> Plan:
        return replace(plan, config=with_ratio(plan.config, ratio))

    def fullest(planned: Plan) -> tuple[int, int]:
        return max((sum(planned.state(plan.grid(rank).coord()).device.values()), rank) for rank in positions)

    limit = offload.memory_limit * 2**30
    ratio = smallest_ratio(plan.layouts.values(), lambda ratio: fullest(at(ratio))[0] <= limit)
    if ratio is None:
        rank = fullest(at(1.0))[1]
        raise refuse_limit(offload.memory_limit, rank, at(1.0).state(plan.grid(rank).coord()).device)
    return at(ratio)


def _division(
    config: Config,
    analysis: Analysis,
    schedule: Schedule,
    quantized: Mapping[str, WeightFormat],
    shared: ExpertPlan | None,
) -> Division:
    stages = analysis.partition.owners if analysis.partition else {}
    ranks = schedule.rank_of_stage
    partial = analysis.tensor.partial if analysis.tensor else frozenset[str]()
    return Division(
        tp=config.tp,
        cuts=analysis.tensor.parameters if analysis.tensor else {},
        partial=partial.union(shared.divided if shared is not None and config.tp > 1 else ()),
        owners={name: tuple(sorted({ranks[stage] for stage in using})) for name, using in stages.items()},
        in_glue=analysis.trace.read_by_glue if analysis.trace else (),
        quantized=quantized,
        experts=shared.cuts if shared is not None else {},
        expert_dims=shared.dims if shared is not None else {},
    )


def check_settings(model: nn.Module, config: Config) -> None:
    """Raises ConfigError, PlanError or ScheduleError for settings that ``build_plan`` would reject with every batch."""
    assign_groups(model, config.optimizer)
    make_precision(config, model)
    _schedule(config)
    if config.tp > 1 and config.parallel.tensor_plan != "auto":
        find_tensor_plan(model, config.parallel.tensor_plan, config.tp)


def _schedule(config: Config) -> Schedule:
    """Returns the training schedule; with several pipeline ranks, :func:`analyze` has chosen it for "auto"."""
    parallel, given = config.parallel, config.parallel.schedule_costs
    cost = None if given is None else Cost.of_parts(given.forward, given.input, given.weight, given.transfer)
    return training_schedule(parallel.schedule, config.pp, config.accumulation, parallel.virtual_stages, cost)


def _made(config: Config, kind: str, cost: Cost) -> Schedule:
    """Returns the schedule of a kind in the order that suits the ``cost`` of a stage, checked."""
    schedule = make_schedule(kind, config.pp, config.accumulation, config.parallel.virtual_stages, cost)
    check(schedule)
    return schedule
