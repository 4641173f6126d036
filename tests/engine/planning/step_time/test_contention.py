"""Schedules of ranks that share processors and ways out, computed by hand."""

import math

import pytest

from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.simulate import Cost, simulate
from engine.planning.step_time.contention import Contention, Task, simulate_contention

OPS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


def tasks(stages: int, wait: float = 0.0) -> dict[tuple[Op, int], Task]:
    return {(op, stage): Task(work, wait) for op, work in OPS.items() for stage in range(stages)}


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_without_contention_it_is_the_plain_simulation(kind: str) -> None:
    schedule = make_schedule(kind, 4, 8, 2 if kind in ("interleaved", "looped-bfs", "zb-v", "dualpipe-v") else 1)
    plain = simulate(schedule, Cost(1, 2, 1, 1, transfer=0.5))
    found = simulate_contention(schedule, tasks(schedule.stages), Contention(hop=lambda action, to: (0.0, 0.5)))
    assert found.spans == plain.spans


def test_ranks_share_processors() -> None:
    schedule = make_schedule("gpipe", 1, 2, 1)
    assert simulate_contention(schedule, tasks(1), Contention(copies=4, processors=2.0)).makespan == 12.0


def test_a_rank_that_waits_leaves_its_processor() -> None:
    # two stages on one processor: nothing can overlap, so the bubble costs nothing
    schedule = make_schedule("1f1b", 2, 4, 1)
    assert simulate_contention(schedule, tasks(2), Contention(processors=1.0)).makespan == pytest.approx(24.0)
    assert simulate_contention(schedule, tasks(2), Contention(processors=2.0)).makespan == pytest.approx(15.0)


def test_waits_take_no_processor() -> None:
    schedule = make_schedule("gpipe", 1, 1, 1)
    found = simulate_contention(schedule, tasks(1, wait=3.0), Contention(copies=2, processors=1.0))
    assert [span.end for span in found.spans[0]] == [5.0, 12.0]


def test_messages_leave_a_rank_one_after_another() -> None:
    # gpipe, 2 stages, 2 microbatches: forwards end at 1 and 2, and each takes 5 on the way out
    schedule = make_schedule("gpipe", 2, 2, 1)

    def hop(action: Action, to: int) -> tuple[float, float]:
        assert to == (1 if action.op is Op.FORWARD else 0)
        return (5.0, 1.0) if action.op is Op.FORWARD else (0.0, 0.0)

    found = simulate_contention(schedule, tasks(2), Contention(hop=hop))
    assert [span.start for span in found.spans[1][:2]] == [7.0, 12.0]


def test_all_ranks_have_processors_by_default() -> None:
    assert Contention().processors == math.inf
