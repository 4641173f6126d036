"""Assembly of this rank's runtime from a plan: sharded model, communication, executor, optimizer.

Overlap of matrix products with tensor-parallel communication (``parallel.overlap``):

auto      chunks on GPUs for large products; fused kernels where they were measured faster (``kernels/overlap.json``)
off       none: each collective is waited for
chunks    rows are sent in chunks, on any device
fused     kernels that communicate; collectives for unsuitable products
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from engine.build.equal_input import check_equal
from engine.build.forward_changes import (
    agree_on_kernels,
    fuse_activations,
    leave_out_of_compilation,
    make_heads_lazy,
    own_card,
)
from engine.build.held_module import lay_entries_apart, refuse_pickles
from engine.build.place_model import offload_to_disk, place_model
from engine.build.request import Request
from engine.build.step_parts import PartRequest, make_parts
from engine.config import Config
from engine.config.optim_sections import OptimizerConfig
from engine.kernels.dispatch import Kernels, has_triton, runs_triton
from engine.optim.built_in import built_in_optimizer
from engine.optim.lr_schedules import LearningRate, make_learning_rate, schedule_words
from engine.optim.param_groups import show_inner
from engine.outer.pulled_weights import PulledWeights
from engine.parallel.activation_checkpointing.blocks import Again, recompute_blocks
from engine.parallel.activation_checkpointing.host_activations import HostActivations
from engine.parallel.activation_checkpointing.tiles import run_in_tiles
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.symmetric_memory import SlotSizes, SymmetricBuffer
from engine.parallel.comm.world import timeout_seconds
from engine.parallel.context.recurrence.followed import follow_sequences
from engine.parallel.context.rows.rowwise import run_rowwise
from engine.parallel.experts.listed import share_listed
from engine.parallel.experts.routed import share_experts
from engine.parallel.grid import Grid, ShardHolder
from engine.parallel.kernel_injection.inject import LAZY_HEAD
from engine.parallel.model.blocks import has_compiled_code
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.parametrized_weights import keep_parameters
from engine.parallel.model.quantized_layers import quantized_layers
from engine.parallel.model.rng_streams import RandomStreams
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.parallel.pipeline.runtime.executor import Executor
from engine.parallel.pipeline.runtime.split_backward import SplitBackward
from engine.parallel.pipeline.runtime.stage import AbsentParameters, Stage
from engine.parallel.pipeline.runtime.transport import CommTransport
from engine.parallel.tensor.layers.parameter_use import ParameterUseCheck
from engine.parallel.tensor.layers.partial_grads import PartialSums
from engine.parallel.tensor.tp_axis import Overlap, TensorAxis
from engine.planning.analysis import PlanRequest, search_styles
from engine.planning.budgets import (
    gathers_once,
    pipeline_format,
    ranks_with_secondary_shards,
    reduces_each_microbatch,
    sequence_unit,
    tensor_format,
    wire_formats,
)
from engine.planning.cost_model.attention_rates import asked_method
from engine.planning.expert_plan import find_expert_plan
from engine.planning.found_styles import FoundStyles
from engine.planning.fused_layers import measured_overlap
from engine.planning.plan import Plan, build_plan, stages_wanted
from engine.planning.profile_calls import Costs, profile_run
from engine.precision.dtypes import make_precision
from engine.precision.fp32_modules import put_casts
from engine.program.batch import Batch
from engine.program.batch_rows import BatchRows
from engine.program.context_program import with_context
from engine.program.expert_load import ExpertCounter
from engine.program.program import Program
from engine.program.router_replay import RouterReplay
from engine.step.runtime import PipelineRuntime, RankRuntime
from engine.step.trace_cache import TraceCache
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.encoded_gather import round_initial
from engine.zero.gather.gather_groups import GatheredModules
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.offload.host_copies import HostCopies
from engine.zero.optim.bf16_updates import FullShapes, RoundedUpdates
from engine.zero.optim.inner_optimizer import check_elementwise
from engine.zero.optim.matrix.matrix_updates import MatrixUpdates
from engine.zero.optim.rules.adafactor import FactoredUpdates
from engine.zero.optim.rules.layerwise import LayerwiseUpdates
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.encoded_reduction import connect_hops, encoded_reductions
from engine.zero.reduce.gradient_guard import GradientGuard, UserBackward
from engine.zero.reduce.microbatch_reducer import MicrobatchReducer
from engine.zero.reduce.reducer import Reducer, ReducerSetup
from engine.zero.reduce.step_reducer import GradientReducer
from engine.zero.state.state_inventory import StateInventory

_SHOWN_NOTE = "the optimizer that was passed shows groups and state of the engine's"
_STEPS_NOTE = "the engine makes the steps of the scheduler that was passed"
_REDUCER_NOTE = "gives each gradient to a flat bucket as soon as backward has made it, and zero_grad() drops it there"


def plan_run(
    model: nn.Module,
    config: Config,
    request: Request,
    example: Batch,
    costs: Costs | None = None,
    found: FoundStyles | None = None,
) -> Plan:
    """Returns the plan of this run: pipeline stages, sharding and schedule.

    Args:
        request: arguments of ``initialize`` other than model and configuration.
        example: one microbatch, with which the model is traced.
        costs: costs of module calls, measured on rank 0, to balance pipeline stages; None: not needed.
        found: tensor-parallel styles of the layers, found on rank 0; None: not needed.
    """
    wish = _plan_request(model, config, request, example)
    return build_plan(config, replace(wish, costs=costs, found=found))


def search_model(model: nn.Module, config: Config, request: Request, example: Batch) -> FoundStyles:
    """Returns tensor-parallel styles (column, row etc.) for the layers of ``model``. ``example``: one microbatch."""
    wish = _plan_request(model, config, request, example)
    return search_styles(config, replace(wish, shared_experts=find_expert_plan(model, config)))


def _plan_request(model: nn.Module, config: Config, request: Request, example: Batch) -> PlanRequest:
    return PlanRequest(
        program=request.program(model, make_precision(config, model), torch.device("cpu")),
        example=example,
        card=own_card(request.changes.kernels),
        own_optimizer=request.optimizer is not None,
        own_rule=request.whole,
        own_schedule=schedule_words(request.lr_scheduler),
        replacements=request.changes.replacements,
        given=request.given,
    )


def measure_model(model: nn.Module, config: Config, request: Request, example: Batch, device: torch.device) -> Costs:
    """Measures time and memory of each module call in a forward and backward of ``example``, one microbatch, on
    ``device``.
    """
    program = request.program(model, make_precision(config, model), torch.device("cpu"))
    return profile_run(program, example, config, stages_wanted(config), device)


def build(
    model: nn.Module, plan: Plan, comm: Comm, device: torch.device, request: Request, example: Batch
) -> RankRuntime:
    """Shards ``model`` and returns the objects that run steps. Collective over the world.

    Raises PlanError on all ranks, before sharding, if models or plans differ between ranks. ``example``: one
    microbatch.
    """
    check_equal(model, plan, comm, device)
    return assemble_rank(model, plan, comm, device, request, example)


def assemble_rank(
    model: nn.Module, plan: Plan, comm: Comm, device: torch.device, request: Request, example: Batch
) -> RankRuntime:
    """Shards and patches ``model`` in place; returns the objects that run steps on this rank. All ranks call it."""
    config, patches, kernels = plan.config, request.patches, request.changes.kernels
    axis, holder = _connect(plan, comm, kernels, device), comm.grid.holder()
    with all_or_none(comm, device), request.placing():
        placed = place_model(model, plan, comm, device, axis, request)
    user_backward, program = UserBackward(), _program(model, plan, comm, device, request)
    encoder, (buckets, frozen) = _encoder(config, kernels), _parts(placed, plan, comm.grid)
    optimizer = _optimizer(plan, buckets, comm, request, device)
    reducer = _reducer(model, plan, comm, optimizer.copies, user_backward, kernels)
    _fuse(model, plan, comm, device, request, axis)
    split_backward = SplitBackward(model, patches, kernels) if plan.schedule.splits else None
    # before the gatherer, whose hooks go around these patches: they run while parameters are gathered
    _keep_out(model, plan, patches)
    replay = _replay(model, plan, request.rows, patches)
    experts, streams = _within_gathers(model, plan, comm, axis, device, patches)
    again, program = _runs_again(streams, replay), replace(program, replay=replay)
    on_host = _recompute(model, plan, axis, device, patches, again)
    gatherer = _gatherer(model, plan, comm, placed, patches, user_backward)
    inventory = StateInventory(
        model=model, rows=plan.table.held_by(holder), trained=buckets, frozen=frozen, optimizer=optimizer,
        reducer=reducer, encoder=encoder, gatherer=gatherer, grid=comm.grid)  # fmt: skip
    learning_rate = _learning_rate(model, optimizer, config, request)
    made = PartRequest(
        model=model, plan=plan, comm=comm, device=device, inventory=inventory, optimizer=optimizer, rates=learning_rate,
        reducer=reducer, encoder=encoder, gatherer=gatherer, experts=experts, replay=replay)  # fmt: skip
    traces = TraceCache(plan, program, axis, example) if plan.partition is not None else None
    return RankRuntime(
        plan=plan,
        comm=comm,
        axis=axis,
        program=program,
        patches=patches,
        streams=streams,
        first_use=ParameterUseCheck(model, plan.tensor, plan.trace is not None) if plan.tensor is not None else None,
        split_backward=split_backward,
        executor=Executor(CommTransport(comm, plan.schedule.rank_of_stage, device, encoder), comm.recorder),
        inventory=inventory,
        gatherer=gatherer,
        reducer=reducer,
        user_backward=user_backward,
        gradient_guard=_guard(model, plan, reducer, patches),
        optimizer=optimizer,
        learning_rate=learning_rate,
        parts=make_parts(made),
        on_host=on_host,
        pipeline=_pipeline(model, plan, traces, device, patches, holder) if traces is not None else None,
    )


def _replay(model: nn.Module, plan: Plan, rows: BatchRows, patches: ForwardPatches) -> RouterReplay | None:
    """Lets the routers of the plan take the choices of a batch; None: they choose."""
    if plan.replay is None:
        return None
    replay = RouterReplay(plan.replay.routers, plan.replay.layers, rows)
    if _compiles(model, plan):
        leave_out_of_compilation(model, plan.replay.modules, patches)
    replay.install(model, patches)
    return replay


def _runs_again(streams: RandomStreams, replay: RouterReplay | None) -> Again:
    """Returns the state that a block restores when it runs again: draws on the host, and choices of experts."""

    def begin() -> Callable[[], AbstractContextManager[None]]:
        drawing, routing = streams.again(), replay.again() if replay is not None else nullcontext

        @contextmanager
        def enter() -> Iterator[None]:
            with drawing(), routing():
                yield

        return enter

    return begin


def _within_gathers(
    model: nn.Module, plan: Plan, comm: Comm, axis: TensorAxis, device: torch.device, patches: ForwardPatches
) -> tuple[ExpertCounter | None, RandomStreams]:
    """Wraps forwards in the parts that run while parameters are gathered, from inside to outside."""
    if plan.config.cp > 1:
        follow_sequences(model, plan.context, patches)
    ranks = {"tp": axis.index, "cp": comm.grid.coord().cp}
    counter = ExpertCounter(plan.experts, device, ranks) if plan.experts else None
    if (shared := plan.shared_experts) is not None:
        uncounted = partial(counter.counting, None) if counter is not None else nullcontext
        share_experts(model, shared.routed, comm, axis, patches, _compiles(model, plan))
        share_listed(model, shared.listed, comm, axis, patches, uncounted)
        if _compiles(model, plan):
            leave_out_of_compilation(model, shared.blocks, patches)
    if counter is not None:
        counter.install(model, patches)
    return counter, RandomStreams(model, device, patches)


def _recompute(
    model: nn.Module, plan: Plan, axis: TensorAxis, device: torch.device, patches: ForwardPatches, again: Again
) -> HostActivations:
    """Wraps forwards in tiles, in positions of this rank, and in recomputation, from inside to outside."""
    if plan.tiles is not None:
        run_in_tiles(model, plan.tiles, patches, again)
    run_rowwise(model, plan.rowwise, patches)
    return recompute_blocks(model, plan.config.activation_checkpointing, patches, axis, device, again)


def _program(model: nn.Module, plan: Plan, comm: Comm, device: torch.device, request: Request) -> Program:
    """Returns the rank's model and loss, over sequences sharded over the axis "cp"."""
    program, axis, config = request.program(model, plan.precision, device, comm), TensorAxis(comm, "cp"), plan.config
    asked, unit = asked_method(config, request.changes.kernels.card), sequence_unit(config)
    return with_context(program, axis, asked, plan.context, staged=comm.grid.pp > 1, unit=unit)


