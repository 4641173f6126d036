"""Numbers of microbatches in a step whose data ranks have different numbers of them (``uneven_microbatches``).

    microbatches of the data ranks      1                2                4
    meet once a step                    F B              F B F B          F B F B F B F B      reduce
    meet in every microbatch            F B . . . . . .  F B F B . . . .  F B F B F B F B      reduce

Data ranks meet in every microbatch if they gather parameters or reduce gradients in each. A rank then runs a schedule
of the largest number of microbatches; in those that it lacks (.) it computes nothing and takes part in the collectives.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.errors import EngineError
from engine.parallel.comm.agreement import gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.pipeline.runtime.executor import RankSchedule, rank_schedule
from engine.planning.budgets import COUNTS, meets_each_microbatch
from engine.planning.plan import Plan
from engine.step.failed_ranks import OtherRankError

_NO_BATCH = -1
"""In place of a number of microbatches: this data rank has a bad batch."""
_NOTHING = RankSchedule((), (), ())


@dataclass(frozen=True, slots=True)
class StepCount:
    """Microbatch and row counts of a step in which data ranks may have different numbers of microbatches."""

    scheduled: int
    """Microbatches of the schedule, with those that this rank lacks."""
    first: int
    """Global index of this rank's first microbatch."""
    rows: int
    """Rows of all data ranks."""


class StepCounts:
    """Exchange of the numbers of microbatches between data ranks. It also returns this rank's pipeline actions."""

    def __init__(self, plan: Plan, comm: Comm, device: torch.device) -> None:
        self._plan, self._comm, self._device = plan, comm, device
        self._rows: dict[tuple[int, bool], RankSchedule] = {}
        """Actions of this rank, by number of microbatches and True for training."""

    def agree(self, own: int, rows: int, problem: BaseException | None) -> StepCount:
        """Gathers ``own`` (number of microbatches) and ``rows`` of all data ranks.

        Returns the number of microbatches to schedule on this rank, the global index of its first one, and the rows of
        all data ranks.

        One all-gather of 16 bytes a rank over dp, label "microbatches". ``problem``: exception that left this rank
        without a batch, or None.

        Raises:
            EngineError: on all ranks, if a data rank has a ``problem`` or no rank has a microbatch.
        """
        grid = self._comm.grid
        mine = torch.tensor([own if problem is None else _NO_BATCH, rows])
        counts, all_rows = gather_from_all(mine, self._comm, self._device, COUNTS, grid.rows).T.tolist()
        if _NO_BATCH in counts:
            raise OtherRankError(
                "another data rank has no batch, so no rank makes this step; see the error of the rank that failed."
            )
        if not any(counts):
            raise EngineError(
                "the lists of all data ranks are empty, so the step has no loss; give at least one rank a microbatch."
            )
        before = [0, *accumulate(counts)][grid.row_rank]
        scheduled = max(counts) if meets_each_microbatch(self._plan.config) else own
        return StepCount(scheduled, before, sum(all_rows))

    def row(self, microbatches: int, trains: bool) -> RankSchedule:
        """Returns this rank's pipeline actions for a step of ``microbatches`` microbatches; for 0, no actions.

        ``trains``: True for training; False for an evaluation, which has forwards only.
        """
        if not microbatches:
            return _NOTHING
        if (found := self._rows.get((microbatches, trains))) is None:
            schedule = self._plan.steps_of(microbatches) if trains else self._plan.forwards(microbatches)
            found = self._rows[microbatches, trains] = rank_schedule(schedule, self._comm.grid.coord().pp)
        return found
