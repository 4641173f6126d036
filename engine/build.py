"""From a plan to live parts on this rank: the one place that knows all parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.agreement import all_or_none, check_equal
from engine.batch import Batch, named_tensors
from engine.budget import reduces_each_microbatch, shards_parameters
from engine.buffers import WrittenBuffers
from engine.config import Bf16Config, Config, OptimizerConfig
from engine.copies import CopiesCheck
from engine.errors import ConfigError, PlanError
from engine.first_use import FirstUse
from engine.forwards import Forwards, agree_on_kernels, delay_heads, fuse_activations, leave_out
from engine.full_state import FullState, state_entries
from engine.islands import Islands
from engine.kernels.choice import Kernels
from engine.loss import LossFunction
from engine.lr import LearningRate, SchedulerArgument, make_learning_rate
from engine.materialize import materialize, stand_in
from engine.measure import Costs, measure_run
from engine.metrics import check_sinks
from engine.nonfinite import NonFinite
from engine.parallel.comm import Comm
from engine.parallel.pipeline.absent import make_absent
from engine.parallel.pipeline.executor import Executor, Row, row_of
from engine.parallel.pipeline.stage import Stage
from engine.parallel.pipeline.transport import CommTransport
from engine.parallel.pipeline.weights import WaitingWeights
from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.install import install, local_part
from engine.parallel.tensor.partial import PartialSums
from engine.plan import Plan, build_plan, check_settings, stages_wanted
from engine.precision import make_precision, place_rest
from engine.program import Program
from engine.randomness import Streams, keyed
from engine.recompute import Recomputation, find_operators, recomputed_blocks
from engine.sight import Wish, needs_example
from engine.work import Bench, Sights
from engine.zero.gather import Gathering
from engine.zero.gather_modules import GatheredModules
from engine.zero.inner import FlatAdam, FlatLion, FlatSGD
from engine.zero.optimizer import OptimizerFactory, ShardedOptimizer, check_elementwise
from engine.zero.reduce import GradientReducer, Reducer
from engine.zero.reduce_microbatch import MicrobatchReducer
from engine.zero.rounding import RoundedUpdates, Whole
from engine.zero.storage import FlatBucket, Ownership, fill, reserve

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, beside the model and the configuration."""

    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerArgument | None = None
    example_batch: Batch = None
    forwards: Forwards = field(default_factory=Forwards)
    """What has been put on the model."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine needs, built and placed."""

    plan: Plan
    comm: Comm
    bench: Bench
    executor: Executor
    training: Row
    """What this rank does in a step."""
    evaluation: Row
    buckets: Sequence[FlatBucket]
    frozen: Sequence[FlatBucket]
    """Of parameters that are sharded and not trained."""
    optimizer: ShardedOptimizer
    learning_rate: LearningRate
    full_state: FullState
    copies: CopiesCheck
    nonfinite: NonFinite
    written: WrittenBuffers
    removals: Sequence[Callable[[], None]]
    """Take off what was put on the user's model, in this order."""
    kernels: Kernels


def make_model(source: ModelSource, seed: int, device: torch.device) -> nn.Module:
    """The user's module, built under the configured seed when a callable is given.

    Raises:
        PlanError: neither a module nor a callable that returns one.
    """
    model: object = source
    if not isinstance(source, nn.Module):
        if not callable(source):
            raise PlanError(f"model is a {type(source).__name__}; give an nn.Module or a callable that returns one.")
        with keyed(device, seed):
            model = source()
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model callable returned a {type(model).__name__}; it must return an nn.Module.")
    return model


