"""Analysis of an example batch: tensor plan, trace, partition, schedule, and tensor-parallel traffic.

The model is traced on shapes, in the dtypes of the run: first with full layers, to find the tensor plan, then with the
layers of one tensor rank. The costs of the traced calls then determine the pipeline stages and, with
``parallel.schedule: "auto"``, the schedule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from engine.config import Config
from engine.errors import PlanError, first_line
from engine.kernels.optim.matrix_rule import MatrixRule
from engine.optim.param_groups import GivenOptimizer
from engine.parallel.activation_checkpointing.blocks import recomputed_blocks, selective_blocks
from engine.parallel.activation_checkpointing.tiles import TilePlan, plan_tiles
from engine.parallel.comm.traffic import Tally
from engine.parallel.context.recurrence.followed import ContextPlan
from engine.parallel.context.rows.rowwise import RowwiseModule
from engine.parallel.kernel_injection.inject import Replacement
from engine.parallel.model.blocks import compiled_around
from engine.parallel.model.name_patterns import is_inside, name_runs
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.pipeline.partition.auto_schedule import (
    PLAIN_FIRST,
    Machine,
    MicrobatchCost,
    ScheduleDecision,
    choose,
    cost_of_stages,
)
from engine.parallel.pipeline.partition.cost_model import stage_costs
from engine.parallel.pipeline.partition.partition import Partition, make_cut
from engine.parallel.pipeline.schedule.simulate import Cost
from engine.parallel.pipeline.schedule.validate import check
from engine.parallel.tensor.layers.planned_traffic import (
    CollectiveRecorder,
    LogitUse,
    TrafficRecorder,
    find_logit_use,
    loss_traffic,
    traffic_by_call,
)
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.tensor.tp_axis import DryAxis
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.provenance import UncutPathError
from engine.planning.budgets import shards_parameters, tensor_format
from engine.planning.example_trace import SharedSequences, trace_example, trace_rowwise
from engine.planning.expert_plan import ExpertPlan, around_experts, form_on_tensor_ranks
from engine.planning.found_styles import FoundStyles, kept_or_found
from engine.planning.profile_calls import Costs, flop_costs_only, needs_profiling
from engine.planning.tensor_plan_proof import check_plan, wrong_outside_blocks
from engine.planning.tensor_plan_search import SearchedProgram
from engine.program.batch import Batch
from engine.program.program import Program


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Inputs of a plan other than the configuration, such as program, example batch, optimizer and measured costs."""

    program: Program
    example: Batch = None
    own_optimizer: bool = False
    """True if the script passes an optimizer, so that the size of its state is unknown."""
    own_rule: MatrixRule | None = None
    """Rule of the script's optimizer, if it updates whole matrices."""
    own_schedule: str | None = None
    """Words for the learning-rate schedule that the script passes, "" without one; None: unknown."""
    costs: Costs | None = None
    """Measured seconds of the model's module calls; None: FLOPs are counted instead."""
    replacements: tuple[Replacement, ...] = ()
    """Modules whose forward is replaced by an engine operator."""
    given: GivenOptimizer | None = None
    """Script's optimizer, with parameter groups that replace the configured ones."""
    found: FoundStyles | None = None
    """Found tensor-parallel styles; None: the plan searches them."""
    shared_experts: ExpertPlan | None = None
    """Experts that are divided among data ranks, and not sharded over tensor ranks."""
    card: str = ""
    """Name of the GPU, by which attention chooses its method; empty: unknown."""
    searched: SearchedProgram | None = None
    """Traces and digest that several searches share; None: a search makes its own."""


def needs_example(config: Config) -> bool:
    """Returns True if planning needs an example microbatch: for tensor, pipeline or context parallelism, or
    ``tile_tokens``.
    """
    tiled = config.activation_checkpointing.tile_tokens is not None
    return tiled or config.tp > 1 or config.pp > 1 or config.cp > 1


def needs_search(config: Config) -> bool:
    """Returns True if rank 0 has to search for a tensor plan (``tensor_plan: "auto"``)."""
    return config.tp > 1 and config.parallel.tensor_plan == "auto"


