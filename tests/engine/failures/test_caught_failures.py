"""A step whose error the user catches: training goes on as if it had not been, or the engine is over on all ranks."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.parallel.comm import failed_calls, rendezvous
from engine.parallel.comm.failed_calls import FailedCalls
from tests import models
from tests.engine.every_grid import every_grid
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import ROWS, data, in_one_process, settings

RunRanks = Callable[..., list[Any]]
PLACES = ("forward", "loss", "backward")


class Raises(torch.autograd.Function):
    """Passes its input on; its backward raises what ``failing`` does."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, failing: "Failing") -> Tensor:
        ctx.failing = failing
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.failing.at("backward")
        return grad, None


@dataclass
class Failing:
    """Raises at the second microbatch that comes to ``place``."""

    place: str = ""
    kind: type[BaseException] = ValueError
    seen: dict[str, int] = field(default_factory=dict)

    def at(self, place: str) -> None:
        self.seen[place] = self.seen.get(place, 0) + 1
        if place == self.place and self.seen[place] == 2:
            raise self.kind("the user's own mistake")

    def arm(self, place: str, kind: type[BaseException] = ValueError) -> None:
        self.place, self.kind, self.seen = place, kind, {}


def in_loop(eng: engine.Engine, rows: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A step of a loop of one's own; an error drops the gradients of the step."""
    if eng.config.pp > 1:
        eng.open_pipeline()
    try:
        for microbatch in rows.chunk(2):
            eng.backward(loss(eng(microbatch), microbatch))
            eng.step()
    except ValueError:
        eng.zero_grad()
        raise


Case = tuple[str, str, type[BaseException], str]
CASES: list[Case] = [
    *(("train_batch", place, ValueError, who) for place in PLACES for who in ("all", "one")),
    ("train_batch", "forward", KeyboardInterrupt, "all"),
    ("train_batch", "backward", KeyboardInterrupt, "one"),
    *(("loop", place, ValueError, "all") for place in PLACES),
    ("eval_batch", "forward", ValueError, "all"),
    ("eval_batch", "forward", ValueError, "one"),
]
DP2, TP2, PP2 = {"data": 2}, {"data": 1, "tensor": 2}, {"data": 1, "pipeline": 2}
OFTEN: list[tuple[dict[str, int], int, list[Case]]] = [
    (DP2, 3, [("train_batch", "forward", ValueError, "all"), ("train_batch", "backward", KeyboardInterrupt, "one")]),
    (TP2, 0, [("loop", "backward", ValueError, "all"), ("eval_batch", "forward", ValueError, "one")]),
    (
        PP2,
        0,
        [
            ("loop", "backward", ValueError, "all"),
            ("train_batch", "forward", ValueError, "all"),
            ("train_batch", "backward", KeyboardInterrupt, "one"),
            ("eval_batch", "forward", ValueError, "one"),
        ],
    ),
]
"""Grid, ZeRO stage and cases, all of which share one job."""
assert all(case in CASES for *_, cases in OFTEN for case in cases)


def name_of(case: Case) -> str:
    return f"{case[0]}, {case[1]}, {case[2].__name__}, {case[3]}"


def differs(norms: list[float], weights: dict[str, Tensor], expected: tuple[list[float], dict[str, Tensor]]) -> str:
    norm = max(abs(a - b) / b for a, b in zip(norms, expected[0], strict=True))
    far = max(float((weights[key] - value).abs().max()) for key, value in expected[1].items())
    return "" if norm <= 1e-5 and far <= 1e-5 else f"norms differ by {norm:.1e}, weights by {far:.1e}"


def caught(grid: dict[str, int], stage: Any, cases: list[Case]) -> dict[str, str]:
    """Body of a rank: by case, what the call after the failure says; empty where training goes on well."""
    expected = in_one_process(lambda *_: None, (), grid["data"])
    return {name_of(case): one_case(case, grid, stage, expected) for case in cases}


def caught_often() -> list[dict[str, str]]:
    """Body of a rank: one grid after another."""
    return [caught(*each) for each in OFTEN]


def one_case(case: Case, grid: dict[str, int], stage: Any, expected: Any) -> str:
    way, place, kind, who = case
    # On a busy machine ranks that fail alike do so within seconds; one that fails alone waits for the others in vain.
    failed_calls._ALIKE_SECONDS = 0.5 if is_over(case, grid, stage) else 4.0
    failed_calls._LEAVE_SECONDS = rendezvous._REPORT_SECONDS = 0.1
    failing, norms = Failing(), list[float]()
    model = models.decoder()
    model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: failing.at("forward"))

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        failing.at("loss")
        made: Tensor = Raises.apply(loss_of(output, batch), failing)  # type: ignore[no-untyped-call]
        return made

    with engine.initialize(model, settings(grid, stage), loss, example_batch=data(1)[0][: ROWS // 2]) as eng:
        dp, here = eng.grid.dp, eng.grid.coord().dp
        for step, batch in enumerate(data(dp)):
            rows = batch.chunk(dp)[here]
            if step == 2:
                if who == "all" or eng.grid.rank == eng.grid.world_size - 1:
                    failing.arm(place, kind)
                with suppress(ValueError, KeyboardInterrupt, engine.EngineError):
                    in_loop(eng, rows, loss) if way == "loop" else getattr(eng, way)(rows)
                failing.place = ""
                try:
                    norms.append(eng.train_batch(rows).grad_norm)
                except engine.EngineError as error:
                    return str(error)
                continue
            norms.append(eng.train_batch(rows).grad_norm)
        weights = eng.full_state_dict()
        return differs(norms, weights, expected) if eng.grid.rank == 0 else ""


def is_over(case: Case, grid: dict[str, int], stage: Any) -> bool:
    """Whether others wait for what the rank that fails does not send."""
    way, place, _, who = case
    if grid.get("pipeline", 1) > 1:
        return way != "loop" or place == "forward"  # in a loop every rank computes the loss
    return who == "one" and (grid.get("tensor", 1) > 1 or stage == 3)


def holds(grid: dict[str, int], stage: Any, cases: list[Case], ranks: Sequence[dict[str, str]]) -> None:
    for case in cases:
        told = {found[name_of(case)] for found in ranks}
        # Stages of further axes may have issued different numbers of collectives, which does not show that they failed
        # alike, so an engine on them goes on or is over.
        open_ended = grid.get("pipeline", 1) > 1 and math.prod(grid.values()) > 2 and case[0] == "loop"
        if told == {""} if open_ended else not is_over(case, grid, stage):
            assert told == {""}, f"{grid}, {name_of(case)}: {told}"
            continue
        assert len(told) == 1, f"{grid}, {name_of(case)}: {told}"
        (sentence,) = told
        assert "so this engine is over: make it anew on all ranks with engine.initialize" in sentence, sentence
        assert "see the error of the rank that failed: " in sentence and case[2].__name__ in sentence, sentence


WIDEST = pytest.param({"data": 1, "tensor": 2, "pipeline": 2}, 0, id="tp2-pp2")


@pytest.mark.long
@pytest.mark.parametrize(("grid", "stage"), [*every_grid(), WIDEST])
def test_training_goes_on_as_if_the_step_had_not_been_or_the_engine_is_over_on_all_ranks(
    grid: dict[str, int], stage: Any, run_ranks: RunRanks
) -> None:
    holds(grid, stage, CASES, run_ranks(caught, math.prod(grid.values()), grid, stage, CASES, seconds=300.0))


def test_some_failures_do_so_on_the_smallest_grids(run_ranks: RunRanks) -> None:
    ranks = run_ranks(caught_often, 2)
    for number, each in enumerate(OFTEN):
        holds(*each, [found[number] for found in ranks])


class Store:
    """The store of a job of threads."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        with self.lock:
            self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        with self.lock:
            return self.values[key]  # type: ignore[no-any-return]

    def check(self, keys: list[str], /) -> bool:
        with self.lock:
            return all(key in self.values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        with self.lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: Any, /) -> None:
        raise NotImplementedError

    def delete_key(self, key: str, /) -> bool:
        raise NotImplementedError


def verdicts(places: Sequence[str | None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """What each rank says at its next call, and which ranks have ended their communication; "-" does not fail."""
    monkeypatch.setattr(failed_calls, "_ALIKE_SECONDS", 0.3)
    monkeypatch.setattr(failed_calls, "_LEAVE_SECONDS", 0.0)
    store, left = Store(), list[int]()
    ranks = [FailedCalls(store, rank, len(places), partial(left.append, rank)) for rank in range(len(places))]
    for rank, place in enumerate(places):
        if place != "-":
            ranks[rank].note("train_batch", ValueError(f"odd {rank}"), place)
    found = []
    for failures in ranks:
        try:
            failures.refuse("train_batch")
            found.append("")
        except engine.EngineError as error:
            found.append(str(error))
    deadline = time.monotonic() + 5.0
    while len(left) < sum(map(bool, found)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found, sorted(left)


def test_an_engine_goes_on_only_if_all_ranks_fail_at_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(["here"] * 3, monkeypatch) == ([""] * 3, [])
    for places, failed in (
        (["here", "there", "here"], [0, 1, 2]),
        ([None, "here", "here"], [0, 1, 2]),
        (["-", "here", "here"], [1, 2]),
    ):
        said, left = verdicts(places, monkeypatch)
        assert left == failed and {said[rank] for rank in failed} == {said[failed[0]]}
        assert "ValueError: odd" in said[failed[0]]


def lost(rank: int) -> engine.EngineError:
    """An error of a rank that has lost another one."""
    error = engine.EngineError(f"rank {rank} waits. A peer has probably stopped: rank 3 did not come")
    error.__cause__ = RuntimeError("closed")
    return error


def test_ranks_that_have_only_lost_another_say_which_unless_one_has_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for own in (None, ValueError("odd")):
        monkeypatch.setattr(failed_calls, "_WORDS_SECONDS", 0.2)
        store = Store()
        ranks = [FailedCalls(store, rank, 4, lambda: None) for rank in range(3)]
        errors = [lost(0), lost(1), own or lost(2)]
        for failures, error in zip(ranks, errors, strict=True):
            failures.note("train_batch", error, "here")
        said = set()
        for failures in ranks:
            with pytest.raises(engine.EngineError) as caught:
                failures.refuse("train_batch")
            said.add(str(caught.value))
        (text,) = said
        assert "so this engine is over" in text
        assert ("ValueError: odd" if own else "A peer has probably stopped: rank 3 did not come") in text


def test_a_second_failure_is_judged_by_itself() -> None:
    store = Store()
    ranks = [FailedCalls(store, rank, 2, lambda: None) for rank in range(2)]
    for place, over in (("here", False), ("here", False), (None, True)):
        for failures in ranks:
            failures.note("train_batch", ValueError("odd"), place)
        for failures in ranks:
            with pytest.raises(engine.EngineError, match="this engine is over") if over else nullcontext():
                failures.refuse("train_batch")


def alone(folder: str) -> tuple[bool, str]:
    """Body of a rank: the last stage fails alone and keeps its engine and error until the other one has failed too.

    Returns whether it has, and what the other one says.
    """
    model, failing, ended = models.decoder(), Failing(), Path(folder, "ended")
    model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: failing.at("forward"))
    config, rows = settings({"data": 1, "pipeline": 2}, 0), data(1)[0]
    eng = engine.initialize(model, config, loss_of, example_batch=rows[: ROWS // 2])
    eng.train_batch(rows)
    if eng.grid.rank == 0:
        with pytest.raises(engine.EngineError) as caught:
            eng.train_batch(rows)
        ended.touch()
        return True, str(caught.value)
    failing.arm("forward")
    with pytest.raises(ValueError, match="own mistake") as kept:
        eng.train_batch(rows)
    deadline = time.monotonic() + 20.0
    while not ended.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return ended.exists(), str(kept.value)


def test_a_rank_that_fails_alone_frees_the_others_though_it_keeps_its_engine(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (_, said), (freed, _) = run_ranks(alone, 2, str(tmp_path), seconds=60.0)
    assert freed and "so this engine is over" in said, said
