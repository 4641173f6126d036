"""A rank that computes longer than others that do the same work is named, once; one that waits is not."""

from dataclasses import replace

from engine.watchdog.stragglers import Stragglers
from engine.watchdog.view import RankView
from tests.engine.watchdog.test_diagnosis import rank

SIZE = 4


def views(step: int, computed: tuple[float, ...], waited: float = 0.3, stages: int = 1) -> dict[int, RankView]:
    """Ranks that have made ``step`` steps of these seconds of computation each."""
    made = [
        rank(
            each, step=step, in_steps=step * (taken + waited), waits={"dp": step * waited}, stage=each * stages // SIZE
        )
        for each, taken in enumerate(computed)
    ]
    return {view.rank: view for view in made}


def test_the_slow_one_is_named_once() -> None:
    slow = Stragglers(2.0, 50)
    assert slow.look(views(10, (0.1, 0.1, 0.1, 0.1)), SIZE) == []
    assert slow.look(views(59, (0.1, 0.1, 0.31, 0.1)), SIZE) == [], "not yet 50 steps"
    (sentence,) = slow.look(views(60, (0.1, 0.1, 0.31, 0.1)), SIZE)
    assert sentence.startswith("rank 2 (node1, pid 102) is slow: it computed 3")
    assert "ms a step over the last 50 steps, where others of its stage took 100 ms, and waited 300 ms." in sentence
    assert slow.look(views(200, (0.1, 0.1, 0.31, 0.1)), SIZE) == []


def test_time_of_waiting_does_not_count() -> None:
    slow = Stragglers(2.0, 50)
    slow.look(views(1, (0.1,) * SIZE), SIZE)
    late = views(100, (0.1,) * SIZE)
    late[3] = replace(late[3], in_steps=late[3].in_steps + 900.0, waits={"dp": late[3].waits["dp"] + 900.0})
    assert slow.look(late, SIZE) == []


def test_less_than_a_millisecond_is_not_worth_a_name() -> None:
    slow = Stragglers(2.0, 50)
    slow.look(views(1, (0.0, 0.0, 0.0, 0.0)), SIZE)
    assert slow.look(views(100, (0.0, 0.0, 0.0009, 0.0)), SIZE) == []
    assert len(slow.look(views(200, (0.0, 0.0, 0.0109, 0.0)), SIZE)) == 1, "others took no time that a clock shows"


def test_stages_are_not_compared_with_each_other() -> None:
    slow = Stragglers(2.0, 50)
    slow.look(views(1, (0.1, 0.1, 0.9, 0.9), stages=2), SIZE)
    assert slow.look(views(100, (0.1, 0.1, 0.9, 0.9), stages=2), SIZE) == []
    assert len(slow.look(views(200, (0.1, 0.1, 0.9, 5.0), stages=2), SIZE)) == 1
    alone = Stragglers(2.0, 50)
    alone.look(views(1, (0.1, 0.2, 0.4, 0.9), stages=4), SIZE)
    assert alone.look(views(100, (0.1, 0.2, 0.4, 0.9), stages=4), SIZE) == [], "nobody does the same work"


def test_ranks_that_are_not_heard_of_are_waited_for() -> None:
    slow = Stragglers(2.0, 50)
    few = views(10, (0.1,) * SIZE)
    del few[1]
    assert slow.look(few, SIZE) == [] and not slow._began