def _fuse(model: nn.Module, plan: Plan, comm: Comm, device: torch.device, request: Request, axis: TensorAxis) -> None:
    """Puts fused operators into the model, on all ranks or on none."""
    heads = [each.module for each in plan.replacements if each.operator == LAZY_HEAD]
    with all_or_none(comm, device):
        fuse_activations(model, request.changes, request.patches)
        make_heads_lazy(model, heads, axis, request.patches)


def _keep_out(model: nn.Module, plan: Plan, patches: ForwardPatches) -> None:
    """Excludes layers that communicate or read codes from compilation, and modules in fp32 from narrow dtypes."""
    if _compiles(model, plan):
        cut = plan.tensor.communicating if plan.tensor is not None else ()
        leave_out_of_compilation(model, {*cut, *quantized_layers(model)}, patches)
    put_casts(model, plan.precision.kept, plan.precision.compute, patches)


def _compiles(model: nn.Module, plan: Plan) -> bool:
    return plan.config.compile or any(map(has_compiled_code, model.modules()))


def _encoder(config: Config, kernels: Kernels) -> MessageEncoder | None:
    """Makes the encoder of messages between stages; None: they are sent as they are."""
    form = pipeline_format(config)
    return MessageEncoder(form, kernels, config.wire.error_feedback) if form is not None else None


