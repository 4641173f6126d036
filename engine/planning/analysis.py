"""What an example batch shows of a run: the timeline, where it is cut, what tensor ranks hold and send.

A model is looked at as it will run, on shapes: first whole, to find how the tensor axis cuts it, then as a tensor rank
has it, for its values and its traffic.

Cut and schedule of a pipeline from what its calls cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from engine.config import Config
from engine.errors import PlanError, first_line
from engine.parallel.activation_checkpointing.blocks import recomputed_blocks
from engine.parallel.comm.traffic import Tally
from engine.parallel.kernel_injection.inject import Replacement
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.pipeline.partition.auto_schedule import (
    PLAIN_FIRST,
    Machine,
    MicrobatchCost,
    ScheduleDecision,
    choose,
)
from engine.parallel.pipeline.partition.cost_model import stage_costs
from engine.parallel.pipeline.partition.partition import Partition, make_cut
from engine.parallel.pipeline.schedule.validate import check
from engine.parallel.tensor.layers.planned_traffic import (
    LogitUse,
    TrafficRecorder,
    find_logit_use,
    loss_traffic,
    traffic_by_call,
)
from engine.parallel.tensor.plan.resolve import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.trace.model_trace import ModelTrace, OnZeros
from engine.planning.budgets import shards_parameters
from engine.planning.example_trace import trace_example
from engine.planning.profile_calls import Costs, flop_costs_only, needs_profiling
from engine.planning.tensor_plan_proof import check_plan
from engine.planning.tensor_plan_search import find_plan
from engine.program.batch import Batch
from engine.program.program import Program


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made for, beside model and configuration."""

    program: Program
    example: Batch = None
    own_optimizer: bool = False
    """The user brings the optimizer, and its state is not known."""
    costs: Costs | None = None
    """What the calls cost; None: it is counted in FLOPs."""
    replacements: tuple[Replacement, ...] = ()
    """Modules whose forwards go through operators of ours."""


def needs_example(config: Config) -> bool:
    """Whether planning needs to see a microbatch: everything but data parallelism does."""
    return config.tp > 1 or config.pp > 1


@dataclass(frozen=True, slots=True)
class Analysis:
    """What the example showed."""

    timeline: ModelTrace | None = None
    cut: Partition | None = None
    traffic: Mapping[int, Tally] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    decision: ScheduleDecision | None = None
    tensor: TensorPlan | None = None
    """Which layers the tensor axis cuts."""


def analyze(config: Config, wish: PlanRequest, stages: int) -> Analysis:
    """Look at the example, if this run needs to.

    Raises:
        PlanError: the model cannot be followed, or not be cut as it is asked.
    """
    if not needs_example(config):
        return _order_of_calls(config, wish)
    tensor = _tensor_plan(config, wish)
    if tensor is not None:
        _check_hooks(wish.program.model, tensor)
    watch = _watch(config, wish, tensor) if tensor else None
    try:
        timeline = _look(config, wish, stages, tensor, watch)
        if tensor and watch and watch.used_both_ways:
            tensor = replace(tensor, equal=watch.used_both_ways)
            watch = _watch(config, wish, tensor)
            timeline = trace_example(wish.program, wish.example, stages, watch)
    except PlanError as problem:
        if config.pp > 1 or (tensor is not None and tensor.follows_activations):
            raise
        _check_reads(watch)
        unknown = f"bytes over tp are not known before they are sent: {problem}"
        return Analysis(notes=(unknown, *_not_followed(config, tensor)), tensor=tensor)
    _check_reads(watch)
    notes = _ran_on_zeros(timeline)
    if tensor is not None and watch is not None:
        notes = (*notes, *tensor.notes, *_prove(config, wish, tensor))
        _check_partial(wish.program.model, tensor, timeline, watch)
    cut, decision, costs = _cut(config, timeline, wish.costs, stages)
    notes = (*notes, *costs)
    if tensor is None or watch is None:
        return Analysis(timeline, cut, notes=notes, decision=decision)
    tensor = replace(tensor, partial=tensor.partial | watch.partial, beside=watch.used_one_way)
    use = find_logit_use(tensor, timeline, config.tp)
    notes = (*notes, *_notes_on_logits(use))
    tallies = traffic_by_call(watch.sent, timeline, config.tp), loss_traffic(use, config.tp)
    return Analysis(timeline, cut, _by_stage(timeline, cut, *tallies), notes, decision, tensor)