def prepare(model: nn.Module, config: Config, request: Request) -> None:
    """Refuse what can be refused without seeing a batch and without communication."""
    _refuse_unbuilt(config)
    zero = config.zero_optimization
    if zero.reduce == "microbatch" and zero.stage < 2:
        raise ConfigError(
            f"zero_optimization.reduce 'microbatch' with stage {zero.stage}: it keeps gradients as shards, which is "
            "stage 2; set stage to 2, or reduce to 'step'."
        )
    if (zero.gather == "step" or zero.keep_gathered_bytes) and zero.stage < 3:
        what = "gather 'step'" if zero.gather == "step" else "keep_gathered_bytes"
        raise ConfigError(
            f"zero_optimization.{what} with stage {zero.stage}: only stage 3 gathers parameters; set stage to 3, or "
            "leave it out."
        )
    if config.parallel.sequence_parallel_regather and not config.parallel.sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel_regather true without sequence_parallel: nothing is gathered; set "
            "sequence_parallel too, or leave it out."
        )
    _check_master(config.bf16, request)
    find_operators(config.activation_checkpointing)
    recomputed_blocks(model, config.activation_checkpointing)
    check_sinks(config.monitor)
    if config.optimizer is None and request.optimizer is None:
        raise ConfigError("optimizer: null, and none was given in code; name one, or pass optimizer=... in code.")
    _refuse_shared_memory(model)
    _check_example(request.example_batch)
    if needs_example(config) and request.example_batch is None:
        check_settings(model, config)  # the plan, which would say it, is made when the first batch comes
    _switch_cache_off(model)


def _check_master(bf16: Bf16Config, request: Request) -> None:
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        raise ConfigError(
            "bf16.bf16_optimizer_states true with an fp32 master: the master is the larger part; set "
            "bf16.bf16_master_weights_and_grads too, or leave it out."
        )
    if bf16.enabled and bf16.bf16_master_weights_and_grads and request.optimizer is not None:
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads true with an optimizer given in code: it would round every update to "
            "nearest and lose the small ones; name AdamW, Adam, SGD or Lion in the config, or leave it out."
        )


def plan_run(model: nn.Module, config: Config, request: Request, example: Batch, costs: Costs | None = None) -> Plan:
    """The plan of this run; see :func:`engine.plan.build_plan` for what it refuses."""
    program = Program(model, request.loss_fn, make_precision(config, model), torch.device("cpu"))
    return build_plan(
        config, Wish(program, example, request.optimizer is not None, costs, request.forwards.replacements)
    )


def measure_model(model: nn.Module, config: Config, request: Request, example: Batch, device: torch.device) -> Costs:
    """What the calls of this run cost on ``device``; see :func:`engine.measure.measure_run`."""
    program = Program(model, request.loss_fn, make_precision(config, model), torch.device("cpu"))
    return measure_run(program, example, config, stages_wanted(config), device)


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
    waiting = WaitingWeights(model, kernels) if plan.schedule.splits else None
    islands = Islands(model, plan.precision.kept.modules, plan.precision.compute)
    streams = Streams(model, device)
    recomputation = Recomputation(model, config.activation_checkpointing, axis)
    gathering, released = _gather(model, plan, comm, (*buckets, *frozen))
    stage = Stage(model, device) if plan.cut is not None else None
    sights, first_use = Sights(plan, program, axis, example), FirstUse(model, plan.tensor)
    bench = Bench(program, streams, sights, stage, reducer, first_use, gathering, waiting)
    executor = Executor(CommTransport(comm, plan.schedule.rank_of_stage, device))
    removals = [stage.close] if stage else []
    removals += [*released, recomputation.remove, islands.remove, streams.remove, reducer.remove]
    removals += [waiting.remove] if waiting else []
    if config.compile and plan.tensor is not None:
        removals += leave_out(model, plan.tensor.layers)
    removals += [*fused, request.forwards.remove]
    full = FullState(model, plan, entries, comm)
    copies, nonfinite = CopiesCheck(plan, buckets, comm), NonFinite(plan, buckets, comm, device)
    checks = copies, nonfinite, WrittenBuffers(model)
    training, evaluation = (row_of(schedule, comm.grid.coord().pp) for schedule in (plan.schedule, plan.evaluation))
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