def _parts(placed: Sequence[FlatBucket], plan: Plan, grid: Grid) -> tuple[Sequence[FlatBucket], Sequence[FlatBucket]]:
    """Returns the buckets of trained parameters, and the buckets of frozen ones."""
    trained = len(plan.layout(grid.coord()).buckets)
    return placed[:trained], placed[trained:]


def _guard(model: nn.Module, plan: Plan, reducer: Reducer, patches: ForwardPatches) -> GradientGuard:
    """Returns the guard of gradients; one call removes its patches and the reducer's."""
    trained = {row.name for row in plan.table if row.trainable}
    guard = GradientGuard(p for name, p in model.named_parameters() if name in trained)
    give_back = guard.take_zero_grad(model)

    def take_off() -> None:
        give_back()
        guard.lift()
        reducer.remove()

    patches.own(model, PatchLayer.PARAMETERS, take_off, _REDUCER_NOTE)
    refuse_pickles(model, patches)
    lay_entries_apart(model, patches)
    return guard


def _pipeline(
    model: nn.Module, plan: Plan, traces: TraceCache, device: torch.device, patches: ForwardPatches, holder: ShardHolder
) -> PipelineRuntime:
    """Makes the runtime of this rank's stages; the last of all parts, since it hides the parameters of other ranks."""
    present = {row.name for row in plan.table.held_by(holder)}
    return PipelineRuntime(
        stage=Stage(model, device, patches),
        traces=traces,
        absent=AbsentParameters(model, present, {row.name: row.owners for row in plan.table}, holder.pp),
    )