def search_styles(config: Config, request: PlanRequest) -> FoundStyles:
    """Returns tensor-parallel styles (column, row etc.) for the model's layers, from the cache on disk or a search.

    Raises:
        PlanError: the model cannot be traced, or its widths are not divisible by the number of tensor ranks.
    """
    parallel = config.parallel
    searched = request.searched or SearchedProgram(request.program, request.example)
    low_rank = parallel.tensor_proof == "auto"
    whole = request.shared_experts.uncut if request.shared_experts is not None else ()
    settings = {"tensor": config.tp, "sequence": parallel.sequence_parallel, "low rank": low_rank, "whole": whole}
    return kept_or_found(
        lambda: searched.digest.of(settings),
        lambda: searched.find_styles(config.tp, parallel.sequence_parallel, low_rank, whole),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Results of :func:`analyze`, such as trace, tensor plan and partition. A result that the configuration does not
    need is None or empty.
    """

    trace: ModelTrace | None = None
    partition: Partition | None = None
    traffic: tuple[Mapping[int, Tally], ...] = ()
    context: ContextPlan = field(default_factory=ContextPlan)
    notes: tuple[str, ...] = ()
    decision: ScheduleDecision | None = None
    tensor: TensorPlan | None = None
    """Tensor-parallel plan of layers; None for one tensor rank."""
    shared_experts: ExpertPlan | None = None
    """Experts that data ranks share, in their form on tensor ranks; None without such experts."""
    measured: Cost | None = None
    """Measured costs of the stages for a schedule named in the configuration; None if none were measured."""
    rowwise: tuple[RowwiseModule, ...] = ()
    """Modules that are proven to treat positions one by one, with context ranks."""
    tiles: TilePlan | None = None
    """Modules that run in tiles of tokens; None: not configured."""


def analyze(config: Config, request: PlanRequest, stages: int) -> Analysis:
    """Traces the example batch if necessary, and plans tensor parallelism, ``stages`` pipeline stages and the schedule.

    Raises:
        PlanError: the model cannot be traced, or cannot be sharded or partitioned as configured.
    """
    tokens, on_ranks = config.activation_checkpointing.tile_tokens, config.cp > 1
    found = _rowwise(config, request) if on_ranks or tokens else ()
    local = found if on_ranks else ()
    analysis = _analysis(config, request, stages, local)
    units = analysis.trace.units if analysis.trace is not None and config.pp > 1 else ()
    if tokens and any(each.contains(units) for each in found):  # each tile would call units of other stages
        found = _rowwise(config, request, units)
    tiles = plan_tiles(found, tokens, config.cp)
    return replace(analysis, rowwise=local, tiles=tiles, notes=(*analysis.notes, *(tiles.notes if tiles else ())))


def _analysis(config: Config, request: PlanRequest, stages: int, local: Sequence[RowwiseModule]) -> Analysis:
    if config.tp == config.pp == config.cp == 1:
        return _order_of_calls(config, request)
    # The tensor plan comes first, because the trace below runs with sharded layers, whose values a tensor rank sends.
    tensor, experts = _tensor_plan(config, request), request.shared_experts
    if tensor is not None and experts is not None:
        tensor, experts = form_on_tensor_ranks(config, request.program.model, request.example, tensor, experts)
    sequences = SharedSequences(config, request.program, request.example, request.card, local)
    found = _analyze(config, request, stages, tensor, sequences)
    return replace(found, shared_experts=experts, context=sequences.plan)


def _analyze(
    config: Config, request: PlanRequest, stages: int, tensor: TensorPlan | None, sequences: SharedSequences
) -> Analysis:
    if tensor is not None:
        _check_hooks(request.program.model, tensor)
    watch = _watch(config, request, tensor, sequences.axes) if tensor or sequences.axes else None
    try:
        trace = _trace(config, request, sequences, stages, tensor, watch)
        # Only a trace shows which replicated parameters meet sharded and full activations. Their gradient is summed at
        # each sharded use, which changes the traffic over tp, so the model is traced again with them in the plan.
        if tensor and isinstance(watch, TrafficRecorder) and watch.used_both_ways:
            tensor = replace(tensor, equal=watch.used_both_ways)
            watch = _watch(config, request, tensor, sequences.axes)
            trace = sequences.trace(stages, watch)
    except _WrongPlanError:
        raise
    except PlanError as problem:
        _refuse_unfollowed(config, tensor, problem)
        _check_reads(watch)
        names = " and ".join(axis for axis, ranks in (("tp", config.tp), ("cp", config.cp)) if ranks > 1)
        chunks = ", and packed documents keep two chunks a rank" * (config.cp > 1)
        unknown = f"bytes over {names} are not known before they are sent{chunks}: {_on_one_stage(problem)}"
        return Analysis(notes=(unknown, *_not_followed(config, tensor)), tensor=tensor)
    _check_reads(watch)
    notes = (*sequences.notes, *trace.notes)
    if tensor is not None and isinstance(watch, TrafficRecorder):
        notes = (*notes, *tensor.notes, *_prove(config, request, tensor))
        _check_partial(request.program.model, tensor, trace, watch)
    partition, decision, costs = _cut(config, trace, request.costs, stages)
    notes = (*notes, *costs, *_left_uncompiled(request.program.model, trace, stages))
    measured = _measured(partition, request.costs) if decision is None else None
    found = Analysis(trace=trace, partition=partition, notes=notes, decision=decision, measured=measured)
    if watch is None:
        return found
    loss = None
    if tensor is not None and isinstance(watch, TrafficRecorder):
        tensor = replace(tensor, partial=tensor.partial | watch.partial, beside=watch.used_one_way)
        use = find_logit_use(tensor, trace, config.tp)
        loss, notes = loss_traffic(use, config.tp), (*notes, *_notes_on_logits(use))
    calls = (traffic_by_call(watch.sent, trace, rank) for rank in range(config.cp))
    traffic = tuple(_by_stage(trace, partition, each, loss) for each in calls)
    return replace(found, traffic=traffic, notes=notes, tensor=tensor)


def _rowwise(config: Config, request: PlanRequest, units: Sequence[str] = ()) -> tuple[RowwiseModule, ...]:
    """Finds modules that treat positions one by one; none around ``units``, or experts that read rows of all ranks."""
    names = around_experts(config, request.program.model, request.shared_experts)
    rows = trace_rowwise(request.program, request.example, units)
    return tuple(each for each in rows if not any(is_inside(name, each.name) for name in names))


def _on_one_stage(error: Exception) -> str:
    """Returns the reason why a forward cannot be traced in a run without stages."""
    return error.what if isinstance(error, UncutPathError) else first_line(error)


def _refuse_unfollowed(config: Config, tensor: TensorPlan | None, problem: PlanError) -> None:
    """Raises a problem of the trace if the run needs the trace; tensor ranks with plain tensors do not."""
    if config.pp == 1 and (tensor is None or not tensor.follows_activations):
        return
    if config.pp == 1 and isinstance(problem, UncutPathError):
        raise PlanError(
            f"{problem.what}, so the engine cannot trace this forward, as parallel.sequence_parallel and styles with "
            '"view" require; move this code into a block of the model, leave sequence_parallel out, or write a '
            'parallel.tensor_plan without "view".'
        ) from problem
    raise problem


def _trace(
    config: Config,
    request: PlanRequest,
    sequences: SharedSequences,
    stages: int,
    tensor: TensorPlan | None,
    watch: CollectiveRecorder | None,
) -> ModelTrace:
    try:
        return sequences.trace(stages, watch)
    except PlanError:
        raise
    except Exception as error:
        if tensor is None or is_own_mistake(error):
            raise
        raise _find_wrong_part(config, request, tensor, error) from error


class _WrongPlanError(PlanError):
    """Sharded forward raises, and the unsharded one does not."""


def _find_wrong_part(config: Config, request: PlanRequest, tensor: TensorPlan, error: Exception) -> _WrongPlanError:
    try:
        _prove(config, request, tensor)  # code that cannot run on its shard; the proof names the block
    except PlanError as wrong:
        return _WrongPlanError(str(wrong))
    trace_example(request.program, request.example, 1)  # raises what the model raises without the plan
    names = wrong_outside_blocks(tensor, request.program.model, partial(_failure, config, request), config.tp)
    return _WrongPlanError(
        f"with the layers of parallel.tensor_plan on {config.tp} tensor ranks the forward raises: "
        f"{first_line(error)}; no block is wrong by itself, so correct the styles outside blocks, here of "
        f'{", ".join(names)}, or set parallel.tensor_plan to "auto".'
    )


def _failure(config: Config, request: PlanRequest, tensor: TensorPlan) -> Exception | None:
    """Returns the error of the forward with this plan, on shapes; None if tracing refuses the forward."""
    failure = None
    try:
        trace_example(request.program, request.example, 1, _watch(config, request, tensor, ()))
    except PlanError:
        pass
    except Exception as error:
        if is_own_mistake(error):
            raise
        failure = error
    return failure


def _prove(config: Config, request: PlanRequest, tensor: TensorPlan) -> tuple[str, ...]:
    """Proves a written plan (a search has proven its own); returns notes on unproven parts."""
    if config.parallel.tensor_plan == "auto":
        return ()
    if not config.parallel.prove_plan:
        return ("parallel.tensor_plan is not proven, because parallel.prove_plan is false",)
    return check_plan(request.program, request.example, tensor, config.tp, config.parallel.tensor_proof == "auto")


def _not_followed(config: Config, tensor: TensorPlan | None) -> tuple[str, ...]:
    """Notes on the proof of a tensor plan, for a model that cannot be followed."""
    notes = tensor.notes if tensor is not None else ()
    if tensor is None or config.parallel.tensor_plan == "auto":
        return notes
    return (*notes, "parallel.tensor_plan is not proven, because the model cannot be followed")


def _left_uncompiled(model: nn.Module, trace: ModelTrace, stages: int) -> tuple[str, ...]:
    """Returns a note if pipeline stages run compiled modules eagerly."""
    names = name_runs(compiled_around(model, trace.unit_names)) if stages > 1 else ""
    return (f"{names}: compiled as a whole, runs uncompiled, because stages are cut inside it",) if names else ()


def _notes_on_logits(use: LogitUse) -> tuple[str, ...]:
    gathers = (f"{where} needs all logits: they are gathered over tp" for where in use.gathers)
    unknown = (f"bytes that are sent over tp after {where} are not planned" for where in use.unknown)
    return (*gathers, *unknown)


def _watch(
    config: Config, request: PlanRequest, tensor: TensorPlan | None, axes: tuple[DryAxis, ...]
) -> CollectiveRecorder:
    model = request.program.model
    recomputed = recomputed_blocks(model, config.activation_checkpointing)
    partly = selective_blocks(model, config.activation_checkpointing)
    if tensor is None:
        return CollectiveRecorder(model, recomputed, *axes, partly=partly)
    return TrafficRecorder(model, tensor, recomputed, config.tp, tensor_format(config), *axes, partly=partly)


def _by_stage(
    trace: ModelTrace, cut: Partition | None, calls: Mapping[int, Tally], loss: Tally | None = None
) -> dict[int, Tally]:
    """Returns the traffic of a rank over tp and cp for one microbatch, by stage; the last stage adds the loss."""
    stage_of_call = cut.stage_of_call if cut else (0,) * len(trace.calls)
    traffic = {stage: Tally() for stage in range(max(stage_of_call, default=0) + 1)}
    for call, tally in calls.items():
        traffic[stage_of_call[call]] = Tally((*traffic[stage_of_call[call]].rows(), *tally.rows()))
    last = max(traffic)
    traffic[last] = Tally((*traffic[last].rows(), *(loss.rows() if loss is not None else ())))
    return traffic


def _cut(
    config: Config, trace: ModelTrace, costs: Costs | None, stages: int
) -> tuple[Partition | None, ScheduleDecision | None, tuple[str, ...]]:
    """Returns the partition into stages, with "auto" the chosen schedule, and notes on the costs of the choice."""
    if config.pp == 1:
        return None, None, ()
    known = costs or flop_costs_only(trace)
    notes = known.notes if needs_profiling(config) else ()
    if config.parallel.schedule != "auto":
        return cut_by(config, trace, known, stages), None, notes
    choice = choose_schedule(config, trace, known)
    check(choice.decision.schedule)
    return choice.partition, choice.decision, notes


def _measured(cut: Partition | None, costs: Costs | None) -> Cost | None:
    """Returns the measured costs of the stages of a partition."""
    if cut is None or costs is None or not costs.measured:
        return None
    return cost_of_stages(stage_costs(cut.stage_of_call, costs.calls), costs.transfer_seconds(_mean_crossing(cut)))


def _mean_crossing(cut: Partition) -> float:
    """Returns bytes that cross a boundary between stages, on average."""
    return cut.crossing_bytes / max(len(cut.stages) - 1, 1)


def _order_of_calls(config: Config, request: PlanRequest) -> Analysis:
    """Traces an example, if there is one, for the order of ZeRO 3 gathers and the parameters that glue code reads."""
    if not shards_parameters(config) or request.example is None:
        return Analysis()
    try:
        trace = trace_example(request.program, request.example, 1)
    except Exception as error:  # only the order of gathers depends on it; a real error comes again in the first step
        if is_own_mistake(error):
            raise
        note = "parameters are gathered in the order of their registration, because the trace of the example has failed"
        return Analysis(notes=(f"{note}: {_on_one_stage(error)}",))
    return Analysis(trace=trace, notes=trace.notes)


def _check_reads(watch: CollectiveRecorder | None) -> None:
    """Refuses sharded parameters that code outside their module reads, because that code needs the full parameter."""
    for name in watch.read_outside if isinstance(watch, TrafficRecorder) else ():
        raise PlanError(
            f"parameter {name!r} is sharded over the tensor ranks, but code outside its module reads it too; give "
            f'its module the style "replicate" in parallel.tensor_plan.'
        )


def _check_hooks(model: nn.Module, tensor: TensorPlan) -> None:
    """Refuses gradient hooks on sharded parameters, because a hook would receive a shard of the gradient."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks and (name in tensor.parameters or name in tensor.partial):
            raise PlanError(
                f"parameter {name!r} has a gradient hook (register_hook), but is sharded over the tensor ranks, "
                "each of which has a shard of its gradient; remove the hook, or give its module the style "
                '"replicate" in parallel.tensor_plan.'
            )


def _check_partial(model: nn.Module, tensor: TensorPlan, trace: ModelTrace, watch: TrafficRecorder) -> None:
    """Refuses "partial" for parameters outside of blocks with full activations, because their gradient is full."""
    blocks = {call.unit for call in trace.calls if any(True for _ in model.get_submodule(call.unit).children())}
    for name in sorted(tensor.partial - watch.used_one_way):
        owner = name.rpartition(".")[0]
        if not any(is_inside(owner, block) for block in blocks):
            raise PlanError(
                f"parameter {name!r} has the style 'partial' in parallel.tensor_plan, but the model uses it on full "
                "activations, where its gradient is full on every rank; leave that style out."
            )


def _tensor_plan(config: Config, request: PlanRequest) -> TensorPlan | None:
    """Returns the tensor plan from the search or from the user's styles; None without tensor parallelism."""
    if config.tp == 1:
        return None
    model, parallel = request.program.model, config.parallel
    if needs_search(config):
        found = request.found or search_styles(config, request)
        plan = found.plan(model, config.tp, parallel.sequence_parallel)
    else:
        plan = find_tensor_plan(model, parallel.tensor_plan, config.tp, parallel.sequence_parallel)
    nothing = (
        f"parallel.tensor {config.tp} shards nothing of this model: every tensor rank stores and computes all of it, "
        "so give these ranks to parallel.data, or name layers in parallel.tensor_plan",
    )
    notes = plan.notes if plan.parameters else (*plan.notes, *nothing)
    return replace(plan, regather=parallel.sequence_parallel_regather, notes=notes)


VIRTUAL_STAGES = (1, 2, 4)
"""Stages per rank that schedule "auto" tries if the configuration sets none."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """Pipeline schedule chosen for ``parallel.schedule: "auto"``, and the partition of the model into the stages of
    this schedule.
    """

    decision: ScheduleDecision
    partition: Partition
    """Partition into the stages of that schedule."""


def cut_by(config: Config, trace: ModelTrace, costs: Costs, stages: int) -> Partition:
    """Returns the partition of ``trace`` into ``stages`` pipeline stages, as ``parallel.balance`` or ``parallel.split``
    requires.

    Raises:
        PlanError: there is no such partition, or ``costs`` do not belong to the module calls of ``trace``.
    """
    costs.check(trace)
    split = None if config.parallel.split == "auto" else config.parallel.split
    seconds = [cost.seconds for cost in costs.calls] if config.parallel.balance == "time" else None
    return make_cut(trace, stages, split, seconds)


def choose_schedule(
    config: Config, trace: ModelTrace, costs: Costs, kinds: Sequence[str] = PLAIN_FIRST
) -> ScheduleChoice:
    """Simulates the schedules ``kinds`` for each number of stages per rank, and returns the fastest.

    Raises:
        PlanError: the model cannot be partitioned for any number of stages.
        ScheduleError: no schedule is within ``parallel.activation_limit_bytes``.
    """
    cuts: dict[int, Partition] = {}
    problems: dict[int, PlanError] = {}
    for virtual in _virtual_stages(config):
        try:
            cuts[virtual] = cut_by(config, trace, costs, config.pp * virtual)
        except PlanError as problem:
            problems[virtual] = problem
    if not cuts:
        raise next(iter(problems.values()))
    tried: dict[int, Sequence[MicrobatchCost] | str] = {
        virtual: stage_costs(cut.stage_of_call, costs.calls) for virtual, cut in cuts.items()
    }
    tried |= {virtual: f"the model does not cut into {config.pp * virtual} stages" for virtual in problems}
    fewest = next(iter(cuts.values()))
    crossing = _mean_crossing(fewest)
    limit = config.parallel.activation_limit_bytes
    machine = Machine(config.pp, config.accumulation, costs.transfer_seconds(crossing), limit)
    decision = choose(tried, machine, kinds)
    return ScheduleChoice(decision, cuts[decision.virtual_stages])


def _virtual_stages(config: Config) -> tuple[int, ...]:
    """Returns numbers of stages per rank to try, ascending."""
    given = config.parallel.virtual_stages
    if config.pp == 1:
        return (1,)
    return (1, given) if given > 1 else VIRTUAL_STAGES