def place_model(
    model: nn.Module, plan: Plan, comm: Comm, device: torch.device, axis: TensorAxis
) -> tuple[FlatBucket, ...]:
    """Cut the model to what this rank holds, and move that into flat buckets: trained ones, then frozen ones."""
    coord, config, parameters = comm.grid.coord(), plan.config, dict(model.named_parameters())
    rows = {row.name: row for row in plan.table.held_by(coord.pp)}
    cuts = plan.tensor.parameters if plan.tensor else {}
    sharded, each = config.zero_optimization.stage > 0, reduces_each_microbatch(config)
    who = Ownership(coord.dp, config.dp, sharded, each, shards_parameters(config), plan.precision.master)
    buckets = reserve(plan.layout(coord), parameters, who, device)
    places = {
        slot.name: (flat, slot, view)
        for flat in buckets
        for slot, view in zip(flat.bucket.slots, flat.views, strict=True)
    }

    def keep(name: str, full: Tensor) -> Tensor:
        part = local_part(full, cuts[name], coord.tp) if name in cuts else full
        if name not in places:
            return part
        flat, slot, view = places[name]
        flat.place(slot, part)
        return view

    def empty(name: str) -> Tensor:
        if name in places:
            return places[name][2]
        return torch.zeros(rows[name].local_shape(coord.tp), dtype=rows[name].dtype, device=device)

    meta = {name for name, p in parameters.items() if p.is_meta and name in rows}
    drawn = meta if config.checkpoint.init_from is None else set()
    materialize(model, drawn, config.seed, device, keep)
    stand_in(model, {name: empty(name) for name in meta - drawn})
    if plan.tensor is not None:
        views = install(model, plan.tensor, axis, already_cut=meta).views
        views.planned = frozenset(parameters[name] for name in plan.tensor.partial)
    place_rest(model, plan.precision, device, parameters.keys() - rows.keys(), places)
    make_absent(model, rows.keys(), device)
    for flat in buckets:
        fill(flat, placed=meta)
    return buckets


def _rounding(plan: Plan, tp: int) -> RoundedUpdates:
    rows = {row.name: row for row in plan.table}
    whole = Whole({name: number for number, name in enumerate(rows)}, rows, tp)
    return RoundedUpdates(plan.config.seed, whole, plan.precision.widths("bfloat16").moments)


def _reducer(model: nn.Module, plan: Plan, comm: Comm, buckets: Sequence[FlatBucket]) -> Reducer:
    config, wire, sums = plan.config, plan.precision.wire, PartialSums(plan.table, comm)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if reduces_each_microbatch(config):
        return MicrobatchReducer(buckets, trained, comm, wire, config.accumulation, sums)
    return GradientReducer(buckets, trained, comm, wire, config.zero_optimization.stage > 0, sums)


def _gather(
    model: nn.Module, plan: Plan, comm: Comm, buckets: Sequence[FlatBucket]
) -> tuple[Gathering | None, list[Callable[[], None]]]:
    """What makes sharded parameters whole, and what takes its hands off the modules."""
    gathers = plan.gathers(comm.grid.coord())
    if gathers is None or plan.gather_groups is None:
        return None, []
    gathering = Gathering(buckets, gathers.order, gathers.pinned, comm)
    modules = GatheredModules(model, plan.gather_groups, gathers.order, gathering)
    return gathering, [modules.remove, gathering.retire]


def _refuse_unbuilt(config: Config) -> None:
    """Refuse what the configuration can say and this version cannot do."""
    if (device := config.zero_optimization.offload_optimizer.device) != "none":
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device {device!r}: this version keeps optimizer state on the device; "
            "leave it out."
        )


def _check_example(example: Batch) -> None:
    if example is not None and not any(tensor.ndim for _, tensor in named_tensors(example)):
        raise PlanError(
            f"example_batch is a {type(example).__name__} without tensors; give one microbatch (of tensors, or of meta "
            "tensors that have its shapes), or leave it out."
        )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Two parameters over one memory would be taken apart by the flat buckets without a word."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        other = owners.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise PlanError(
                f"parameters {other!r} and {name!r} are two objects over the same memory; tie them by assigning one "
                "nn.Parameter to both modules."
            )


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


def _switch_cache_off(model: nn.Module) -> None:
    """Hugging Face models build a key-value cache in every forward unless each config says no."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
