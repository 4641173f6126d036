"""Calls that all ranks have to make: nobody begins before all have come, and who does not come is named."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from engine.errors import EngineError
from engine.parallel.comm import meeting
from engine.parallel.comm.meeting import JointCalls


def said(joint: JointCalls, calls: Sequence[str]) -> list[str]:
    """What each call says on one rank; empty if it is made."""
    found = []
    for call in calls:
        try:
            joint.join(call)
            found.append("")
        except EngineError as error:
            found.append(str(error))
    return found


def on_all(calls: Sequence[Sequence[str]], store: HashStore, seconds: float = 20.0) -> list[list[str]]:
    """Every rank in a thread."""
    ranks = [JointCalls(store, rank, len(calls), seconds) for rank in range(len(calls))]
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(said, ranks, calls))


def test_all_come_as_often_as_they_like_and_the_store_does_not_grow() -> None:
    store = HashStore()
    assert on_all([["eval_batch"] * 50] * 4, store) == [[""] * 50] * 4
    assert store.num_keys() <= 3 * (4 + 3)


def test_nobody_begins_before_all_have_come() -> None:
    store, came, began = HashStore(), threading.Event(), list[bool]()
    first, second = (JointCalls(store, rank, 2, 20.0) for rank in range(2))
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(said, first, ["save_checkpoint"])
        waits.add_done_callback(lambda _: began.append(came.is_set()))
        came.set()
        second.join("save_checkpoint")
        assert waits.result(20) == [""]
    assert began == [True]


def test_a_rank_that_does_not_come_is_named() -> None:
    assert on_all([["eval_batch"]], HashStore()) == [[""]]
    alone = JointCalls(HashStore(), 0, 3, 0.05)
    (text,) = said(alone, ["save_checkpoint"])
    assert text == (
        "save_checkpoint was called on rank 0 and for 0 s not on ranks 1, 2: every rank calls it; take it out of "
        "`if rank == 0:`, where only printing belongs."
    )


def test_waiting_is_said_before_it_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "SLOW_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING, "trine"):
        (text,) = said(JointCalls(HashStore(), 1, 2, 0.1), ["eval_batch"])
    assert "not on rank 0: every rank calls it" in text
    assert [record.getMessage()[:35] for record in caplog.records] == ["eval_batch was called on rank 1 and"]


def test_different_calls_are_refused_on_all_ranks() -> None:
    for found in on_all([["eval_batch"], ["save_checkpoint"], ["eval_batch"]], HashStore()):
        assert "call another method of the engine; every rank makes the same calls in the same order." in found[0]


class Gone(HashStore):
    """The process that held it has ended."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def test_a_lost_store_is_a_sentence() -> None:
    (text,) = said(JointCalls(Gone(), 1, 2, 1.0), ["eval_batch"])
    assert text.startswith("eval_batch: rank 1 has lost the store of the job (Broken pipe)")
