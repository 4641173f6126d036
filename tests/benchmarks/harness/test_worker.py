"""A process that answers requests: what comes back when it answers, fails, hangs or dies; and the budget of time."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.budget import Budget
from benchmarks.harness.worker import Worker, WorkerError


def make_counter(start: int) -> Callable[..., Any]:
    """Adds up; "die", "hang" and "fail" do."""
    total = [start]

    def answer(task: str, amount: int = 0) -> int:
        if task == "die":
            os._exit(3)
        if task == "hang":
            time.sleep(600)
        if task == "fail":
            raise ValueError("no such number\nand more of it")
        total[0] += amount
        return total[0]

    return answer


def make_nothing() -> Callable[..., Any]:
    raise RuntimeError("cannot be built")


def test_it_keeps_its_state_over_requests_and_errors() -> None:
    with Worker(make_counter, (5,)) as worker:
        assert worker.ask(("add", 2), 60) == 7
        with pytest.raises(WorkerError, match="ValueError: no such number") as caught:
            worker.ask(("fail",), 60)
        assert not caught.value.ended
        assert "in answer" in caught.value.trace
        worker.post(("add", 1))
        worker.post(("add", 1))
        assert [worker.receive(60), worker.receive(60)] == [8, 9]


def test_death_and_silence_end_it() -> None:
    with Worker(make_counter, (0,)) as worker:
        with pytest.raises(WorkerError, match="exit code 3") as caught:
            worker.ask(("die",), 60)
        assert caught.value.ended
    with Worker(make_counter, (0,)) as worker:
        assert worker.ask(("add", 1), 60) == 1
        with pytest.raises(WorkerError, match="no answer within 0 s") as caught:
            worker.ask(("hang",), 0.2)
        assert caught.value.ended


def test_what_cannot_be_built_says_so() -> None:
    with Worker(make_nothing, ()) as worker, pytest.raises(WorkerError, match="RuntimeError: cannot be built"):
        worker.ask(("add", 1), 60)


def test_a_part_of_a_budget_is_no_more_than_what_is_left() -> None:
    now = [100.0]
    whole = Budget(10, clock=lambda: now[0])
    now[0] += 4
    assert (whole.spent, whole.left) == (4, 6)
    part = whole.part(20)
    assert part.left == 6
    now[0] += 7
    assert (whole.left, part.left) == (0, 0)
