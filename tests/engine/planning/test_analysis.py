"""What a plan could not see of a model is said in its notes and in the banner. One process; nothing runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import load_config
from engine.parallel.trace import recorder
from engine.planning.analysis import PlanRequest
from engine.planning.plan import Plan, build_plan
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from engine.reporting.banner import banner_text
from tests import models

WIDTH, WORDS = 8, 12


class Block(nn.Module):
    """``branches``: by the content of what it is given."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches, self.linear = branches, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * 2 if self.branches and x.mean() > 1 else x


class Chain(nn.Module):
    """``fails`` in its forward; ``branches`` in its blocks."""

    def __init__(self, fails: Exception | None = None, branches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fails = fails
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(branches) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        if self.fails is not None:
            raise self.fails
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def planned(model: nn.Module, world: int = 2, loss_fn: Any = loss, **settings: Any) -> Plan:
    config = load_config({"train_batch_size": 8} | settings, world)
    program = Program(model, loss_fn, make_precision(config, model), torch.device("cpu"))
    return build_plan(config, PlanRequest(program, torch.zeros(2, 6, dtype=torch.int64)))


SHARDED: dict[str, Any] = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("error", [ValueError("an odd batch\nand more"), KeyError("an odd batch"), TypeError()])
def test_a_trace_that_has_failed_is_said(error: Exception) -> None:
    plan = planned(Chain(error), **SHARDED)
    (note,) = plan.notes
    said = str(error).splitlines()[0] if str(error) else "TypeError"
    assert note == (
        "parameters are gathered in the order of their registration, because the trace of the example has failed: "
        f"{said}"
    )
    assert note in banner_text(plan, "cpu") and plan.trace is None


def test_a_trace_that_has_not_failed_needs_no_note() -> None:
    plan = planned(Chain(), **SHARDED)
    assert plan.notes == () and plan.trace is not None


@pytest.mark.parametrize("loss_fn", [None, loss])
def test_the_mean_of_a_hugging_face_loss_is_said_where_it_is_the_loss(loss_fn: Any) -> None:
    said = [note for note in planned(models.llama(), loss_fn=loss_fn).notes if "is a mean per microbatch" in note]
    assert len(said) == (loss_fn is None)


def test_a_mistake_of_this_package_is_no_trace_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "map_leaves", None)
    with pytest.raises(TypeError, match="not callable"):
        planned(Chain(), **SHARDED)


@pytest.mark.parametrize("settings", [SHARDED, {"parallel": {"pipeline": 2}}, {"parallel": {"tensor": 2}}], ids=str)
def test_what_is_planned_from_zeros_is_said(settings: dict[str, Any]) -> None:
    said = "shapes and branches that depend on content are planned as they are for zeros, because "
    (note,) = (note for note in planned(Chain(branches=True), **settings).notes if note.startswith(said))
    assert ": __bool__ in blocks.0 (" in note and note.endswith(") and 2 more")


def unseen(logits: Tensor, ids: Tensor) -> Tensor:
    """A loss that computes with the place of each logit in memory, which shapes do not have."""
    return Shifted.apply(logits).mean()  # type: ignore[no-untyped-call, no-any-return]


class Shifted(torch.autograd.Function):
    """Does not run on shapes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        if logits.is_meta:
            raise ValueError("needs content")
        return logits + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_bytes_that_cannot_be_planned_are_said() -> None:
    notes = planned(Chain(), loss_fn=unseen, parallel={"tensor": 2}).notes
    assert any(note.startswith("bytes that are sent over tp after apply:Shifted at ") for note in notes)
