"""Ranks that meet at a store: who does not come, what differs, and what an earlier start has left there."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from engine.errors import GridError
from engine.parallel.comm.rendezvous import (
    Difference,
    FailureReports,
    KeyStore,
    Rendezvous,
    first_difference,
    name_ranks,
)


def meeting(store: KeyStore, rank: int, size: int, seconds: float = 20.0) -> Rendezvous:
    return Rendezvous(store, rank, size, "a store", seconds)


def meet_all(store: KeyStore, given: list[Mapping[str, str]]) -> list[tuple[str, Difference | None]]:
    """Every rank in a thread: (name of the rendezvous, difference)."""

    def named(rank: int) -> tuple[str, Difference | None]:
        mine = meeting(store, rank, len(given))
        found = mine.meet(given[rank])
        return mine.name, found

    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(named, range(len(given))))


def test_all_come_and_use_one_name() -> None:
    store = HashStore()
    first = meet_all(store, [{"a": "1"}] * 4)
    assert len({name for name, _ in first}) == 1 and all(found is None for _, found in first)
    again = meet_all(store, [{"a": "1"}] * 4)
    assert len({name for name, _ in again}) == 1 and again[0][0] != first[0][0], "every engine meets anew"


class Watched(HashStore):
    """A store that tells when rank 0 has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = threading.Event()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if key.startswith("answer/"):
            self.answered.set()


def test_what_an_earlier_start_has_left_is_not_taken_for_an_answer() -> None:
    """torchrun keeps its store when it restarts a job: rank 1 comes late, and finds answers to a dead rank."""
    store = Watched()
    (before, _), _ = meet_all(store, [{"a": "1"}] * 2)
    first, second = meeting(store, 0, 2), meeting(store, 1, 2)
    store.answered.clear()
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(first.meet, {"a": "1"})
        assert store.answered.wait(20), "rank 0 has answered what is left of rank 1"
        assert not waits.done()
        late = threads.submit(second.meet, {"a": "1"})
        assert waits.result(20) is None and late.result(20) is None
    assert first.name == second.name != before


def test_the_first_difference_is_the_same_on_all_ranks() -> None:
    given = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2"}, {"a": "1"}]
    results = meet_all(HashStore(), list(given))
    assert {str(found) for _, found in results} == {"b is 2 on ranks 0, 2 and 3 on rank 1 and absent on rank 3"}


def test_ranks_that_do_not_come_are_named_on_all_others() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        told = [threads.submit(meeting(store, rank, 4, 0.2).meet, {}) for rank in (0, 2)]
        errors = [str(one.exception(20)) for one in told]
    assert errors[0] == errors[1]
    assert errors[0].startswith("ranks 1, 3 of 4 did not come to a store within 0 s, so no rank starts; read the")


def test_rank_zero_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.comm.rendezvous._GRACE_SECONDS", 0.1)
    with pytest.raises(GridError, match="rank 0 of 2 did not come to a store within 0 s"):
        meeting(HashStore(), 1, 2, 0.1).meet({})


class Lost(HashStore):
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("[../store.cc:12] Connection reset by peer\nframe #0: c10d::TCPStore")


def test_a_store_that_is_lost_is_named_without_its_source() -> None:
    with pytest.raises(GridError) as caught:
        meeting(Lost(), 1, 2).meet({})
    assert str(caught.value).startswith("rank 1 has lost a store, where the ranks of this job meet (Connection")
    assert "frame" not in str(caught.value)


def test_keys_are_compared_in_the_order_of_rank_zero() -> None:
    found = first_difference([(0, 2), (1,)], [{"z": "1", "a": "1"}, {"a": "2", "z": "2"}])
    assert found == Difference("z", (((0, 2), "1"), ((1,), "2")))
    assert first_difference([(0,), (1,)], [{"a": "1"}, {"a": "1"}]) is None


def test_many_ranks_are_counted() -> None:
    assert name_ranks([3]) == "rank 3" and name_ranks([0, 2]) == "ranks 0, 2"
    assert name_ranks(range(11)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_a_report_names_who_did_not_come_and_who_was_elsewhere() -> None:
    store = HashStore()

    def tell(rank: int) -> str:
        what = "all_reduce 'gradients' over dp" if rank == 1 else "all_reduce 'evaluate' over world"
        return FailureReports(store, rank).absent(what, (0, 1, 2, 3))

    with ThreadPoolExecutor(3) as threads:
        words = list(threads.map(tell, (0, 1, 2)))
    assert words[0] == words[2] == ("rank 3 did not come, ended or hangs, rank 1 was in all_reduce 'gradients' over dp")


def test_a_rank_that_knows_who_has_ended_tells_the_others_where_it_was() -> None:
    store, call = HashStore(), "all_gather 'column inputs' over tp"
    FailureReports(store, 1).tell(call)
    FailureReports(Lost(), 1).tell(call)  # nobody hears it, and nobody waits
    store.wait(["failed/1"])
    assert FailureReports(store, 0).absent(call, (0, 1)) == ""


def test_a_report_to_a_store_that_is_lost_says_so() -> None:
    assert FailureReports(Lost(), 1).absent("x", (0, 1)) == "rank 0 does not answer"
