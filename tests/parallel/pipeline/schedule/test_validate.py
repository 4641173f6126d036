"""The checker against a player that knows no theory, and the formulas of gpipe and 1f1b.

The player keeps one stage on each rank and moves messages one by one, as blocking or as asynchronous sends;
it shares nothing with the checker but the tokens.
"""

import re
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import chain, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import forward_only, gpipe, one_f_one_b
from engine.parallel.pipeline.schedule.schedule_file import parse_schedule
from engine.parallel.pipeline.schedule.simulate import Cost, StageTimes, peak_live, releases, simulate
from engine.parallel.pipeline.schedule.validate import check
from tests.selection import wide

Rows = list[list[str]]
TWO_KINDS = st.sampled_from(["gpipe", "1f1b"])
STAGES = st.integers(1, 8)
MICROBATCHES = st.integers(1, 24)

INTERLEAVED = """
0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""
ZERO_BUBBLE = """
0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
"""


# ---- the player ------------------------------------------------------------------------------------------


def split(token: str) -> tuple[int, str, int]:
    stage, op, microbatch = re.fullmatch(r"(\d+)([FB])(\d+)", token).groups()  # type: ignore[union-attr]
    return int(stage), op, int(microbatch)


def arrives(token: str, stages: int) -> str | None:
    """The action of another rank that ``token`` has to hear from."""
    stage, op, microbatch = split(token)
    source = stage - 1 if op == "F" else stage + 1
    return f"{source}{op}{microbatch}" if 0 <= source < stages else None


def leaves(token: str, stages: int) -> bool:
    stage, op, _ = split(token)
    return 0 <= (stage + 1 if op == "F" else stage - 1) < stages


def play(rows: Rows, blocking: bool) -> list[int]:
    """How many actions every rank gets done."""
    stages, done = len(rows), [0] * len(rows)
    leaving: list[set[str]] = [set() for _ in rows]
    inbox: set[str] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if done[rank] == len(row):
                continue
            token = row[done[rank]]
            awaited = arrives(token, stages)
            # a message is handed over while its sender offers it and its receiver stands before its use
            for sender in leaving:
                if awaited in sender:
                    sender.remove(awaited)
                    inbox.add(awaited)
                    moved = True
            held_up = (blocking and leaving[rank]) or (awaited is not None and awaited not in inbox)
            forward = token.replace("B", "F")
            if held_up or ("B" in token and forward not in row[: done[rank]]):
                continue
            done[rank] += 1
            leaving[rank] |= {token} if leaves(token, stages) else set()
            moved = True
    return done


def complete(rows: Rows, microbatches: int) -> bool:
    return all(
        Counter(row) == Counter(f"{stage}{op}{i}" for op in "FB" for i in range(microbatches))
        for stage, row in enumerate(rows)
    )


def finishes(rows: Rows, blocking: bool) -> bool:
    return play(rows, blocking) == [len(row) for row in rows]


def tokens(schedule: Schedule) -> Rows:
    return [[str(action) for action in row] for row in schedule.per_rank]


def reordered(schedule: Schedule, rows: Rows) -> Schedule:
    return replace(schedule, per_rank=tuple(tuple(Action.parse(token) for token in row) for row in rows))


def refusal(schedule: Schedule, receives_ahead: int | None = 0) -> str:
    with pytest.raises(ScheduleError) as error:
        check(schedule, receives_ahead)
    return str(error.value)


def judge(schedule: Schedule, rows: Rows) -> None:
    """The checker must say what the player finds, and its words must be true."""
    broken = reordered(schedule, rows)
    if not complete(rows, schedule.microbatches):
        text = refusal(broken)
        assert "is not complete" in text
        wanted, found = (Counter(chain.from_iterable(some)) for some in (tokens(schedule), rows))
        strays = {token for rank, row in enumerate(rows) for token in row if split(token)[0] != rank}
        for token in strays | (wanted - found).keys() | (found - wanted).keys():
            assert re.search(rf"\b{token}\b", text), f"{token} is not named in {text}"
    elif all(finishes(rows, blocking) for blocking in (False, True)):
        check(broken, receives_ahead=0)
        assert simulate(broken).makespan > 0
        for sender, receiver in permutations(range(len(rows)), 2):
            assert sent(broken, sender, receiver) == received(broken, sender, receiver)
    else:
        text = refusal(broken)
        blocking = finishes(rows, blocking=False)
        assert ("is stuck when sends block: " if blocking else "is stuck: ") in text
        done = play(rows, blocking)
        stuck = re.findall(r"rank (\d+) (?:at|before) (\w+) waits (?:for|until rank \d+ receives) (\w+)", text)
        assert stuck and len(stuck) == text.count(";") + 1
        for rank, token, blocker in stuck:
            assert rows[int(rank)].index(token) == done[int(rank)], f"rank {rank} is not stuck at {token}"
            home = int(split(blocker)[0])
            passed = rows[home].index(blocker) < done[home]
            assert passed is (f"{token} waits until" in text), f"{blocker} is no reason"


def sent(schedule: Schedule, sender: int, receiver: int) -> list[tuple[Action, Action]]:
    pairs = [(action, schedule.sends(action)) for action in schedule.per_rank[sender]]
    return [(action, to) for action, to in pairs if to is not None and to.stage == receiver]


def received(schedule: Schedule, sender: int, receiver: int) -> list[tuple[Action, Action]]:
    pairs = [(schedule.receives(action), action) for action in schedule.per_rank[receiver]]
    return [(source, action) for source, action in pairs if source is not None and source.stage == sender]


# ---- every order, right and wrong ------------------------------------------------------------------------


@settings(deadline=None)
@given(TWO_KINDS, STAGES, MICROBATCHES)
def test_what_is_generated_passes(kind: str, stages: int, microbatches: int) -> None:
    check(make_schedule(kind, stages, microbatches), receives_ahead=0)
    check(forward_only(stages, microbatches), receives_ahead=0)


@settings(max_examples=300, deadline=None)
@given(st.data(), TWO_KINDS, st.integers(1, 5), st.integers(1, 8))
def test_a_changed_order_is_judged_as_the_player_does(
    data: st.DataObject, kind: str, stages: int, microbatches: int
) -> None:
    schedule = make_schedule(kind, stages, microbatches)
    rows = tokens(schedule)
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        change = data.draw(st.sampled_from(["swap", "swap near", "move", "drop", "double", "other rank"]))
        row = data.draw(st.sampled_from([row for row in rows if row] or rows))
        if not row:
            continue
        here = data.draw(st.integers(0, len(row) - 1))
        there = data.draw(st.integers(0, len(row) - 1))
        if change == "swap":
            row[here], row[there] = row[there], row[here]
        elif change == "swap near":
            row[here - 1], row[here] = row[here], row[here - 1]
        elif change == "move":
            row.insert(there, row.pop(here))
        elif change == "drop":
            row.pop(here)
        elif change == "double":
            row.insert(there, row[here])
        else:
            data.draw(st.sampled_from(rows)).append(row.pop(here))
    judge(schedule, rows)


def test_every_order_of_two_stages_and_two_microbatches() -> None:
    schedule = gpipe(2, 2)
    first, second = tokens(schedule)
    verdicts: Counter[str] = Counter()
    for rows in product(map(list, permutations(first)), map(list, permutations(second))):
        judge(schedule, list(rows))
        verdicts[f"{finishes(list(rows), False)} {finishes(list(rows), True)}"] += 1
    assert sum(verdicts.values()) == 576 and len(verdicts) == 3  # all three verdicts were met


@pytest.mark.parametrize(("text", "sentence"), [
    ("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1",
     "schedule mine is stuck: rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0. "
     "Reorder one of these rows."),
    ("0F0 0F1 0B0 0B1\n1F0 1B0 1B1 1F1",
     "schedule mine is stuck: rank 1 at 1B1 waits for 1F1 later in the same row. Reorder this row."),
    ("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1",
     "schedule mine is stuck when sends block: rank 0 before 0F1 waits until rank 1 receives 0F0 for 1F0; "
     "rank 1 at 1F1 waits for 0F1 of rank 0. Reorder one of these rows."),
    ("0F0 0F1 0B0 0B0\n1F0 1F1 1F7 1B0",
     "schedule mine of 2 stages and 3 microbatches is not complete: missing: 0B1, 0B2, 1B1, 1B2, 0F2, 1F2; "
     "more than once: 0B0; not part of it: 1F7. "
     "Each stage does F and B (or I and W) of every microbatch once, on its own rank."),
    ("0F0 0I0", "schedule mine of 1 stages and 1 microbatches is not complete: missing: 0W0. "
     "Each stage does F and B (or I and W) of every microbatch once, on its own rank."),
    ("0F0 0B0 0W0", "schedule mine of 1 stages and 1 microbatches is not complete: not part of it: 0W0. "
     "Each stage does F and B (or I and W) of every microbatch once, on its own rank."),
])  # fmt: skip
def test_the_words_of_a_refusal(text: str, sentence: str) -> None:
    assert refusal(parse_schedule(text, "mine")) == sentence


@pytest.mark.parametrize(("text", "pair"), [
    ("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1", ("1F1", "0F0")),
    ("0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0", ("1B1", "0B0")),
    ("0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1F1 1I1 1B0 1W1", ("1I1", "0I0")),
    # what goes from stage 0 past its neighbour, on the same rank, to stage 2
    ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1\n2F1 2F0 2B0 2B1", ("2F1", "0F0")),
])  # fmt: skip
def test_messages_are_taken_in_the_order_in_which_they_are_sent(text: str, pair: tuple[str, str]) -> None:
    assert refusal(parse_schedule(text, "mine"), receives_ahead=None) == (
        f"schedule mine has {pair[0]} where stage 0 has {pair[1]}: messages between two stages are received in the "
        "order of the sends; list microbatches in the same order on all stages."
    )


def test_weight_gradients_and_stages_of_one_rank_may_go_in_any_order() -> None:
    check(parse_schedule("0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1F1 1I0 1I1 1W1 1W0", "weights"))
    check(parse_schedule("0F0 0F1 1F1 1F0 1B0 1B1 0B1 0B0", "one rank"))


def test_an_action_on_the_wrong_rank() -> None:
    rows = [["0F0", "1B0"], ["1F0", "0B0"]]
    assert refusal(reordered(gpipe(2, 1), rows)) == (
        "schedule gpipe of 2 stages and 1 microbatches is not complete: on the wrong rank: 1B0 (on 0, not 1), "
        "0B0 (on 1, not 0). Each stage does F and B (or I and W) of every microbatch once, on its own rank."
    )  # fmt: skip


def test_a_long_list_is_cut_and_a_backward_has_no_place_in_evaluation() -> None:
    empty = replace(gpipe(1, 9), per_rank=((Action.parse("0F0"),),))
    assert "missing: 0B0, 0B1, 0B2, 0B3, 0B4, 0B5 and 11 more." in refusal(empty)
    assert refusal(replace(gpipe(1, 1), training=False)) == (
        "schedule gpipe of 1 stages and 1 microbatches is not complete: not part of it: 0B0. "
        "Each stage does F and nothing else of every microbatch once, on its own rank."
    )  # fmt: skip


def test_a_broken_schedule_is_not_simulated() -> None:
    for text in ("0F0 0B0 0F1", "0B0 0F0"):
        with pytest.raises(ScheduleError):
            simulate(parse_schedule(text, "broken"))


# ---- virtual stages and split backwards fit the same data ----------------------------------------------------


def test_interleaved_stages_need_receives_an_action_ahead_where_sends_block() -> None:
    schedule = parse_schedule(INTERLEAVED, "interleaved")
    check(schedule)
    check(schedule, receives_ahead=1)
    assert schedule.stages_of_rank == ((0, 2), (1, 3))
    assert "is stuck when sends block" in refusal(schedule)


def test_split_backwards() -> None:
    schedule = parse_schedule(ZERO_BUBBLE, "zb")
    check(schedule)
    assert peak_live(schedule) == (3, 3, 3)
    timeline = simulate(schedule)
    assert timeline.bubble < simulate(one_f_one_b(3, 4)).bubble


# ---- time and memory ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(TWO_KINDS, STAGES, MICROBATCHES, st.integers(1, 5), st.integers(1, 5))
def test_bubble_is_the_formula_exactly(kind: str, p: int, m: int, forward: int, backward: int) -> None:
    timeline = simulate(make_schedule(kind, p, m), Cost(forward=forward, backward=backward))
    assert timeline.makespan == (m + p - 1) * (forward + backward)
    assert Fraction(timeline.idle) / Fraction(timeline.makespan * p) == Fraction(p - 1, m + p - 1)
    assert timeline.bubble == (p - 1) / (m + p - 1)


@settings(deadline=None)
@given(STAGES, MICROBATCHES)
def test_activations_held(p: int, m: int) -> None:
    assert peak_live(one_f_one_b(p, m)) == tuple(min(m, p - rank) for rank in range(p))
    assert peak_live(gpipe(p, m)) == (m,) * p
    assert peak_live(forward_only(p, m)) == (1,) * p


@settings(deadline=None)
@given(TWO_KINDS, STAGES, MICROBATCHES, st.integers(0, 3))
def test_spans_keep_rows_and_needs(kind: str, p: int, m: int, transfer: int) -> None:
    schedule = make_schedule(kind, p, m)
    timeline = simulate(schedule, Cost(transfer=transfer))
    ends = {span.action: span.end for row in timeline.spans for span in row}
    for rank, row in enumerate(timeline.spans):
        assert tuple(span.action for span in row) == schedule.per_rank[rank]
        free: float = 0
        for span in row:
            arrivals = [
                ends[need] + transfer * (need.stage != span.action.stage) for need in schedule.needs(span.action)
            ]
            assert span.start == max([free, *arrivals])  # neither early nor late
            free = span.end


def test_costs_by_stage_and_transfer() -> None:
    timeline = simulate(gpipe(2, 1), Cost(forward=1, backward=2, transfer=5, stages=(1, 10)))
    assert [[tuple(span)[1:] for span in row] for row in timeline.spans] == [[(0, 1), (41, 43)], [(6, 16), (16, 36)]]
    assert (timeline.makespan, timeline.idle) == (43, 2 * 43 - 3 - 30)
    sentence = "cost.stages has 1 factors for the 2 stages of schedule gpipe; pass one for each stage, or an empty"
    with pytest.raises(ScheduleError, match=rf"^{sentence} cost\.stages\.$"):
        simulate(gpipe(2, 1), Cost(stages=(1,)))


def test_times_of_each_part_of_each_stage() -> None:
    whole = simulate(gpipe(2, 1), Cost(transfer=5, times=(StageTimes(1, 2, 4), StageTimes(10, 20, 40))))
    assert [[tuple(span)[1:] for span in row] for row in whole.spans] == [[(0, 1), (81, 87)], [(6, 16), (16, 76)]]
    split = simulate(parse_schedule("0F0 0I0 0W0", "split"), Cost(times=(StageTimes(1, 2, 4),)))
    assert [tuple(span)[1:] for span in split.spans[0]] == [(0, 1), (1, 3), (3, 7)]
    with pytest.raises(ScheduleError, match=r"^cost.times has 1 entries for the 2 stages of schedule gpipe"):
        simulate(gpipe(2, 1), Cost(times=(StageTimes(1, 1, 1),)))


def seconds_of(kind: str, ranks: int, microbatches: int, virtual_stages: int) -> float:
    """Processor time to make, check and lay out in time, and to find the releases."""
    start = time.process_time()
    schedule = make_schedule(kind, ranks, microbatches, virtual_stages)
    check(schedule)
    assert simulate(schedule).bubble < 0.06
    releases(schedule)
    return time.process_time() - start


@pytest.mark.parametrize("kind", [kind if kind == "1f1b" else wide(kind) for kind in SCHEDULE_KINDS])
def test_a_large_schedule_is_checked_and_simulated(kind: str) -> None:
    # 0.4 to 1.1 seconds are usual
    assert seconds_of(kind, 16, 1024, SCHEDULE_KINDS[kind].virtual_stages) < 10


@pytest.mark.long
@pytest.mark.parametrize("kind", list(SCHEDULE_KINDS))
def test_the_largest_schedules(kind: str) -> None:
    # 786,432 actions of zb-h1 take about 8 seconds
    assert (
        seconds_of(kind, 64, 1024, 4 if SCHEDULE_KINDS[kind].most is None else SCHEDULE_KINDS[kind].virtual_stages) < 30
    )