def _look(
    config: Config, wish: PlanRequest, stages: int, tensor: TensorPlan | None, watch: TrafficRecorder | None
) -> ModelTrace:
    try:
        return trace_example(wish.program, wish.example, stages, watch)
    except PlanError:
        raise
    except Exception:
        if tensor is not None:  # code that cannot run on its part; the proof names the block
            _prove(config, wish, tensor)
        raise


def _prove(config: Config, wish: PlanRequest, tensor: TensorPlan) -> tuple[str, ...]:
    """Prove a written plan (a plan that was found has been proven); returns notes on what is not proven."""
    if config.parallel.tensor_plan == "auto":
        return ()
    if not config.parallel.verify_plan:
        return ("parallel.tensor_plan is not proven, because parallel.verify_plan is false",)
    return check_plan(wish.program, wish.example, tensor, config.tp)


def _not_followed(config: Config, tensor: TensorPlan | None) -> tuple[str, ...]:
    """Notes on the proof of a tensor plan, for a model that cannot be followed."""
    if tensor is None or config.parallel.tensor_plan == "auto":
        return tensor.notes if tensor is not None else ()
    return ("parallel.tensor_plan is not proven, because the model cannot be followed",)


def _ran_on_zeros(timeline: ModelTrace) -> tuple[str, ...]:
    """A note if zeros have decided on a shape or a branch in the trace."""
    if not timeline.on_zeros:
        return ()
    first: dict[str, OnZeros] = {}
    for entry in timeline.on_zeros:
        first.setdefault(entry.operation, entry)
    shown = [f"{entry.operation} {entry.where} ({entry.why})" for entry in first.values()][:2]
    more = f" and {len(timeline.on_zeros) - len(shown)} more" if len(timeline.on_zeros) > len(shown) else ""
    return (
        "shapes and branches that depend on content are planned as they are for zeros, because the trace could not run "
        f"without content: {', '.join(shown)}{more}",
    )


def _notes_on_logits(use: LogitUse) -> tuple[str, ...]:
    gathers = (f"{where} needs all logits: they are gathered over tp" for where in use.gathers)
    unknown = (f"bytes that are sent over tp after {where} are not planned" for where in use.unknown)
    return (*gathers, *unknown)


def _watch(config: Config, wish: PlanRequest, tensor: TensorPlan) -> TrafficRecorder:
    model = wish.program.model
    return TrafficRecorder(model, tensor, recomputed_blocks(model, config.activation_checkpointing), config.tp)


def _by_stage(timeline: ModelTrace, cut: Partition | None, calls: Mapping[int, Tally], loss: Tally) -> dict[int, Tally]:
    """By stage: what a tensor rank sends over tp for one microbatch."""
    stage_of_call = cut.stage_of_call if cut else (0,) * len(timeline.calls)
    traffic = {stage: Tally() for stage in range(max(stage_of_call, default=0) + 1)}
    for call, tally in calls.items():
        traffic[stage_of_call[call]] = Tally((*traffic[stage_of_call[call]].rows(), *tally.rows()))
    last = max(traffic)
    traffic[last] = Tally((*traffic[last].rows(), *loss.rows()))
    return traffic


def _cut(
    config: Config, timeline: ModelTrace, costs: Costs | None, stages: int
) -> tuple[Partition | None, ScheduleDecision | None, tuple[str, ...]]:
    """Where stages begin, with "auto" in which schedule, and what is to be said of the costs behind that."""
    if config.pp == 1:
        return None, None, ()
    known = costs or flop_costs_only(timeline)
    notes = known.notes if needs_profiling(config) else ()
    if config.parallel.schedule != "auto":
        return cut_by(config, timeline, known, stages), None, notes
    choice = choose_schedule(config, timeline, known)
    check(choice.decision.schedule)
    return choice.cut, choice.decision, notes


def _order_of_calls(config: Config, wish: PlanRequest) -> Analysis:
    """With an example, in which order modules run, and who reads parameters outside them."""
    if not shards_parameters(config) or wish.example is None:
        return Analysis()
    try:
        timeline = trace_example(wish.program, wish.example, 1)
    except Exception as error:  # only the order of gathers depends on it; a real error comes again in the first step
        if is_own_mistake(error):
            raise
        note = "parameters are gathered in the order of their registration, because the trace of the example has failed"
        return Analysis(notes=(f"{note}: {first_line(error)}",))
    return Analysis(timeline, notes=_ran_on_zeros(timeline))


