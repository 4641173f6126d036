"""From a plan to live parts on this rank: the one place that knows all parts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from engine.build.consistency import check_equal
from engine.build.forward_changes import agree_on_kernels, delay_heads, fuse_activations, leave_out
from engine.build.place_model import place_model
from engine.build.request import Request
from engine.checkpoint.full_state import FullState, state_entries
from engine.config import Config
from engine.config.sections import OptimizerConfig
from engine.optim.lr_schedules import make_learning_rate
from engine.parallel.activation_checkpointing.blocks import Recomputation
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.comm.comm import Comm
from engine.parallel.model.rng_streams import RandomStreams
from engine.parallel.pipeline.runtime.executor import Executor, rank_schedule
from engine.parallel.pipeline.runtime.split_backward import SplitBackward
from engine.parallel.pipeline.runtime.stage import Stage
from engine.parallel.pipeline.runtime.transport import CommTransport
from engine.parallel.tensor.layers.parameter_use import FirstUse
from engine.parallel.tensor.layers.partial_grads import PartialSums
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.planning.analysis import PlanRequest
from engine.planning.budgets import reduces_each_microbatch
from engine.planning.plan import Plan, build_plan, stages_wanted
from engine.planning.profile_calls import Costs, profile_run
from engine.precision.dtypes import make_precision
from engine.precision.fp32_modules import Fp32Modules
from engine.program.batch import Batch
from engine.program.program import Program
from engine.step.buffer_rollback import WrittenBuffers
from engine.step.runtime import Parts, RankRuntime
from engine.step.trace_cache import TraceCache
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gather_groups import GatheredModules
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.optim.bf16_updates import FullShapes, RoundedUpdates
from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion, FlatSGD
from engine.zero.optim.sharded_optimizer import OptimizerFactory, ShardedOptimizer, check_elementwise
from engine.zero.reduce.microbatch_reducer import MicrobatchReducer
from engine.zero.reduce.reducer import Reducer
from engine.zero.reduce.replica_check import NonFinite, ReplicaCheck
from engine.zero.reduce.step_reducer import GradientReducer


def plan_run(model: nn.Module, config: Config, request: Request, example: Batch, costs: Costs | None = None) -> Plan:
    """The plan of this run; see :func:`engine.planning.plan.build_plan` for what it refuses."""
    program = Program(model, request.loss_fn, make_precision(config, model), torch.device("cpu"))
    return build_plan(
        config, PlanRequest(program, example, request.optimizer is not None, costs, request.forwards.replacements)
    )


def measure_model(model: nn.Module, config: Config, request: Request, example: Batch, device: torch.device) -> Costs:
    """What the calls of this run cost on ``device``; see :func:`engine.planning.profile_calls.profile_run`."""
    program = Program(model, request.loss_fn, make_precision(config, model), torch.device("cpu"))
    return profile_run(program, example, config, stages_wanted(config), device)


def build(model: nn.Module, plan: Plan, comm: Comm, device: torch.device, request: Request, example: Batch) -> Parts:
    """Check that all ranks were given the same, then place parameters, hooks and optimizer."""
    config = plan.config
    check_equal(model, plan, comm, device)
    for stages in plan.tie_owners:
        comm.connect(stages)
    comm.link(plan.links)
    entries = state_entries(model)
    axis, kernels = TensorAxis(comm), request.forwards.kernels
    axis.kernels = kernels
    agree_on_kernels(kernels, comm, device)
    if plan.gather_groups is not None:
        comm.open_gathers()
    with all_or_none(comm, device):
        buckets = place_model(model, plan, comm, device, axis)
    trained = len(plan.layout(comm.grid.coord()).buckets)
    buckets, frozen = buckets[:trained], buckets[trained:]
    reducer = _reducer(model, plan, comm, buckets)
    optimizer = _optimizer(plan, buckets, comm, request)
    rate = make_learning_rate(optimizer.inner, config.scheduler, request.lr_scheduler)
    program = Program(model, request.loss_fn, plan.precision, device)
    heads = [name for name in request.forwards.heads if plan.is_last(f"{name}.weight")]
    with all_or_none(comm, device):
        fused = [*fuse_activations(model, request.forwards), *delay_heads(model, heads, axis)]
    waiting = SplitBackward(model, kernels) if plan.schedule.splits else None
    islands = Fp32Modules(model, plan.precision.kept.modules, plan.precision.compute)
    streams = RandomStreams(model, device)
    recomputation = Recomputation(model, config.activation_checkpointing, axis)
    gathering, released = _gather(model, plan, comm, (*buckets, *frozen))
    stage = Stage(model, device) if plan.cut is not None else None
    sights, first_use = TraceCache(plan, program, axis, example), FirstUse(model, plan.tensor)
    bench = RankRuntime(program, streams, sights, stage, reducer, first_use, gathering, waiting)
    executor = Executor(CommTransport(comm, plan.schedule.rank_of_stage, device))
    removals = [stage.close] if stage else []
    removals += [*released, recomputation.remove, islands.remove, streams.remove, reducer.remove]
    removals += [waiting.remove] if waiting else []
    if config.compile and plan.tensor is not None:
        removals += leave_out(model, plan.tensor.layers)
    removals += [*fused, request.forwards.remove]
    full = FullState(model, plan, entries, comm)
    copies, nonfinite = ReplicaCheck(plan, buckets, comm), NonFinite(plan, buckets, comm, device)
    checks = copies, nonfinite, WrittenBuffers(model)
    training, evaluation = (
        rank_schedule(schedule, comm.grid.coord().pp) for schedule in (plan.schedule, plan.evaluation)
    )
    return Parts(
        plan, comm, bench, executor, training, evaluation, buckets, frozen, optimizer, rate, full, *checks, removals,
        kernels,
    )  # fmt: skip


def _optimizer(plan: Plan, buckets: Sequence[FlatBucket], comm: Comm, request: Request) -> ShardedOptimizer:
    config, shaped = plan.config, request.optimizer is not None
    factory = request.optimizer or _factory(config.optimizer or OptimizerConfig())
    sharded = config.zero_optimization.stage > 0
    optimizer = ShardedOptimizer(buckets, plan.groups, factory, comm, sharded, shaped)
    if not plan.precision.master:
        optimizer.round(_rounding(plan, comm.grid.coord().tp))
    optimizer.use(request.forwards.kernels)
    if config.tp > 1:
        check_elementwise(optimizer.inner, f"parallel.tensor {config.tp}")
    return optimizer


def _rounding(plan: Plan, tp: int) -> RoundedUpdates:
    rows = {row.name: row for row in plan.table}
    whole = FullShapes({name: number for number, name in enumerate(rows)}, rows, tp)
    return RoundedUpdates(plan.config.seed, whole, plan.precision.widths("bfloat16").moments)


def _reducer(model: nn.Module, plan: Plan, comm: Comm, buckets: Sequence[FlatBucket]) -> Reducer:
    config, wire, sums = plan.config, plan.precision.wire, PartialSums(plan.table, comm)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if reduces_each_microbatch(config):
        return MicrobatchReducer(buckets, trained, comm, wire, config.accumulation, sums)
    return GradientReducer(buckets, trained, comm, wire, config.zero_optimization.stage > 0, sums)


def _gather(
    model: nn.Module, plan: Plan, comm: Comm, buckets: Sequence[FlatBucket]
) -> tuple[ParameterGatherer | None, list[Callable[[], None]]]:
    """What makes sharded parameters whole, and what takes its hands off the modules."""
    gathers = plan.gathers(comm.grid.coord())
    if gathers is None or plan.gather_groups is None:
        return None, []
    gathering = ParameterGatherer(buckets, gathers.order, gathers.pinned, comm)
    modules = GatheredModules(model, plan.gather_groups, gathers.order, gathering)
    return gathering, [modules.remove, gathering.retire]


def _factory(config: OptimizerConfig) -> OptimizerFactory:
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "AdamW": (FlatAdam, {"decoupled": True}),
        "Adam": (FlatAdam, {"decoupled": False}),
        "SGD": (FlatSGD, {}),
        "Lion": (FlatLion, {}),
    }
    kind, extra = kinds[config.type]
    options = dict(config.params) | extra
    return lambda groups: kind(groups, **options)