def _connect(plan: Plan, comm: Comm, kernels: Kernels, device: torch.device) -> TensorAxis:
    """Opens the groups and links of the plan, and agrees on the kernels of sharded layers. Collective."""
    for stages in plan.tie_owners:
        comm.connect(stages)
    comm.link(plan.links)
    axis = TensorAxis(comm)
    axis.kernels, axis.wire = kernels, tensor_format(plan.config)
    agree_on_kernels(kernels, comm, device)
    set_overlap(axis, comm, plan.config, device)
    if plan.gather_groups is not None:
        comm.open_gathers()
        if (node := ranks_with_secondary_shards(plan.config)) > 1:
            comm.open_gathers(node)
        if plan.shared_experts is not None:
            comm.open_gathers(axis=comm.grid.expert_spread.sharding)
    connect_hops(wire_formats(plan.config, plan.precision), comm)
    for members in plan.matrix_owners.data_groups if plan.matrix_owners is not None else ():
        comm.connect_data(members)
    return axis


def _optimizer(
    plan: Plan, buckets: Sequence[FlatBucket], comm: Comm, request: Request, device: torch.device
) -> ShardedOptimizer:
    config, own = plan.config, request.optimizer is not None and request.whole is None
    round_initial(buckets, comm)
    factory = request.optimizer or built_in_optimizer(config.optimizer or OptimizerConfig())
    if config.outer is not None and config.outer.content == "gradients":
        factory = partial(PulledWeights, lr=(config.optimizer or OptimizerConfig()).params["lr"])
    sharded = config.zero_optimization.stage > 0
    if sharded and own and request.given is not None:  # before its constructor is given flat parts
        check_elementwise(request.given.optimizer, "zero_optimization.stage 1 or more")
    optimizer = ShardedOptimizer(buckets, plan.groups, factory, comm, sharded, own)
    if not plan.precision.master:
        optimizer.round(_rounding(plan, comm.grid.holder()))
    optimizer.use(request.changes.kernels)
    owners = plan.matrix_owners
    if owners is not None and (routes := owners.routes(comm.grid.coord())) is not None:
        optimizer.whole.append(MatrixUpdates(optimizer.places, optimizer.inner, routes, comm))
    if (factors := plan.factors(comm.grid.coord())) is not None:
        optimizer.whole.append(FactoredUpdates(optimizer.places, optimizer.inner, factors, comm))
    if (layers := plan.layers(comm.grid.coord())) is not None:
        optimizer.whole.append(LayerwiseUpdates(optimizer.places, optimizer.inner, layers, comm))
    if config.tp > 1:
        check_elementwise(optimizer.inner, f"parallel.tensor {config.tp}")
    if config.zero_optimization.offload_optimizer.delayed_update:
        optimizer.delay()
    offload_to_disk(optimizer, plan, comm, device)
    return optimizer


