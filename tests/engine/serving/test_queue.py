"""Fair queue: shares by tokens, training before samples, order within a session."""

from threading import Thread
from time import monotonic

import pytest

from engine.serving.bookkeeping.entry import INTERNAL, FutureEntry
from engine.serving.bookkeeping.queue import QUANTUM, SAMPLE_AFTER, FairQueue
from engine.serving.commands import DropWeights
from tests.engine.serving.commands_of_tests import forward_backward, numbered, sample


def entries(session: str, count: int, cost: int) -> list[FutureEntry]:
    """Returns training entries of a session."""
    made = [numbered(number, forward_backward(number), f"{session}:train:0") for number in range(count)]
    for one in made:
        one.cost = cost
    return made


def taken(queue: FairQueue) -> list[FutureEntry]:
    """Returns all entries in the queue's order."""
    return list(iter(lambda: queue.next(0), None))


@pytest.mark.parametrize(
    ("costs", "shares"), [((1000, 1000), (1, 1)), ((9000, 1000), (1, 9)), ((100, 12000), (120, 1))]
)
def test_sessions_get_equal_shares_of_tokens(costs: tuple[int, int], shares: tuple[int, int]) -> None:
    queue = FairQueue()
    for session, cost in zip("ab", costs, strict=True):
        for one in entries(session, 400, cost):
            queue.put(one)
    order, spent = taken(queue), {"a": 0, "b": 0}
    assert len(order) == 800
    left = {"a": 400, "b": 400}
    for one in order:
        spent[one.session] += one.cost
        left[one.session] -= 1
        if not all(left.values()):
            break
        assert abs(spent["a"] - spent["b"]) <= 2 * max(costs) + 2 * QUANTUM
    for session in "ab":
        own = [one.number for one in order if one.session == session]
        assert own == sorted(own, key=lambda number: number or 0)


def test_training_goes_before_samples_and_samples_do_not_starve() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.put(sample(number))
    for one in entries("a", 20, 1):
        queue.put(one)
    kinds = "".join("s" if one.is_sample else "t" for one in taken(queue))
    assert kinds == "t" * SAMPLE_AFTER + "s" + "t" * SAMPLE_AFTER + "s" + "t" * 4 + "s"


def test_entries_of_the_service_go_before_all_others() -> None:
    queue = FairQueue()
    queue.put(numbered(1))
    queue.put(own := FutureEntry("drop/1", INTERNAL, DropWeights("x")))
    assert queue.next(0) is own


def test_a_removed_entry_does_not_run_and_its_place_is_counted() -> None:
    queue = FairQueue()
    own = [numbered(number) for number in range(3)]
    for at, one in enumerate(own):
        one.accepted = float(at)
        queue.put(one)
    late = sample(1)
    late.accepted = 1.5
    queue.put(late)
    assert [queue.before(one) for one in own] == [0, 1, 2] and queue.before(late) == 3
    assert queue.remove(own[1]) and not queue.remove(own[1])
    assert taken(queue) == [own[0], own[2], late] and len(queue) == 0


def test_a_wait_ends_with_an_entry_with_time_and_with_the_queue() -> None:
    queue, found = FairQueue(), list[FutureEntry | None]()
    started = monotonic()
    assert queue.next(0.05) is None and monotonic() - started >= 0.05
    threads = [Thread(target=lambda: found.append(queue.next(20))) for _ in range(2)]
    for thread in threads:
        thread.start()
    queue.put(own := numbered(1))
    while not found:
        pass
    queue.close()
    for thread in threads:
        thread.join(20)
    assert own in found and None in found and queue.next() is None
