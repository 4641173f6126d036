"""Automatic choice of a schedule: each kind is simulated with the costs of its stages, in time and memory.

    cut into p x v stages --> cost of each stage --> simulate each kind --> seconds of a step
                                                 --> activations held   --> more than the limit: refused

The fastest kind that fits is chosen, but a gain of at most 1 % does not justify more stages or a less simple kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule, why_unfit
from engine.parallel.pipeline.schedule.simulate import Cost, StageTimes, simulate

PLAIN_FIRST = ("1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")
"""Kinds of schedule that the search simulates, the simplest first."""
_NEAR = 1.01
"""Steps slower than the fastest by at most this factor count as equally fast."""
_ROOM = 1.1
"""Default limit relative to 1f1b: stages of a kind with as many live microbatches may be larger."""
_LINES = 6
"""Most lines of the list of kinds that fit."""


@dataclass(frozen=True, slots=True)
class MicrobatchCost:
    """Time and memory of one module call, or of all calls of a pipeline stage, for one microbatch.

    Without a measurement, the times are FLOPs instead of seconds.
    """

    forward_seconds: float
    input_seconds: float
    """Seconds of the backward without deferred weight gradients; includes recomputation."""
    weight_seconds: float
    """Seconds of the weight gradients of linear layers, which can be deferred."""
    kept_bytes: int
    """Bytes of activations saved from forward to backward, without parameters and tensors that depend only on the
    batch.
    """
    left_bytes: int
    """Bytes of activations saved from backward until the deferred weight gradients are computed."""

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward, with weight gradients."""
        return self.forward_seconds + self.input_seconds + self.weight_seconds

    @classmethod
    def total(cls, costs: Sequence["MicrobatchCost"]) -> "MicrobatchCost":
        """Returns the cost of several calls: the sum of each field over ``costs``."""
        return cls(
            forward_seconds=sum(cost.forward_seconds for cost in costs),
            input_seconds=sum(cost.input_seconds for cost in costs),
            weight_seconds=sum(cost.weight_seconds for cost in costs),
            kept_bytes=sum(cost.kept_bytes for cost in costs),
            left_bytes=sum(cost.left_bytes for cost in costs),
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Conditions of the simulation: numbers of pipeline ranks and microbatches, transfer time and memory limit."""

    ranks: int
    """Number of ranks of the pipeline axis."""
    microbatches: int
    transfer_seconds: float = 0.0
    """Seconds from the end of a stage until its outputs arrive at a stage on another rank."""
    limit_bytes: int | None = None
    """Maximum bytes of activations on a rank; None: 1.1 times the peak of 1f1b on the fullest rank."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Simulated step time and peak memory of one kind of schedule, or the reason why it was rejected."""

    kind: str
    virtual_stages: int
    seconds: float = 0.0
    """Predicted seconds of all forwards and backwards of a step; FLOPs if nothing was measured."""
    bubble: float = 0.0
    peak_bytes: int = 0
    """Peak bytes of activations on the fullest rank."""
    refused: str = ""
    """Reason why this kind of schedule was rejected; empty if it fits."""

    @property
    def name(self) -> str:
        """Kind of schedule, with the number of stages on each rank if above one, such as ``interleaved x 2``."""
        return self.kind + f" x {self.virtual_stages}" * (self.virtual_stages > 1)


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """Chosen schedule, with the simulated figures of all alternatives."""

    schedule: Schedule
    virtual_stages: int
    limit_bytes: int
    ranking: tuple[Tried, ...]
    """Simulated kinds: the chosen one, then others that fit from fast to slow, then rejected ones."""

    @property
    def chosen(self) -> Tried:
        """Figures of the chosen kind, the first of ``ranking``."""
        return self.ranking[0]

    def lines(self) -> tuple[str, ...]:
        """Formats ``ranking`` as lines of text: the choice, the fastest that fit, and the rejected kinds by reason."""
        fit = [tried for tried in self.ranking if not tried.refused]
        lines = [
            f"auto: {self.chosen.name}, best of {len(fit)} within {self.limit_bytes / 2**20:.1f} MiB of activations"
        ]
        lines += [
            f"{tried.name}: {tried.seconds / max(self.chosen.seconds, 1e-30):.2f} x the time, {tried.bubble:.0%} idle, "
            f"{tried.peak_bytes / 2**20:.1f} MiB"
            for tried in fit[:_LINES]
        ]
        refused: dict[str, list[str]] = {}
        for tried in self.ranking:
            size = f" {tried.peak_bytes / 2**20:.1f} MiB" if tried.peak_bytes else ""
            refused.setdefault(tried.refused, []).append(tried.name + size)
        return (*lines, *(f"{reason}: {', '.join(names)}" for reason, names in refused.items() if reason))


def choose(
    cuts: Mapping[int, Sequence[MicrobatchCost] | str], machine: Machine, kinds: Sequence[str] = PLAIN_FIRST
) -> ScheduleDecision:
    """Simulates all ``kinds`` of schedule and chooses the fastest within the memory limit; communicates nothing.

    Among schedules at most 1 % slower than the fastest it prefers fewer stages, then the simpler kind. Returns the
    schedule with the figures of all kinds.

    Args:
        cuts: for each number of stages per rank, the cost of every stage, or the reason why the model has no such cut.
        machine: numbers of ranks and microbatches, transfer time, and memory limit.
        kinds: names of the kinds to try, the simplest first.

    Raises:
        ScheduleError: no kind fits.
    """
    limit = _usual_bytes(cuts, machine) if machine.limit_bytes is None else machine.limit_bytes
    found: list[tuple[Tried, Schedule | None]] = []
    for virtual_stages, stages in sorted(cuts.items()):
        for kind in map(SCHEDULE_KINDS.__getitem__, kinds):
            if kind.fewest <= virtual_stages <= (kind.most or virtual_stages):
                found.append(_try(Tried(kind.name, virtual_stages), stages, machine, limit))
    fit = [(tried, schedule) for tried, schedule in found if not tried.refused]
    if not fit:
        counts = [machine.ranks * held for held, stages in sorted(cuts.items()) if not isinstance(stages, str)]
        raise ScheduleError(_refusal([tried for tried, _ in found], counts, machine, limit))
    fastest = min(tried.seconds for tried, _ in fit)
    # in the order of trials: fewer stages first, then the simpler kind
    chosen, schedule = next(pair for pair in fit if pair[0].seconds <= fastest * _NEAR)
    assert schedule is not None
    others = sorted((tried for tried, _ in fit if tried is not chosen), key=lambda tried: tried.seconds)
    refused = [tried for tried, _ in found if tried.refused]
    return ScheduleDecision(schedule, chosen.virtual_stages, limit, (chosen, *others, *refused))


def cost_of_stages(stages: Sequence[MicrobatchCost], transfer_seconds: float) -> Cost:
    """Converts the costs of ``stages`` and the seconds of one transfer to a :class:`Cost` for the simulation."""
    times = tuple(StageTimes(s.forward_seconds, s.input_seconds, s.weight_seconds) for s in stages)
    return Cost(transfer=transfer_seconds, times=times)


def peak_bytes(schedule: Schedule, stages: Sequence[MicrobatchCost]) -> tuple[int, ...]:
    """Returns the peak bytes of activations on each pipeline rank. ``stages``: cost of each stage."""

    def change(action: Action) -> int:
        stage = stages[action.stage]
        if action.op is Op.BACKWARD_INPUT:
            return stage.left_bytes - stage.kept_bytes
        if action.op is Op.BACKWARD_WEIGHT:
            return -stage.left_bytes
        return stage.kept_bytes if action.op is Op.FORWARD else -stage.kept_bytes

    return tuple(max(accumulate(map(change, row)), default=0) for row in schedule.per_rank)


def _refusal(found: Sequence[Tried], counts: Sequence[int], machine: Machine, limit: int) -> str:
    weighed = [tried for tried in found if tried.peak_bytes > limit]
    if weighed:
        least = min(weighed, key=lambda tried: tried.peak_bytes)
        return (
            f"no schedule holds at most {limit:,} bytes of activations on a rank (parallel.activation_limit_bytes): "
            f"{least.name} holds least, {least.peak_bytes:,}; raise this limit, or use smaller microbatches."
        )
    return (
        f'parallel.schedule "auto" has no schedule for {" or ".join(map(str, counts))} stages on {machine.ranks} '
        f"pipeline ranks; make {machine.ranks} stages by listing the first module of every stage but stage 0 in "
        'parallel.split, or choose a schedule for several stages per rank, such as "interleaved".'
    )


def _usual_bytes(cuts: Mapping[int, Sequence[MicrobatchCost] | str], machine: Machine) -> int:
    """Returns the default limit: a tenth above the peak of 1f1b with one merged stage on each rank."""
    virtual_stages, stages = next((v, stages) for v, stages in sorted(cuts.items()) if not isinstance(stages, str))
    parts = [stages[first : first + virtual_stages] for first in range(0, len(stages), virtual_stages)]
    joined = [MicrobatchCost.total(part) for part in parts]
    return int(_ROOM * max(peak_bytes(make_schedule("1f1b", machine.ranks, machine.microbatches), joined)))


def _try(
    tried: Tried, stages: Sequence[MicrobatchCost] | str, machine: Machine, limit: int
) -> tuple[Tried, Schedule | None]:
    if isinstance(stages, str):
        return replace(tried, refused=stages), None
    sizes = tried.kind, machine.ranks, machine.microbatches, tried.virtual_stages
    if why_unfit(*sizes) is not None:
        few = SCHEDULE_KINDS[tried.kind].microbatches_of(machine.ranks)
        return replace(tried, refused=f"needs {few} microbatches"), None
    cost = cost_of_stages(stages, machine.transfer_seconds)
    schedule = make_schedule(*sizes, cost)
    if max(peak_bytes(schedule, stages)) > limit:  # an order for these costs may need more memory than the default
        schedule = make_schedule(*sizes)
    timeline = simulate(schedule, cost)
    peak = max(peak_bytes(schedule, stages))
    over = "more than the limit" if peak > limit else ""
    return replace(tried, seconds=timeline.makespan, bubble=timeline.bubble, peak_bytes=peak, refused=over), schedule