def _learning_rate(model: nn.Module, optimizer: ShardedOptimizer, config: Config, request: Request) -> LearningRate:
    """Returns the schedule; from now on the user's own optimizer shows the groups of the inner one."""
    rate = make_learning_rate(optimizer.inner, config.scheduler, request.lr_scheduler)
    if request.given is not None:
        made_here = bool(rate.governs) and not isinstance(request.lr_scheduler, LRScheduler)
        shown = show_inner(request.given.optimizer, optimizer.inner, made_here)
        request.patches.own(model, PatchLayer.PARAMETERS, shown, _SHOWN_NOTE)
    if rate.guarded is not None:
        request.patches.own(model, PatchLayer.PARAMETERS, rate.guarded.lift, _STEPS_NOTE)
    return rate


def _rounding(plan: Plan, holder: ShardHolder) -> RoundedUpdates:
    rows = {row.name: row for row in plan.table}
    whole = FullShapes({name: number for number, name in enumerate(rows)}, rows, holder)
    return RoundedUpdates(plan.config.seed, whole, plan.precision.widths("bfloat16").moments)


def _reducer(
    model: nn.Module, plan: Plan, comm: Comm, copies: HostCopies, user_backward: UserBackward,
    kernels: Kernels,
) -> Reducer:  # fmt: skip
    config = plan.config
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums, wire = PartialSums(plan.table, comm), plan.precision.wire
    # compiled layers make their gradients themselves
    adds = bool(copies.buckets) and kernels.replaces(copies.buckets[0].params.device) and not config.compile
    main = kernels.main if adds else None
    encoded = encoded_reductions(copies.buckets, wire_formats(config, plan.precision), comm, kernels)
    setup = ReducerSetup(copies.buckets, trained, comm, wire, sums, user_backward.start, main, encoded, copies)
    if reduces_each_microbatch(config):
        return MicrobatchReducer(setup, config.accumulation, plan.context.in_blocks)
    return GradientReducer(setup, scatter=config.zero_optimization.stage > 0)


