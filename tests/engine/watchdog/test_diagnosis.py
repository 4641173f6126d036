"""Who is blamed, from what all ranks do: each way in which a job stands still, and none in which it only is slow."""

from dataclasses import replace
from typing import Any

import pytest

from engine.parallel.comm.flight.layout import CALLS
from engine.watchdog.diagnosis import Blame, SilentHost, diagnose
from engine.watchdog.view import CallView, RankView

TIMEOUT = 5.0
ALL = (0, 1, 2, 3)


def call(count: int, label: str = "gradients", peers: tuple[int, ...] = ALL, seconds: float = 0.1) -> CallView:
    return CallView(
        text=f"{label} #{count}", stream="dp", count=count, likeness=f"{label}, 64 bytes", peers=peers, seconds=seconds
    )


def rank(number: int, count: int = 16, **changes: Any) -> RankView:
    """A rank in a step that has made ``count`` calls and waits for nobody."""
    view = RankView(
        rank=number, host=f"node{number // 2}", pid=100 + number, phase="STEP", stage=0, step=8, in_phase=1.0, idle=0.5,
        process="S", ended="", words="", waiting=None, action=None, last=call(count),
        recent=tuple(call(each) for each in range(count - 3, count + 1)), in_steps=8.0, waits={},
    )  # fmt: skip
    return replace(view, **changes)


def waiting(number: int, count: int = 17, seconds: float = 5.5, label: str = "gradients") -> RankView:
    """A rank that has begun its call ``count`` and waits in it."""
    mine = call(count, label, seconds=seconds)
    before = tuple(call(each) for each in range(count - 3, count))
    return rank(number, count, waiting=mine, recent=(*before, mine))


def blamed(*views: RankView, silent: tuple[SilentHost, ...] = ()) -> Blame | None:
    return diagnose({view.rank: view for view in views}, 4, TIMEOUT, silent)


def test_a_slow_rank_is_not_blamed() -> None:
    assert blamed(rank(0), *(waiting(each, seconds=4.9) for each in (1, 2, 3))) is None
    assert blamed(*(rank(each, in_phase=100.0, idle=100.0) for each in ALL)) is None, "all compute, nobody waits"
    assert blamed(*(rank(each, phase="USER", in_phase=900.0) for each in ALL)) is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"process": "T", "idle": 5.6}, "stopped", "has been stopped, by SIGSTOP or a debugger, for 5.6 s"),
        (
            {"idle": 5.7},
            "computing",
            "has computed for 5.7 s without reaching the call, in step 9, last finished gradients #16",
        ),
        ({"phase": "USER", "in_phase": 6.0}, "outside", "has run the user's code for 6.0 s without calling the engine"),
        ({"phase": "ENDED", "in_phase": 6.0}, "outside", "closed its engine 6.0 s ago"),
        ({"phase": "USER", "words": "ValueError: odd"}, "outside", ", after ValueError: odd; ranks 0, 1, 3 wait"),
    ],
)
def test_the_one_for_whom_all_wait(changes: dict[str, Any], kind: str, words: str) -> None:
    found = blamed(rank(2, **changes), *(waiting(each) for each in (0, 1, 3)))
    assert found is not None and (found.ranks, found.kind) == ((2,), kind)
    assert found.sentence.startswith("rank 2 (node1, pid 102)") and words in found.sentence
    assert "ranks 0, 1, 3 wait, rank 0 for 5.5 s in gradients #17" in found.sentence


def test_a_stopped_rank_that_had_come_is_blamed() -> None:
    found = blamed(replace(waiting(1), process="T"), *(waiting(each) for each in (0, 2, 3)))
    assert found is not None and (found.ranks, found.kind) == ((1,), "stopped")


def test_blame_goes_over_ranks_that_wait_themselves() -> None:
    # 0 waits for 1 over one channel, 1 waits for 3 over another, 3 computes
    one = call(4, peers=(0, 1), seconds=6.0)
    other = CallView(text="b", stream="pp", count=9, likeness="b", peers=(1, 3), seconds=6.0)
    last = CallView(text="b", stream="pp", count=8, likeness="b", peers=(1, 3), seconds=6.0)
    found = blamed(
        rank(0, waiting=one, recent=(call(3), one)), rank(1, waiting=other, recent=(call(3), other)),
        rank(2), rank(3, recent=(last,), idle=6.5),
    )  # fmt: skip
    assert found is not None and (found.ranks, found.kind) == ((3,), "computing")


def test_the_odd_call_of_a_stream_is_named() -> None:
    found = blamed(waiting(3, label="norms"), *(waiting(each) for each in (0, 1, 2)))
    assert found is not None and (found.ranks, found.kind) == ((3,), "different")
    assert "is in norms #17, while ranks 0, 1, 2 are in gradients #17" in found.sentence


def calling(view: RankView, *names: str) -> RankView:
    """The rank with the newest of its calls of the engine."""
    made = (
        CallView(text=name, stream=CALLS, count=40 + each, likeness=name, peers=ALL, seconds=6.0)
        for each, name in enumerate(names)
    )
    return replace(view, recent=(*view.recent, *made))


