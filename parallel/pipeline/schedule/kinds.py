"""Kinds of schedules by name, with bubble and memory of each kind.

    kind         stages       holds         backward   bubble for m >= p   use for
    gpipe        a line       m             whole      (p-1)/(m+p-1)       the order of one process
    1f1b         a line       p             whole      (p-1)/(m+p-1)       little memory, fewest messages
    interleaved  v in a loop  p + (p-1)/v   whole      (p-1)/(vm+p-1)      few microbatches
    looped-bfs   v in a loop  m             whole      (p-1)/(vm+p-1)      ZeRO 2 and 3: a stage is gathered once
    zb-h1        v in a loop  p             split      (p-1)/(3vm+p-1)     little memory and few microbatches
    zb-v         2 in a V     p             split      (p-1)/(6m+p-1)      the same, with quick links
    dualpipe-v   2 in a V     p + 1/2       partly     (p-1)/(6m+p-1)      messages that overlap with compute

"Holds" counts live activations, in units of one microbatch in a rank's whole slice of the model, on the fullest rank.
The bubble is the idle share of the step if a forward and each half of a backward take equal time.

DualPipeV has two directions of work on each rank: compute of one overlaps with messages of the other.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule, v_shape
from engine.parallel.pipeline.schedule.one_f_one_b import gpipe, interleaved, looped_bfs, one_f_one_b
from engine.parallel.pipeline.schedule.schedule_file import ENDINGS, read_schedule
from engine.parallel.pipeline.schedule.simulate import Cost
from engine.parallel.pipeline.schedule.validate import check
from engine.parallel.pipeline.schedule.zero_bubble import zb_h1, zb_v


# dualpipe_v(2, 4): stages 0 and 3 on rank 0, 1 and 2 on rank 1. In the middle each forward of one stage is next to a
# whole backward of the other; only the first and the last backwards are split.
#
#    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3   . 0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
#    rank 1    . 1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Makes the V form of DualPipe (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1) for m >= 2p microbatches on p ranks.

    Rank r has the stages r and 2p-1-r. The bubble is (p-1)/(6m+p-1). A rank stores the activations of at most 2p + 1
    pairs (stage, microbatch) at a time.
    """
    rows = tuple(tuple(_Row(ranks, rank).fill(microbatches)) for rank in range(ranks))
    return Schedule("dualpipe-v", 2 * ranks, microbatches, rows, v_shape(ranks))