def _gatherer(
    model: nn.Module, plan: Plan, comm: Comm, buckets: Sequence[FlatBucket], patches: ForwardPatches,
    user_backward: UserBackward,
) -> ParameterGatherer | None:  # fmt: skip
    """Returns the gatherer of sharded parameters (ZeRO 3), with hooks on the modules that read them; None below ZeRO
    3."""
    keep_parameters(model, patches)  # of codes too, which need no gatherer
    gathers = plan.gathers(comm.grid.coord())
    if gathers is None or plan.gather_groups is None:
        return None
    pinned = None if gathers_once(plan.config) else gathers.pinned
    gatherer = ParameterGatherer(buckets, gathers.order, pinned, comm, user_backward.start, gathers.within)
    GatheredModules(model, plan.gather_groups, gathers.order, gatherer, patches)
    return gatherer


logger = logging.getLogger("trine")
_MOST_TILES = 1 << 14
"""Limit of the tiles of a rank's rows in one product: 16384 tiles of 128 x 128 are two million rows of 128 columns."""


def set_overlap(axis: TensorAxis, comm: Comm, config: Config, device: torch.device) -> None:
    """Chooses how matrix products overlap with tensor-parallel communication, and writes the choice to ``axis``. All
    ranks must call it.

    For fused kernels it also allocates their buffers, which all tensor ranks can write.
    """
    wanted = config.parallel.overlap
    if wanted == "off":
        axis.overlap = Overlap(frozenset())
    elif wanted == "chunks":
        axis.overlap = Overlap(frozenset({device.type}), 0)
    elif axis.size > 1 and axis.wire is None:
        axis.measured = measured_overlap(config, device, axis.kernels.card)
        if wanted == "fused" or axis.measured is not None:
            runs = runs_triton(device)
            axis.symmetric = _open(comm, config) if runs else None
            if axis.symmetric is None and comm.grid.rank == 0:
                logger.warning(
                    'parallel.overlap "%s": %s; collectives take their place.', wanted, _reason(device, runs)
                )


def _open(comm: Comm, config: Config) -> SymmetricBuffer | None:
    sizes = SlotSizes(ranks=config.tp, capacity=config.parallel.overlap_buffer_bytes, most=_MOST_TILES)
    return comm.open_symmetric("tp", sizes, timeout_seconds(config.communication.timeout_seconds))


def _reason(device: torch.device, runs: bool) -> str:
    if not has_triton():
        return "Triton is not installed"
    if not runs:
        return f"Triton does not run on {device.type}"
    return "the tensor ranks share no memory that all of them can write"
