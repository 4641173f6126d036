"""Costs of a plan on absent GPUs: memory of every pipeline rank by kind, and seconds of a step.

State, gathers, schedule and traffic come from the plan; the cost model adds seconds of operators, activation bytes and
link speeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.parallel.context.balance import WorkBalance, causal_balance
from engine.parallel.grid import Coord
from engine.parallel.pipeline.schedule.simulate import peak_live
from engine.planning.budgets import sequence_unit
from engine.planning.cost_model.estimate import (
    CHANNEL_BYTES,
    CONTEXT_BYTES,
    SLACK,
    BlockSample,
    LayoutEstimate,
    RankMemory,
    StepModel,
    blocks_held,
    exchange_seconds,
    working_bytes,
)
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import EngineTraits, TrainingLayout
from engine.planning.cost_model.links import UPDATE_BYTES, Links, LinkSpeed, Roofline, tensor_groups_cross
from engine.planning.cost_model.workload import Workload
from engine.planning.plan import Plan
from engine.planning.step_time.expert_traffic import ExpertTraffic, expert_traffic
from engine.planning.step_time.prediction import Computation, HostLinks, StepTime, place_axes, predict_step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """Estimated memory and time of one plan on one GPU type."""

    layout: TrainingLayout
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank, of the fullest of its data, context and tensor ranks."""
    time: StepTime
    closed: LayoutEstimate
    """Closed-form estimate of the same layout."""
    tokens: int
    """Number of tokens per step."""
    flops_of_token: float
    exchanges: tuple[ExpertTraffic, ...]
    """Rows of shared experts that the first rank of each pipeline rank exchanges; empty if data ranks share none."""
    balance: WorkBalance | None
    """Attention work of the context ranks under a causal mask; None if there is one rank."""
    crossing_seconds: float
    """Seconds per step that are lost because tensor groups span nodes; 0 if they do not."""

    @property
    def experts(self) -> ExpertTraffic | None:
        """Traffic of token rows on the first rank; None if experts are not divided."""
        return self.exchanges[0] if self.exchanges else None

    @property
    def fullest(self) -> RankMemory:
        """Estimated memory of the pipeline rank that needs the most bytes."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.time.total / self.layout.world

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s per GPU."""
        return self.tokens_per_second * self.flops_of_token


def planned_layout(plan: Plan) -> TrainingLayout:
    """Returns the grid, batch, schedule and recomputation of ``plan`` as a layout of the cost model."""
    config = plan.config
    recomputation = config.activation_checkpointing.mode
    return TrainingLayout(
        dp=config.dp,
        cp=config.cp,
        tp=config.tp,
        pp=config.pp,
        ep=config.parallel.expert,
        order=config.parallel.order,
        stage=config.zero_optimization.stage,
        reduction=config.zero_optimization.reduce,
        schedule=config.parallel.schedule if plan.decision is None else plan.schedule.name,
        virtual=plan.schedule.stages // config.pp,
        micro=config.micro,
        microbatches=config.accumulation,
        recomputation=recomputation if recomputation != "offload" else config.activation_checkpointing.others,
        inputs=config.activation_checkpointing.inputs,
        sequence=config.parallel.sequence_parallel or config.tp == 1,  # with one tensor rank it is the same
    )


def plan_costs(plan: Plan, work: Workload, gpu: GpuSpec, node: int, sample: BlockSample | None = None) -> PlanCosts:
    """Returns the estimated memory and time of ``plan`` on GPUs of type ``gpu``, with ``node`` GPUs per node.

    ``work``: sizes and costs of the model. ``sample``: counted activation bytes of a block; None: estimated by
    formulas.
    """
    layout, traits = planned_layout(plan), EngineTraits()
    time = _seconds(plan, work, gpu, node, Roofline(work, layout, gpu, traits))
    crossing = 0.0
    if tensor_groups_cross(layout.tp, node):
        inside = _seconds(plan, work, gpu, layout.world, Roofline(work, layout, gpu, traits))
        crossing = max(0.0, time.communication.get("tp", 0.0) - inside.communication.get("tp", 0.0))
    return PlanCosts(
        layout=layout,
        memory=tuple(_memory(plan, work, layout, pp, sample) for pp in range(layout.pp)),
        time=time,
        closed=StepModel(work, gpu, node).estimate(layout),
        tokens=layout.rows * work.context,
        flops_of_token=work.flops_of_token(),
        exchanges=tuple(filter(None, (expert_traffic(plan, work, Coord(pp=pp)) for pp in range(layout.pp)))),
        balance=_balance(plan, work),
        crossing_seconds=crossing,
    )


