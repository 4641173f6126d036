"""A rank or a link that is slower than others of its kind is named, once; a rank that waits is not."""

from collections.abc import Mapping
from dataclasses import replace

from engine.parallel.comm.flight.flight import rank_runs
from engine.watchdog.stragglers import Stragglers
from engine.watchdog.view import RankView, WaitView
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


Waits = dict[tuple[str, tuple[int, ...]], tuple[float, ...]]
"""Seconds a step that each rank of a group waits, by (stream, ranks)."""
FACTOR, STEPS = 2.0, 50
DP: Waits = {("dp", (0, 2)): (0.01, 0.01), ("dp", (1, 3)): (0.01, 0.01)}


def wait_view(stream: str, ranks: tuple[int, ...], step: int, seconds: float, receives: bool) -> WaitView:
    axis = "pp" if ">" in stream else stream
    runs = tuple(rank_runs(ranks))
    return WaitView(axis=axis, stream=stream, receives=receives, runs=runs, count=step, seconds=seconds)


def link_views(
    step: int, waits: Waits, computed: tuple[float, ...] = (0.1,) * 4, stages: int = 1
) -> dict[int, RankView]:
    """Four ranks on two hosts that wait so long in each of ``step`` steps; of a message the last rank receives."""
    found = {}
    for each, taken in enumerate(computed):
        streams = [
            wait_view(stream, ranks, step, step * spent, ">" in stream and member == ranks[-1])
            for (stream, ranks), seconds in waits.items()
            for member, spent in zip(ranks, seconds, strict=True)
            if member == each
        ]
        waited = sum(one.seconds for one in streams)
        found[each] = rank(
            each, step=step, stage=each * stages // 4, in_steps=step * taken + waited, waits={"dp": waited},
            streams=tuple(streams),
        )  # fmt: skip
    return found


def said(*later: dict[int, RankView]) -> list[str]:
    """What is said at each of these looks, after a first one in step 0."""
    slow = Stragglers(FACTOR, STEPS)
    nobody: dict[int, RankView] = {each: rank(each, step=0, in_steps=0.0, waits={}) for each in range(4)}
    return [sentence for seen in (nobody, *later) for sentence in slow.look(seen, 4)]


def test_a_link_that_is_slower_than_others_is_named_once() -> None:
    slow: Waits = {**DP, ("dp", (1, 3)): (0.09, 0.05)}
    (sentence,) = said(link_views(100, slow), link_views(200, slow))
    assert sentence == (
        "the link between node0 and node1 is slow: dp over ranks 1, 3 ('dp') waited 50 ms a step over the last 100 "
        "steps, where others of its kind took 10 ms, with all ranks in the call."
    )


def test_a_link_that_becomes_slow_is_named_where_there_is_no_other() -> None:
    world = ("world", (0, 1, 2, 3))
    fine: Waits = {world: (0.01,) * 4}
    slow: Waits = {world: (0.2, 0.2, 0.11, 0.3)}
    (sentence,) = said(link_views(100, fine), grown(link_views(100, fine), link_views(100, slow)))
    assert "world over ranks 0, 1, 2, 3 ('world') waited 110 ms a step" in sentence
    assert "where it took 10 ms before" in sentence


def test_a_link_is_not_compared_with_another_that_has_become_slow_too() -> None:
    slow: Waits = {("dp", (0, 2)): (0.9, 0.9), ("dp", (1, 3)): (0.2, 0.2)}
    (sentence,) = said(link_views(100, DP), grown(link_views(100, DP), link_views(100, slow)))
    assert "dp over ranks 0, 2 ('dp') waited 900 ms a step" in sentence
    assert "where it took 10 ms before" in sentence


def grown(before: Mapping[int, RankView], more: Mapping[int, RankView]) -> dict[int, RankView]:
    """The link_views after as many steps more, of another kind."""
    return {
        each: rank(
            each, step=view.step + more[each].step, stage=view.stage, in_steps=view.in_steps + more[each].in_steps,
            waits={"dp": view.waits["dp"] + more[each].waits["dp"]},
            streams=tuple(
                wait_view(one.stream, one.ranks, one.count + new.count, one.seconds + new.seconds, one.receives)
                for one, new in zip(view.streams, more[each].streams, strict=True)
            ),
        )
        for each, view in before.items()
    }  # fmt: skip


def test_all_links_of_one_host_are_one_sentence() -> None:
    world = ("world", (0, 1, 2, 3))
    fine: Waits = {**DP, world: (0.01,) * 4}
    slow: Waits = {("dp", (0, 2)): (0.07, 0.05), ("dp", (1, 3)): (0.09, 0.06), world: (0.05,) * 4}
    (sentence,) = said(link_views(100, fine), grown(link_views(100, fine), link_views(100, slow)))
    assert "world" not in sentence, "it goes over the same link"
    assert "dp over ranks 1, 3 ('dp') waited 60 ms" in sentence and "; 1 more of this axis is slow" in sentence


def test_a_rank_that_is_late_is_no_slow_link() -> None:
    late: Waits = {**DP, ("dp", (1, 3)): (0.5, 0.01)}
    sentences = said(link_views(100, late, (0.1, 0.1, 0.1, 0.6)))
    assert [sentence.partition(":")[0] for sentence in sentences] == ["rank 3 (node1, pid 103) is slow"]


def test_a_machine_that_is_slower_in_everything_is_no_slow_link() -> None:
    slow: Waits = {group: (0.05, 0.05) for group in DP}
    assert said(link_views(100, DP), grown(link_views(100, DP), link_views(100, slow, (0.4,) * 4))) == []


def test_a_receiver_waits_for_the_computation_of_its_sender_too() -> None:
    messages: Waits = {("forward 0>1", (0, 2)): (0.0, 0.1), ("forward 0>1", (1, 3)): (0.0, 0.1)}
    assert said(link_views(100, messages, stages=2)) == [], "a bubble is no slow link"
    late: Waits = {**messages, ("forward 0>1", (1, 3)): (0.0, 0.25)}
    (sentence,) = said(link_views(100, late, stages=2))
    assert "pp over ranks 1, 3 ('forward 0>1') waited 250 ms" in sentence
    assert said(link_views(100, late, (0.1, 0.25, 0.1, 0.1), stages=2)) == [
        "rank 1 (node0, pid 101) is slow: it computed 250 ms a step over the last 100 steps, where others of its stage "
        "took 100 ms, and waited 0 ms."
    ]


def test_what_costs_a_step_little_is_not_worth_a_word() -> None:
    assert said(link_views(100, {("dp", (0, 2)): (0.001,) * 2, ("dp", (1, 3)): (0.009,) * 2})) == []