def _check_reads(watch: TrafficRecorder | None) -> None:
    """A parameter that code outside its module reads is whole there, or the result is wrong."""
    for name in watch.read_outside if watch else ():
        raise PlanError(
            f"parameter {name!r} is cut over the tensor ranks, but code outside its module reads it too; give "
            f'its module the style "replicate" in parallel.tensor_plan.'
        )


def _check_hooks(model: nn.Module, tensor: TensorPlan) -> None:
    """A hook on a gradient would be given this rank's part of it."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks and (name in tensor.parameters or name in tensor.partial):
            raise PlanError(
                f"parameter {name!r} has a gradient hook (register_hook), but is cut over the tensor ranks, each of "
                'which has a part of its gradient; remove the hook, or give its module the style "replicate" in '
                "parallel.tensor_plan."
            )


def _check_partial(model: nn.Module, tensor: TensorPlan, timeline: ModelTrace, watch: TrafficRecorder) -> None:
    """What no block holds meets cut activations as views only: plain ones are whole, and so are their gradients."""
    blocks = {call.unit for call in timeline.calls if any(True for _ in model.get_submodule(call.unit).children())}
    for name in sorted(tensor.partial - watch.used_one_way):
        owner = name.rpartition(".")[0]
        if not any(is_inside(owner, block) for block in blocks):
            raise PlanError(
                f"parameter {name!r} has the style 'partial' in parallel.tensor_plan, but the model uses it on whole "
                "activations, where its gradient is whole on every rank; leave that style out."
            )


def _tensor_plan(config: Config, wish: PlanRequest) -> TensorPlan | None:
    """Found, or read from the user's styles."""
    if config.tp == 1:
        return None
    parallel = config.parallel
    if parallel.tensor_plan == "auto":
        plan = find_plan(wish.program, wish.example, config.tp, parallel.sequence_parallel)
    else:
        plan = find_tensor_plan(wish.program.model, parallel.tensor_plan, config.tp, parallel.sequence_parallel)
    return replace(plan, regather=parallel.sequence_parallel_regather)


VIRTUAL_STAGES = (1, 2, 4)
"""Stages a rank that are tried where the configuration does not say."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """What ``parallel.schedule: "auto"`` came to."""

    decision: ScheduleDecision
    cut: Partition
    """Into the stages of the chosen schedule."""


def cut_by(config: Config, timeline: ModelTrace, costs: Costs, stages: int) -> Partition:
    """The timeline in ``stages``, even in what ``parallel.balance`` says, or where ``parallel.split`` says.

    Raises:
        PlanError: it cannot be cut so, or the costs are of another model.
    """
    costs.check(timeline)
    split = None if config.parallel.split == "auto" else config.parallel.split
    seconds = [cost.seconds for cost in costs.calls] if config.parallel.balance == "time" else None
    return make_cut(timeline, stages, split, seconds)


def choose_schedule(
    config: Config, timeline: ModelTrace, costs: Costs, kinds: Sequence[str] = PLAIN_FIRST
) -> ScheduleChoice:
    """Cut for each number of stages a rank, lay out each kind, take the best; alike on every rank.

    Raises:
        PlanError: the model cannot be cut for any of them; says why for the fewest stages.
        ScheduleError: no kind stays within ``parallel.activation_limit_bytes``.
    """
    cuts: dict[int, Partition] = {}
    problems: dict[int, PlanError] = {}
    for virtual in _virtual_stages(config):
        try:
            cuts[virtual] = cut_by(config, timeline, costs, config.pp * virtual)
        except PlanError as problem:
            problems[virtual] = problem
    if not cuts:
        raise next(iter(problems.values()))
    tried: dict[int, Sequence[MicrobatchCost] | str] = {
        virtual: stage_costs(cut.stage_of_call, costs.calls) for virtual, cut in cuts.items()
    }
    tried |= {virtual: f"the model does not cut into {config.pp * virtual} stages" for virtual in problems}
    fewest = next(iter(cuts.values()))
    crossing = fewest.crossing_bytes / max(len(fewest.stages) - 1, 1)
    limit = config.parallel.activation_limit_bytes
    machine = Machine(config.pp, config.accumulation, costs.transfer_seconds(crossing), limit)
    decision = choose(tried, machine, kinds)
    return ScheduleChoice(decision, cuts[decision.virtual_stages])


def _virtual_stages(config: Config) -> tuple[int, ...]:
    """Stages a rank that are tried, ascending."""
    given = config.parallel.virtual_stages
    if config.pp == 1:
        return (1,)
    return (1, given) if given > 1 else VIRTUAL_STAGES