def _balance(plan: Plan, work: Workload) -> WorkBalance | None:
    config = plan.config
    return causal_balance(work.context, config.cp, sequence_unit(config)) if config.cp > 1 else None


def host_links(gpu: GpuSpec, node: int) -> HostLinks:
    """Returns the link speeds inside and between nodes with ``node`` GPUs of type ``gpu``, from its data sheet."""
    return HostLinks(
        within=LinkSpeed(gpu.link_latency, gpu.link_rate * gpu.reached.link),
        between=LinkSpeed(gpu.network_latency, node * gpu.network_rate * gpu.reached.network),
    )


def _seconds(plan: Plan, work: Workload, gpu: GpuSpec, node: int, roofline: Roofline) -> StepTime:
    grid, layout = plan.grid(0), planned_layout(plan)
    block, head = roofline.block(), roofline.head()
    hosts = [str(rank // node) for rank in range(grid.world_size)]
    besides = 1 + gpu.reached.step
    whole = besides * grid.tp * grid.cp  # of a rank alone: the rule divides it by the tensor and context ranks
    computation = Computation(
        forward=whole * (work.blocks * block.forward + head / 3),
        backward=whole * (work.blocks * (block.backward + roofline.recomputed(block)) + head * 2 / 3),
        update=besides * work.parameters * UPDATE_BYTES / roofline.memory_rate,
        exchange=exchange_seconds(work, layout, Links(layout, gpu, node)),
    )
    return predict_step(plan, computation, place_axes(grid, hosts, host_links(gpu, node)))


def _memory(plan: Plan, work: Workload, layout: TrainingLayout, pp: int, sample: BlockSample | None) -> RankMemory:
    coord = Coord(pp=pp)
    state = _fullest_state(plan, pp)
    wide = plan.precision.itemsize / work.itemsize
    kept, logits, again = working_bytes(work, layout, EngineTraits())
    kept, again = (wide * kept, wide * again) if sample is None else (sample.kept * layout.micro, wide * again)
    blocks, live = _blocks(plan, work, pp), peak_live(plan.schedule)[pp]
    activations = kept * blocks_held(layout, blocks, live / len(plan.stages(pp)))
    last = 0.0
    if pp == plan.last_rank:
        last = logits if sample is None else max(logits, sample.around * layout.micro)
    exchanged = expert_traffic(plan, work, coord)
    buffers = max(last, again) + _gathered(plan, coord) + (exchanged.round if exchanged is not None else 0.0)
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp))
    return RankMemory(
        parameters=state["parameters"]
        + state["frozen parameters"]
        + state.get("secondary shards", 0)
        + round(work.buffer_bytes),
        gradients=state["gradients"] + state.get("error feedback", 0),
        optimizer=state["master"] + state["optimizer"] + state.get("average", 0),
        activations=activations,
        buffers=buffers,
        communication=axes * CHANNEL_BYTES,
        slack=CONTEXT_BYTES + SLACK * (activations + buffers),
    )


def _fullest_state(plan: Plan, pp: int) -> Mapping[str, int]:
    """Returns the bytes of state, by kind, on the rank of pipeline rank ``pp`` that has the most.

    Data ranks differ if parameter groups have different optimizers, tensor ranks if whole matrices are updated.
    """
    grid, owners = plan.grid(0), plan.matrix_owners
    coords = [coord for rank in range(grid.world_size) if (coord := grid.coord(rank)).pp == pp]
    if owners is None:
        coords = [coord for coord in coords if coord.tp == 0]
        coords = coords if len(set(plan.moments or ())) > 1 else coords[:1]
    return max((plan.state(coord).device for coord in coords), key=lambda state: sum(state.values()))


def _blocks(plan: Plan, work: Workload, pp: int) -> float:
    """Returns blocks of a pipeline rank, by its share of the calls that begin one."""
    if plan.partition is None or plan.trace is None:
        return work.blocks
    here = set(plan.stages(pp))
    begun = [
        stage for stage, call in zip(plan.partition.stage_of_call, plan.trace.calls, strict=True) if call.starts_block
    ]
    return work.blocks * sum(stage in here for stage in begun) / max(1, len(begun))


def _gathered(plan: Plan, coord: Coord) -> float:
    """Returns parameters of ZeRO 3 that are gathered at a time: a group, and the next one."""
    gathers = plan.gathers(coord)
    if gathers is None:
        return 0.0
    whole = [sum(gathers.sizes[index] for index in members) for members in gathers.order.members]
    return float(max(map(sum, zip(whole, [*whole[1:], 0], strict=True)), default=0))