@pytest.mark.parametrize(("phase", "doing"), [("USER", "has run the user's code"), ("ENDED", "closed its engine")])
def test_a_call_that_one_rank_makes_alone_is_named_before_what_the_others_do(phase: str, doing: str) -> None:
    lone = CallView(text="predict", stream=CALLS, count=40, likeness="predict", peers=ALL, seconds=5.5)
    outside = [rank(each, phase=phase, in_phase=6.0) for each in (1, 2, 3)]
    found = blamed(rank(0, waiting=lone, recent=(lone,)), *outside)
    assert found is not None and (found.ranks, found.kind) == ((1, 2, 3), "outside")
    assert found.sentence.startswith(
        "predict was called on rank 0 and for 5.5 s not on ranks 1, 2, 3: every rank must call"
    )
    assert "move it out of `if rank == 0:`; rank 1 (node" in found.sentence and doing in found.sentence


def test_who_makes_another_call_of_the_engine_is_named() -> None:
    """Also where its collectives are those of the others, so that no stream of them differs."""
    same, other = ("train_batch", "train_batch"), ("train_batch", "eval_batch")
    ring = waiting(3, count=16)  # in #16, for which all others have come and gone: who waits for whom tells nothing
    found = blamed(*(calling(waiting(each), *same) for each in (0, 1, 2)), calling(ring, *other))
    assert found is None or found.ranks == (3,)
    apart = CallView(text="control", stream="world", count=9, likeness="control", peers=ALL, seconds=6.0)
    ring = replace(waiting(3, count=16), waiting=apart, recent=(*waiting(3, count=16).recent, apart))
    found = blamed(*(calling(waiting(each), *same) for each in (0, 1, 2)), calling(ring, *other))
    assert found is not None and (found.ranks, found.kind) == ((3,), "different")
    assert "is in eval_batch, while ranks 0, 1, 2 are in train_batch: all ranks must call the engine" in found.sentence
    assert found.sentence.endswith("so move its calls out of `if rank == 0:`.")
    found = blamed(*(calling(waiting(each), *other) for each in (0, 1, 2)), calling(ring, *same))
    assert found is not None and "is in train_batch, while ranks 0, 1, 2 are in eval_batch" in found.sentence
    found = blamed(*(calling(waiting(each), *same) for each in (0, 1, 2)), calling(rank(3, phase="USER"), *other))
    assert found is not None and (found.ranks, found.kind) == ((3,), "outside"), "it has left that call"


def test_the_first_that_ended_and_not_those_that_it_took_down() -> None:
    dead = rank(1, process="", ended="signal 9 (SIGKILL)", idle=0.4)
    words = "EngineError: all_reduce failed. A peer has probably stopped; look for the first traceback"
    found = blamed(dead, rank(0, process="Z", words=words, idle=0.9), waiting(2, seconds=0.3), waiting(3, seconds=0.3))
    assert found is not None and (found.ranks, found.kind, found.certain) == ((1,), "ended", True)
    assert "has ended: signal 9 (SIGKILL), in step 9, last finished gradients #16." in found.sentence


def test_a_rank_that_blames_another_one_is_not_certain() -> None:
    words = "EngineError: rank 1 (a) failed in this step; see the error of the rank that failed: ValueError: odd"
    first = blamed(rank(0, process="", words=words), *(rank(each) for each in (1, 2, 3)))
    assert first is not None and not first.certain
    found = blamed(rank(0, process="", words=words), rank(1, words="ValueError: odd."), rank(2), rank(3))
    assert found is not None and (found.ranks, found.certain) == ((1,), True)
    assert "has ended: ValueError: odd, in step 9" in found.sentence


def test_an_orderly_end_is_no_fault() -> None:
    over = rank(1, process="", ended="exit status 0", phase="USER")
    assert blamed(over, rank(0), rank(2), rank(3)) is None
    assert blamed(replace(over, phase="ENDED"), rank(0), rank(2), rank(3)) is None
    found = blamed(over, *(waiting(each) for each in (0, 2, 3)))
    assert found is not None and found.ranks == (1,), "but others may not wait for it"


def test_a_host_that_is_gone() -> None:
    gone = SilentHost(host="node1", ranks=(2, 3), seconds=5.0)
    found = blamed(waiting(0), waiting(1), rank(2), rank(3), silent=(gone,))
    assert found is not None and (found.ranks, found.kind) == ((2, 3), "host")
    assert found.sentence.startswith("node1 with ranks 2, 3 of 4 has not answered for 5.0 s")
    assert blamed(*(rank(each) for each in ALL), silent=(gone,)) is None, "nobody waits, so nobody is ended for it"


def test_a_network_that_carries_nothing() -> None:
    found = blamed(*(waiting(each) for each in ALL))
    assert found is not None and found.kind == "link"
    assert "have all reached gradients #17" in found.sentence and "between node0, node1" in found.sentence


def test_ranks_that_nobody_has_heard_of() -> None:
    found = blamed(waiting(0), waiting(1))
    assert found is not None and (found.ranks, found.kind) == ((2, 3), "host")
    assert found.sentence.startswith("ranks 2, 3 of 4 have never answered the watchdog: their hosts are down, or")
    assert "; ranks 0, 1 wait, rank 0 for 5.5 s in" in found.sentence
    one = blamed(waiting(0), waiting(1), waiting(2))
    assert one and one.sentence.startswith("rank 3 of 4 has never answered the watchdog: its host is down, or")
