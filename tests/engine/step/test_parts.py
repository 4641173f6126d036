"""Features of a step as parts: called in one order, saved, restored and closed; one that is off is not called."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import engine
from engine.build import step_parts
from engine.build.step_parts import PartRequest
from engine.integrity.guard import Integrity
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.step.parts import PartOrder, StepPart, StepParts
from engine.step.rank_parts import AverageOfWeights, EqualGradients, EqualWeights
from engine.step.state import StepState, StepTotals
from tests import models

RunRanks = Callable[..., list[Any]]
CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "bf16": {"check_grad_overflow": True},
}


class Counting(StepPart):
    """Counts updates, and notes every call."""

    def __init__(self, name: str, order: PartOrder, calls: list[str]) -> None:
        self.name, self.order, self.calls, self.count = name, order, calls, 0  # type: ignore[misc]

    def _note(self, phase: str) -> None:
        self.calls.append(f"{self.name} {phase}")

    def begin_step(self) -> None:
        self._note("begin_step")

    def before_update(self, step: StepState) -> BaseException | None:
        self._note("before_update")
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        self._note("agreed")

    def after_update(self) -> None:
        self.count += 1
        self._note("after_update")

    def after_skip(self) -> None:
        self._note("after_skip")

    def undo_step(self) -> None:
        self._note("undo_step")

    def end_step(self, step: StepState, made: int, skipped: bool) -> None:
        assert made == self.count
        self._note("end_step")

    def saving(self) -> AbstractContextManager[None]:
        return self._noted("saving")

    @contextmanager
    def _noted(self, phase: str) -> Iterator[None]:
        self._note(phase)
        yield

    def state(self) -> Mapping[str, Tensor]:
        return {f"{self.name}/count": torch.tensor(self.count)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.count = int(state[f"{self.name}/count"])
        self._note("restore")

    def close(self) -> None:
        self._note("close")


def _batches(count: int) -> list[dict[str, Tensor]]:
    return [dict(batch) for batch in models.batches_for("decoder", 4, count)]


def _train(folder: str) -> tuple[list[str], list[str]]:
    """Body of a rank: the calls of two parts in a run that updates, skips and saves, and in one that goes on."""
    calls: list[str] = []

    def late(request: PartRequest) -> StepPart:
        return Counting("late", PartOrder.AVERAGE, calls)

    def early(request: PartRequest) -> StepPart:
        return Counting("early", PartOrder.DELAYED_UPDATE, calls)

    config = CONFIG | {"checkpoint": {"folder": folder}}
    with patch.object(step_parts, "MAKERS", (late, *step_parts.MAKERS, early)):
        first, second, third = _batches(3)
        with engine.initialize(models.decoder, config, loss_sum) as eng:
            rows = 4 // eng.grid.row_ranks
            take = slice(eng.grid.row_rank * rows, (eng.grid.row_rank + 1) * rows)
            eng.train_batch({name: x[take] for name, x in first.items()})
            parameter = next(p for p in eng.module.parameters() if p.requires_grad)
            handle: Any = parameter.register_hook(lambda grad: grad * float("nan"))  # type: ignore[no-untyped-call]
            report = eng.train_batch({name: x[take] for name, x in second.items()})
            handle.remove()
            assert report.skipped
            eng.save_checkpoint()
        before = list(calls)
        calls.clear()
        with engine.initialize(models.decoder, config, loss_sum) as eng:
            eng.load_checkpoint()
            eng.train_batch({name: x[take] for name, x in third.items()})
    return before, calls


def _expected(phases: str) -> list[str]:
    return [f"{name} {phase}" for phase in phases.split() for name in ("early", "late")]


def test_parts_are_called_in_their_order_saved_restored_and_closed(tmp_path: Path, run_ranks: RunRanks) -> None:
    update, skip = "begin_step before_update agreed after_update end_step", "begin_step before_update agreed after_skip"
    for before, after in run_ranks(_train, 2, str(tmp_path)):
        assert before == _expected(f"{update} {skip} end_step saving close")
        assert after == _expected(f"restore {update} close")


def test_a_phase_calls_the_parts_that_have_something_to_do_in_it() -> None:
    class Idle(StepPart):
        order = PartOrder.BUFFERS

    calls: list[str] = []
    counting = Counting("one", PartOrder.COPIES, calls)
    parts = StepParts([Idle(), counting])
    assert parts.having(StepPart.agreed) == (counting,) and parts.having(StepPart.scaled) == ()
    assert parts.find(Counting) is counting and parts.find(Integrity) is None


class Failing(StepPart):
    """Cannot close."""

    order = PartOrder.COPIES

    def close(self) -> None:
        raise OSError("of a disk")


def _closed_in_an_error(world: World) -> list[str]:
    """Calls of the part after one that fails to close; the parameters are those of a closed engine."""
    config = CONFIG | {"train_batch_size": 4, "zero_optimization": {"stage": 3}}
    model, calls = models.decoder(), list[str]()
    batch = {name: rows[2 * world.rank :][:2] for name, rows in _batches(1)[0].items()}
    eng = engine.initialize(model, config, loss_sum, world=world)
    eng.train_batch(batch)
    assert eng._parts.built is not None
    eng._parts.built.parts.add(Failing())
    eng._parts.built.parts.add(Counting("late", PartOrder.AVERAGE, calls))
    with pytest.raises(OSError, match="of a disk"):
        eng.close()
    with pytest.raises(engine.EngineError, match="its engine is closed"):
        next(model.parameters()).sum()
    return calls


def test_a_part_that_fails_to_close_leaves_no_part_of_the_engine() -> None:
    assert run_thread_ranks(2, _closed_in_an_error) == [["late close"]] * 2


class Forwards(StepPart):
    """Counts the forwards of each step that trains."""

    order = PartOrder.EXPERTS

    def __init__(self) -> None:
        self.steps: list[int] = []

    def counts(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float64)

    @contextmanager
    def forward(self, counts: Tensor | None) -> Iterator[None]:
        if counts is not None:
            counts += 1
        yield

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        assert step.experts is not None
        self.steps.append(int(step.experts[0]))


def test_a_part_counts_in_the_forwards_of_its_step() -> None:
    part = Forwards()
    with (
        patch.object(step_parts, "MAKERS", (*step_parts.MAKERS, lambda request: part)),
        engine.initialize(models.decoder, CONFIG, loss_sum) as eng,
    ):
        for batch in _batches(2):
            eng.train_batch(batch)
            eng.eval_batch(batch)
    assert part.steps == [2, 2], "a microbatch of each of two steps, and none of an evaluation"


def test_features_that_are_off_have_no_part() -> None:
    with engine.initialize(models.decoder, CONFIG, loss_sum) as eng:
        eng.train_batch(_batches(1)[0])
        parts = eng._runtime.parts
        for kind in (Integrity, AverageOfWeights, EqualGradients, EqualWeights):
            assert parts.find(kind) is None
