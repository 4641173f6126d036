"""Which schedule is chosen for which costs, and what is held meanwhile."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ScheduleError
from engine.parallel.pipeline.partition.auto_schedule import (
    PLAIN_FIRST,
    Machine,
    MicrobatchCost,
    ScheduleDecision,
    choose,
    peak_bytes,
)
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.schedule_file import parse_schedule
from engine.parallel.pipeline.schedule.simulate import Cost, StageTimes, peak_live, simulate

Cuts = dict[int, Sequence[MicrobatchCost] | str]
EVEN = MicrobatchCost(1.0, 1.0, 1.0, 1000, 1000)
MEMORY = 10**9


def even(ranks: int, *virtual: int, **changes: Any) -> Cuts:
    """Equal stages; the whole model costs the same into however many it is cut."""
    whole = replace(EVEN, **changes)
    f, i, w = whole.forward_seconds, whole.input_seconds, whole.weight_seconds
    return {
        v: [MicrobatchCost(f / v, i / v, w / v, whole.kept_bytes // v, whole.kept_bytes // v)] * (ranks * v)
        for v in virtual or (1,)
    }


def taken(decision: ScheduleDecision) -> tuple[str, int]:
    return decision.chosen.kind, decision.chosen.virtual_stages


def test_every_kind_is_tried() -> None:
    assert set(PLAIN_FIRST) == set(SCHEDULE_KINDS)
    decision = choose(even(4, 1, 2), Machine(4, 8, limit_bytes=MEMORY))
    names = {tried.name for tried in decision.ranking}
    assert names == {
        "1f1b", "gpipe", "zb-h1", "interleaved x 2", "looped-bfs x 2", "zb-h1 x 2", "zb-v x 2", "dualpipe-v x 2",
    }  # fmt: skip


def test_one_rank_is_a_plain_loop() -> None:
    decision = choose(even(1), Machine(1, 8))
    assert taken(decision) == ("1f1b", 1)
    assert decision.schedule.text().startswith("0F0 0B0 0F1 0B1") and decision.chosen.bubble == 0


def test_a_large_part_for_weights_fills_the_idle_time() -> None:
    decision = choose(even(4, weight_seconds=3.0), Machine(4, 16))
    assert taken(decision) == ("zb-h1", 1)
    plain = next(tried for tried in decision.ranking if tried.kind == "1f1b")
    assert decision.chosen.seconds < plain.seconds and decision.chosen.bubble < plain.bubble


def test_without_a_part_for_weights_nothing_is_split() -> None:
    assert taken(choose(even(4, weight_seconds=0.0), Machine(4, 16))) == ("1f1b", 1)


def test_several_stages_a_rank_where_memory_allows() -> None:
    loops = ("1f1b", "interleaved")
    assert taken(choose(even(4, 1, 2), Machine(4, 8, limit_bytes=MEMORY), loops)) == ("interleaved", 2)
    assert taken(choose(even(4, 1, 2, 4), Machine(4, 8, limit_bytes=MEMORY), loops)) == ("interleaved", 4)
    decision = choose(even(4, 1, 2), Machine(4, 8), loops)  # holds more than 1f1b
    assert taken(decision) == ("1f1b", 1) and decision.ranking[1].refused == "more than the limit"


def test_slow_links_make_many_stages_dear() -> None:
    machine = Machine(4, 8, transfer_seconds=2.0, limit_bytes=MEMORY)
    assert taken(choose(even(4, 1, 4), machine, ("1f1b", "interleaved"))) == ("1f1b", 1)


def test_a_gain_of_a_hundredth_is_no_reason() -> None:
    cuts = even(2, 1, 2)
    near = choose(cuts, Machine(2, 400, limit_bytes=MEMORY))
    assert taken(near) == ("1f1b", 1) and near.chosen.seconds > min(tried.seconds for tried in near.ranking)
    assert taken(choose(cuts, Machine(2, 8, limit_bytes=MEMORY))) != ("1f1b", 1)


def test_a_tight_limit_leaves_1f1b() -> None:
    # a large last stage is held once by 1f1b, by others as often as the others
    stages = [EVEN, EVEN, EVEN, replace(EVEN, kept_bytes=3000, left_bytes=3000)]
    tight = choose({1: stages}, Machine(4, 16, limit_bytes=4000))
    assert taken(tight) == ("1f1b", 1)
    assert {tried.kind for tried in tight.ranking if tried.refused} == {"gpipe", "zb-h1"}
    assert taken(choose({1: stages}, Machine(4, 16, limit_bytes=12_000))) == ("zb-h1", 1)
    assert taken(choose({1: stages}, Machine(4, 16))) == ("1f1b", 1)


def test_without_a_limit_a_tenth_more_than_1f1b_is_allowed() -> None:
    for last, kind in ((1100, "zb-h1"), (1200, "1f1b")):
        decision = choose({1: [EVEN, EVEN, replace(EVEN, kept_bytes=last, left_bytes=last)]}, Machine(3, 16))
        assert decision.limit_bytes == 3300 and decision.chosen.kind == kind


def test_the_usual_memory_of_a_cut_into_more_stages() -> None:
    assert choose(even(4, 2), Machine(4, 8)).limit_bytes == choose(even(4, 1), Machine(4, 8)).limit_bytes == 4400


def test_what_cannot_be_cut_is_named() -> None:
    cuts = even(4, 1) | {2: "the model does not cut into 8 stages"}
    decision = choose(cuts, Machine(4, 16, limit_bytes=MEMORY))
    assert decision.chosen.virtual_stages == 1
    assert {t.refused for t in decision.ranking if t.virtual_stages == 2} == {"the model does not cut into 8 stages"}


def test_too_few_microbatches_are_named() -> None:
    decision = choose(even(4, 2), Machine(4, 2, limit_bytes=MEMORY))
    assert [tried.kind for tried in decision.ranking if tried.refused == "needs 8 microbatches"] == ["dualpipe-v"]


def test_nothing_fits() -> None:
    with pytest.raises(ScheduleError) as error:
        choose(even(4, 1, 2), Machine(4, 8, limit_bytes=3999))
    assert re.search(r"at most 3,999 bytes .* holds least, 4,000; raise", str(error.value))


def test_no_kind_has_these_stages() -> None:
    with pytest.raises(ScheduleError, match="no schedule for"):
        choose(even(4, 3), Machine(4, 8), ("1f1b", "zb-v"))


def test_times_are_of_the_stages() -> None:
    slow = [EVEN, replace(EVEN, forward_seconds=5.0), EVEN]
    decision = choose({1: slow}, Machine(3, 4), ("1f1b",))
    times = tuple(StageTimes(s.forward_seconds, s.input_seconds, s.weight_seconds) for s in slow)
    assert decision.chosen.seconds == simulate(make_schedule("1f1b", 3, 4), Cost(times=times)).makespan
    assert decision.chosen.seconds > 4 * 7


def test_the_ranking_in_words() -> None:
    cuts = even(4, 1, kept_bytes=1 << 20, left_bytes=1 << 20) | {2: "the model does not cut into 8 stages"}
    lines = choose(cuts, Machine(4, 16)).lines()
    assert lines[0] == "auto: zb-h1, best of 2 within 4.4 MiB of activations"
    assert lines[1] == "zb-h1: 1.00 x the time, 6% idle, 4.0 MiB" and lines[2].startswith("1f1b: 1.1")
    assert lines[3] == "more than the limit: gpipe 16.0 MiB"
    assert lines[4].startswith("the model does not cut into 8 stages: interleaved x 2, looped-bfs x 2")


# ---- what is held


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PLAIN_FIRST), st.integers(1, 5), st.integers(1, 3))
def test_equal_stages_are_held_as_often_as_activations_live(kind: str, ranks: int, virtual: int) -> None:
    virtual = max(SCHEDULE_KINDS[kind].fewest, min(virtual, SCHEDULE_KINDS[kind].most or virtual))
    schedule = make_schedule(kind, ranks, 2 * ranks + 1, virtual)
    stages = [MicrobatchCost(1, 1, 1, 7, 7)] * schedule.stages
    assert peak_bytes(schedule, stages) == tuple(7 * live for live in peak_live(schedule))


def test_what_waits_for_its_part_for_weights_is_held() -> None:
    schedule = parse_schedule("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2", "own")
    for left, peak in ((1000, 3000), (400, 2400), (0, 2000), (2500, 4500)):
        assert peak_bytes(schedule, [replace(EVEN, left_bytes=left)]) == (peak,)
    two = parse_schedule("0F0 1F0 1B0 0B0", "own")
    assert peak_bytes(two, [EVEN, replace(EVEN, kept_bytes=500)]) == (1500,)
