"""Calls that all ranks have to make: nobody begins before all have come, and who does not come is named."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from engine.errors import EngineError
from engine.parallel.comm import rendezvous
from engine.parallel.comm.rendezvous import JOINED_CALLS, JointCalls

ABSENT = "call it on every rank, outside of any `if rank == 0:` block."


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


def test_all_come_and_later_calls_are_free() -> None:
    store = HashStore()
    assert on_all([["eval_batch"] * 50] * 4, store) == [[""] * 50] * 4
    assert store.num_keys() <= 2 * JOINED_CALLS + 2 * 4
    assert said(JointCalls(store, 0, 1, 1.0), ["eval_batch"] * 50) == [""] * 50


def test_nobody_begins_before_all_have_come() -> None:
    store, came, began = HashStore(), threading.Event(), list[bool]()
    first, second = (JointCalls(store, rank, 2, 20.0) for rank in range(2))
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(said, first, ["eval_batch"])
        waits.add_done_callback(lambda _: began.append(came.is_set()))
        came.set()
        second.join("eval_batch")
        assert waits.result(20) == [""]
    assert began == [True]


def test_a_rank_that_does_not_come_is_named() -> None:
    assert on_all([["eval_batch"]], HashStore()) == [[""]]
    (text,) = said(JointCalls(HashStore(), 0, 3, 0.05), ["eval_batch"])
    assert text == f"eval_batch was called on rank 0, but not on ranks 1, 2 within 0 s; {ABSENT}"


def test_a_rank_in_another_call_is_named() -> None:
    for found in on_all([["eval_batch"], ["other"], ["eval_batch"]], HashStore(), 0.2):
        assert ABSENT in found[0]


def test_nobody_waits_for_a_rank_that_has_left_but_for_its_last_call() -> None:
    store = HashStore()
    ranks = [JointCalls(store, rank, 3, 5.0) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(said, ranks, [["save_checkpoint"]] * 3)) == [[""]] * 3
        late = threads.submit(said, ranks[0], ["eval_batch"])
        early = threads.submit(said, ranks[1], ["eval_batch"])
        ranks[2].join("eval_batch")
        ranks[2].leave()
        assert late.result(20) == early.result(20) == [""]
        (text,) = said(ranks[0], ["save_checkpoint"])
    where = "where the engine is closed or the script has ended"
    assert text == f"save_checkpoint was called on rank 0, but not on rank 2, {where}; {ABSENT}"


def test_a_rank_that_an_error_ends_leaves_the_word_to_it() -> None:
    store = HashStore()
    try:
        raise ValueError("odd")
    except ValueError:
        JointCalls(store, 1, 2, 1.0).leave()
    (text,) = said(JointCalls(store, 0, 2, 0.1), ["eval_batch"])
    assert text.startswith("eval_batch was called on rank 0, but not on rank 1 within 0 s")


def test_waiting_is_said_before_it_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "SLOW_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING, "trine"):
        (text,) = said(JointCalls(HashStore(), 1, 2, 0.1), ["eval_batch"])
    assert "not on rank 0 within 0 s; call it on every rank" in text
    assert [record.getMessage()[:36] for record in caplog.records] == ["eval_batch was called on rank 1, but"]


class Gone(HashStore):
    """The process that held it has ended."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def test_a_lost_store_is_a_sentence() -> None:
    (text,) = said(JointCalls(Gone(), 1, 2, 1.0), ["eval_batch"])
    assert text.startswith("eval_batch: rank 1 has lost the store of the job (Broken pipe)")