class _Row:
    """Row of one rank; half 0 is the stage in ascending order of ranks, half 1 the stage in descending order."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._after, self._upto = ranks, ranks - rank - 1, rank + 1
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._done = {(op, half): 0 for op in (Op.FORWARD, Op.BACKWARD) for half in (0, 1)}
        self._waiting: deque[Action] = deque()

    def fill(self, microbatches: int) -> Iterator[Action]:
        """Yields the actions in order; ``after`` ranks follow this one, ``upto`` counts this one and the ranks before
        it."""
        after, upto = self._after, self._upto
        for _ in range(2 * after):
            yield self._forward(0)
        for _ in range(upto):
            yield self._forward(0)
            yield self._forward(1)
        for _ in range(after):
            yield self._input(1)
            yield self._weight()
            yield self._forward(1)
        for _ in range(microbatches - 2 * self._ranks + upto):
            yield self._forward(0)
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        for _ in range(after):
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        for number in range(2 * upto):
            half = 1 - number % 2
            yield self._backward(half) if number < upto else self._input(half)
        for _ in range(after):
            yield self._weight()
            yield self._input(0)
        while self._waiting:
            yield self._weight()

    def _next(self, op: Op, half: int) -> int:
        self._done[op, half] += 1
        return self._done[op, half] - 1

    def _forward(self, half: int) -> Action:
        return Action(Op.FORWARD, self._stages[half], self._next(Op.FORWARD, half))

    def _backward(self, half: int) -> Action:
        return Action(Op.BACKWARD, self._stages[half], self._next(Op.BACKWARD, half))

    def _input(self, half: int) -> Action:
        stage, microbatch = self._stages[half], self._next(Op.BACKWARD, half)
        self._waiting.append(Action(Op.BACKWARD_WEIGHT, stage, microbatch))
        return Action(Op.BACKWARD_INPUT, stage, microbatch)

    def _weight(self) -> Action:
        return self._waiting.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """Kind of pipeline schedule, with its generator, and the numbers of stages and microbatches that it allows."""

    name: str
    description: str
    """One-line description for lists."""
    paper: str
    placement: str
    """``line``, ``loop`` or ``v``: see :mod:`engine.parallel.pipeline.schedule.actions`."""
    virtual_stages: int
    """Default number of stages on each rank."""
    fewest: int
    """Minimum number of stages on each rank."""
    most: int | None
    """Maximum number of stages on each rank; None: no limit."""
    splits: bool
    """True if weight gradients and input gradients are separate actions."""
    make: Callable[[int, int, int, Cost | None], Schedule]
    """Function (ranks, microbatches, stages per rank, costs) that makes the schedule."""
    microbatches_of: Callable[[int], int] = lambda ranks: 1
    """Function that returns the minimum number of microbatches for a number of ranks."""


_ALL = (
    ScheduleKind(
        name="gpipe",
        description="all forwards, then all backwards; sums gradients in the order of one process",
        paper="Huang et al. 2019, GPipe",
        placement="line",
        virtual_stages=1,
        fewest=1,
        most=1,
        splits=False,
        make=lambda p, m, v, cost: gpipe(p, m),
    ),
    ScheduleKind(
        name="1f1b",
        description="a backward as soon as possible; holds at most p microbatches",
        paper="Narayanan et al. 2019, PipeDream",
        placement="line",
        virtual_stages=1,
        fewest=1,
        most=1,
        splits=False,
        make=lambda p, m, v, cost: one_f_one_b(p, m),
    ),
    ScheduleKind(
        name="interleaved",
        description="1f1b over several stages a rank: idle time divided by their number, more messages",
        paper="Narayanan et al. 2021, Megatron-LM",
        placement="loop",
        virtual_stages=2,
        fewest=2,
        most=None,
        splits=False,
        make=lambda p, m, v, cost: interleaved(p, m, v),
    ),
    ScheduleKind(
        name="looped-bfs",
        description="several stages a rank, one after the other: ZeRO gathers and reduces each stage once",
        paper="Lamy-Poirier 2022, Breadth-First Pipeline Parallelism",
        placement="loop",
        virtual_stages=2,
        fewest=2,
        most=None,
        splits=False,
        make=lambda p, m, v, cost: looped_bfs(p, m, v),
    ),
    ScheduleKind(
        name="zb-h1",
        description="weight gradients fill the idle time of 1f1b or interleaved, in the memory of 1f1b",
        paper="Qi et al. 2023, Zero Bubble Pipeline Parallelism",
        placement="loop",
        virtual_stages=1,
        fewest=1,
        most=None,
        splits=True,
        make=zb_h1,
    ),
    ScheduleKind(
        name="zb-v",
        description="two stages a rank, there and back: nearly no idle time in the memory of 1f1b",
        paper="Qi et al. 2024, Pipeline Parallelism with Controllable Memory",
        placement="v",
        virtual_stages=2,
        fewest=2,
        most=2,
        splits=True,
        make=lambda p, m, v, cost: zb_v(p, m, cost),
    ),
    ScheduleKind(
        name="dualpipe-v",
        description="two stages a rank, there and back: forwards of one with backwards of the other",
        paper="DeepSeek-AI 2024, DeepSeek-V3",
        placement="v",
        virtual_stages=2,
        fewest=2,
        most=2,
        splits=True,
        make=lambda p, m, v, cost: dualpipe_v(p, m),
        microbatches_of=lambda p: 2 * p,
    ),
)


SCHEDULE_KINDS: Mapping[str, ScheduleKind] = MappingProxyType({kind.name: kind for kind in _ALL})
"""All kinds of schedule by their names in the configuration, the simplest first."""


def why_unfit(kind: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> str | None:
    """Returns the reason why :func:`make_schedule` rejects these arguments; None if it accepts them."""
    if kind not in SCHEDULE_KINDS:
        *names, last = SCHEDULE_KINDS
        return f"schedule {kind!r} does not exist; choose {', '.join(names)} or {last}."
    found = SCHEDULE_KINDS[kind]
    held = _held(found, virtual_stages)
    if min(ranks, microbatches) < 1:
        return (
            f"schedule {kind} over {ranks * found.fewest} stages and {microbatches} microbatches is empty; "
            "use at least one of each."
        )
    if held < found.fewest or (found.most and held > found.most):
        holds = {
            "line": "one stage",
            "v": "two stages",
            "loop": "one stage or more" if found.fewest == 1 else "several stages",
        }
        return (
            f"schedule {kind} with virtual_stages = {virtual_stages}: it holds {holds[found.placement]} on each rank; "
            f"set virtual_stages to {found.fewest}{'' if found.most else ' or more'}."
        )
    if microbatches < found.microbatches_of(ranks):
        return (
            f"schedule {kind} with {microbatches} microbatches over {ranks} ranks: it needs "
            f"{found.microbatches_of(ranks)} or more; raise gradient_accumulation_steps or choose zb-v."
        )
    return None


def make_schedule(
    kind: str, ranks: int, microbatches: int, virtual_stages: int = 1, cost: Cost | None = None
) -> Schedule:
    """Makes a training schedule of ``kind``, with ``virtual_stages`` stages on each of ``ranks`` ranks.

    For kinds with exactly two stages on each rank, ``virtual_stages`` = 1 means 2. ``cost``: times of the stages, which
    affect the order of actions in zb-h1 and zb-v.

    Raises:
        ScheduleError: the kind is unknown, or does not allow these numbers of ranks, microbatches and stages.
    """
    reason = why_unfit(kind, ranks, microbatches, virtual_stages)
    if reason is not None:
        raise ScheduleError(reason)
    return SCHEDULE_KINDS[kind].make(ranks, microbatches, _held(SCHEDULE_KINDS[kind], virtual_stages), cost)


def _held(kind: ScheduleKind, virtual_stages: int) -> int:
    """Returns the number of stages on each rank; the default of 1 becomes the number that the kind fixes."""
    return kind.virtual_stages if virtual_stages == 1 and kind.fewest == kind.most else virtual_stages


def training_schedule(
    kind: str, ranks: int, microbatches: int, virtual_stages: int = 1, cost: Cost | None = None
) -> Schedule:
    """Returns a training schedule. ``kind``: name of a kind of schedule, or path of a schedule file.

    "auto" gives 1f1b. ``cost``: times of a rank's share of the model, for zb-h1 and zb-v.

    Raises:
        ScheduleError: the schedule is unknown, would deadlock, or does not have the stages and microbatches of the run.
    """
    kind = "1f1b" if kind == "auto" else kind
    if not kind.endswith(ENDINGS):
        schedule = make_schedule(kind, ranks, microbatches, virtual_stages)
        if ranks == 1:  # one rank never waits, so every kind is a plain loop
            schedule = make_schedule("1f1b", 1, microbatches)
        elif cost is not None:
            schedule = make_schedule(kind, ranks, microbatches, virtual_stages, cost.shared(ranks, schedule.stages))
        check(schedule)
        return schedule
    schedule = read_schedule(kind)
    check(schedule)
    if len(schedule.per_rank) != ranks or schedule.microbatches != microbatches or not schedule.training:
        raise ScheduleError(
            f"schedule {kind} has {len(schedule.per_rank)} lines and {schedule.microbatches} microbatches"
            f"{'' if schedule.training else ', and no backward'}; this run needs a line for each of {ranks} pipeline "
            f"ranks, with F and B (or I and W) of {microbatches} microbatches."
        )
    if ranks == 1 and schedule.stages > 1:
        raise ScheduleError(
            f"schedule {kind} has {schedule.stages} stages, but parallel.pipeline 1 does not cut the model; name a "
            "file of one stage, or remove parallel.schedule."
        )
    return schedule
