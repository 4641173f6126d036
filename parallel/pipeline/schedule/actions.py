"""Schedules as data: actions, their order on every pipeline rank, and the placement of stages.

A schedule is one row of actions per rank, compute only. An action prints as a token, ``2F5``: stage 2, forward,
microbatch 5. Sends and receives follow from :meth:`Schedule.needs`, so that a generator cannot omit one:

    rank 0   0F0 ----.   0F1 ----.                  0B0
                     v           v                   ^
    rank 1          1F0         1B0 needs 1F0 -------'      0B0 receives from 1B0

A stage is on one rank; a rank may have several stages (interleaved, V-shaped). A backward is either whole, ``B``, or
split into ``I``, the gradient of the input, needed by the previous stage, and ``W``, the gradient of the weights,
needed by no stage (Qi et al. 2023, Zero Bubble Pipeline Parallelism).

The built-in kinds use three placements:

    line    one stage per rank                   0  1  2
    loop    stage s on rank s % p                0  1  2     3  4  5
    v       down and back up                     0  1  2     5  4  3

In a line and a loop every stage sends to the next rank, in a loop the last rank also to the first. In a V the last rank
has two consecutive stages, and rank 0 both reads the batch and computes the loss.
"""

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from engine.errors import ScheduleError


class Op(StrEnum):
    """Type of a pipeline action: forward F, whole backward B, input gradient I or weight gradient W.

    The value is the letter in a token such as ``2F5``.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    # Enum hashes in Python, which is slow for schedules of 100,000 actions
    __hash__ = str.__hash__


_TOKEN = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """Computation of one type for one stage and one microbatch. Prints as ``2F5``: stage 2, forward, microbatch 5."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, token: str) -> "Action":
        """Returns the action that prints as ``token``.

        Raises:
            ScheduleError: ``token`` is not an action.
        """
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise ScheduleError(
                f"{token!r} is not an action; write the number of the stage, then one of the letters F, B, I and W, "
                "then the number of the microbatch, such as 2F5."
            )
        return cls(Op(found[2]), int(found[1]), int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """Order of the actions of all pipeline ranks in one step.

    Construction does not exclude deadlocks: :func:`check` raises an error for them.

    Raises:
        ScheduleError: the numbers of rows and ranks differ, or a stage is on no rank or on several.
    """

    name: str
    stages: int
    """Number of stages of the model, over all ranks."""
    microbatches: int
    per_rank: tuple[tuple[Action, ...], ...]
    """Row r: the actions of pipeline rank r, in order."""
    stages_of_rank: tuple[tuple[int, ...], ...]
    """Stages placed on each rank, ascending."""
    training: bool = True
    """True if the schedule contains backwards."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Warnings about entries of a schedule file that have no effect at their position."""

    def __post_init__(self) -> None:
        if self.stages < 1 or self.microbatches < 1:
            raise ScheduleError(
                f"schedule {self.name} over {self.stages} stages and {self.microbatches} microbatches is empty; "
                "use at least one of each."
            )
        if len(self.stages_of_rank) != len(self.per_rank):
            raise ScheduleError(
                f"schedule {self.name} has actions for {len(self.per_rank)} ranks (per_rank), but stages for "
                f"{len(self.stages_of_rank)} ranks (stages_of_rank); give both one entry for each pipeline rank."
            )
        held = Counter(stage for stages in self.stages_of_rank for stage in stages)
        wrong = sorted(stage for stage in held.keys() | set(range(self.stages)) if held[stage] != 1)
        outside = sorted(stage for stage in held if not 0 <= stage < self.stages)
        for stage in (wrong + outside)[:1]:
            ranks = [str(rank) for rank, stages in enumerate(self.stages_of_rank) if stage in stages]
            raise ScheduleError(
                f"schedule {self.name} of {self.stages} stages has stage {stage} on "
                f"{'ranks ' + ' and '.join(ranks) if ranks else 'no rank'}; "
                f"place each of the stages 0 to {self.stages - 1} on one rank."
            )

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Pipeline rank of each stage, by stage number."""
        pairs = sorted((stage, rank) for rank, stages in enumerate(self.stages_of_rank) for stage in stages)
        return tuple(rank for _, rank in pairs)

    def passes(self, rank: int) -> tuple[Action, ...]:
        """Returns the actions of pipeline rank ``rank`` without weight-gradient actions (W)."""
        return tuple(action for action in self.per_rank[rank] if action.op is not Op.BACKWARD_WEIGHT)

    def weights_beside(self, rank: int) -> dict[Action, Action]:
        """Returns the weight-gradient actions (W) that ``rank`` can compute during collectives of other actions.

        Each key is an F, B or I action of the rank; the value is the first W action after the key.
        """
        found, ended, following = {}, set(), deque(a for a in self.per_rank[rank] if a.op is Op.BACKWARD_WEIGHT)
        for action in self.per_rank[rank]:
            if action.op is Op.BACKWARD_WEIGHT:
                following.popleft()
                continue
            if following and (following[0].stage, following[0].microbatch) in ended:
                found[action] = following[0]
            if action.op is Op.BACKWARD_INPUT:
                ended.add((action.stage, action.microbatch))
        return found

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        inputs = (action for row in self.per_rank for action in row if action.op is Op.BACKWARD_INPUT)
        return frozenset((action.stage, action.microbatch) for action in inputs)

    @property
    def splits(self) -> bool:
        """True if at least one backward is split into an input-gradient (I) and a weight-gradient (W) action."""
        return bool(self._split)

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """Returns the action that computes the input gradient of ``stage``: I for a split backward, else B."""
        split = (stage, microbatch) in self._split
        return Action(Op.BACKWARD_INPUT if split else Op.BACKWARD, stage, microbatch)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Returns the direct dependencies of ``action``: the actions, on any rank, with results that it uses."""
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            return (Action(Op.FORWARD, stage - 1, microbatch),) if stage else ()
        if action.op is Op.BACKWARD_WEIGHT:
            return (Action(Op.BACKWARD_INPUT, stage, microbatch),)
        own = Action(Op.FORWARD, stage, microbatch)
        return (own, self.backward_of(stage + 1, microbatch)) if stage + 1 < self.stages else (own,)

    def feeds(self, action: Action) -> Action | None:
        """Returns the action of a neighbouring stage that uses the result of ``action``, or None."""
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            return Action(Op.FORWARD, stage + 1, microbatch) if stage + 1 < self.stages else None
        if action.op is Op.BACKWARD_WEIGHT or stage == 0:
            return None
        return self.backward_of(stage - 1, microbatch)

    def receives(self, action: Action) -> Action | None:
        """Returns the action on another rank that sends its result to ``action``, or None."""
        here = self.rank_of_stage[action.stage]
        away = (need for need in self.needs(action) if self.rank_of_stage[need.stage] != here)
        return next(away, None)

    def sends(self, action: Action) -> Action | None:
        """Returns the action on another rank that receives the result of ``action``, or None."""
        fed = self.feeds(action)
        if fed is None or self.rank_of_stage[fed.stage] == self.rank_of_stage[action.stage]:
            return None
        return fed

    def text(self) -> str:
        """Returns the schedule in the format of schedule files: one line per rank, tokens separated by blanks."""
        return "".join(" ".join(map(str, row)) + "\n" for row in self.per_rank)


Placement = tuple[tuple[int, ...], ...]
"""Stages of each pipeline rank, ascending."""


def loop(ranks: int, virtual_stages: int) -> Placement:
    """Returns the loop placement: stage s on rank s % ``ranks``, with ``virtual_stages`` stages per rank."""
    return tuple(tuple(range(rank, ranks * virtual_stages, ranks)) for rank in range(ranks))


def v_shape(ranks: int) -> Placement:
    """Returns the V placement: stages r and 2p-1-r on rank r of p ranks.

    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory.
    """
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def rounds(ranks: int, microbatches: int) -> list[range]:
    """Divides ``microbatches`` into consecutive rounds; a rank runs one round on all its stages, then the next.

    For m microbatches on p ranks there are max(1, m // p) rounds of nearly equal sizes.
    """
    count = max(1, microbatches // ranks)
    starts = [-(-microbatches * index // count) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
