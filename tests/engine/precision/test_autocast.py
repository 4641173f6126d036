"""Autocast around the engine, the user's or that of the configuration, is what it is around plain torch."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.parity.test_axes import GRIDS
from tests.engine.parity.test_parity import config_for
from tests.models import take_rows
from tests.resumed_runs import own_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
STEPS, ROWS, CLIP = 3, 16, 0.5
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 5e-4, "eps": 1e-5, "weight_decay": 0.1}}
Found = tuple[list[float], dict[str, Tensor], bool]


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def plain(model: nn.Module, micro: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same microbatches in order in plain torch, forward under autocast."""
    adamw = torch.optim.AdamW(model.parameters(), **ADAMW["params"], fused=True)
    losses = []
    for batch in models.batches_for("decoder", ROWS, STEPS):
        total = weight = 0.0
        for start in range(0, ROWS, micro):
            part = take_rows(batch, start, micro)
            with autocast():
                loss, count = loss_sum(model(**part), part)
            loss.backward()  # type: ignore[no-untyped-call]
            total, weight = total + float(loss.detach()), weight + float(count)
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in grads) ** 0.5 / weight
        for grad in grads:
            grad *= min(1.0, CLIP / (norm + 1e-6)) / weight
        adamw.step()
        adamw.zero_grad()
        losses.append(total / weight)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(grid: str, stage: int, mode: str, seen: bool, own: bool = True) -> Found:
    """Body of a rank: losses, weights on rank 0, and whether bytes are as planned; ``own``: the user's autocast."""
    changes: dict[str, Any] = {"parallel": {"data": 1} | GRIDS[grid], "gradient_clipping": CLIP, "optimizer": ADAMW}
    given = config_for(1, stage, activation_checkpointing={"mode": mode}) | changes
    del given["scheduler"]
    given |= {} if own else {"torch_autocast": {"enabled": True}}
    config = engine.load_config(given, prod(GRIDS[grid].values()))
    batches = models.batches_for("decoder", ROWS, STEPS)
    example = take_rows(batches[0], 0, config.micro) if seen else None
    around = autocast() if own else nullcontext()
    with around, engine.initialize(models.decoder(layers=4), config, loss_sum, example) as eng:
        losses, exact = [], True
        for batch in batches:
            before = eng.sent
            losses.append(eng.train_batch(own_rows(eng, batch)).loss)
            sent = {
                (row.axis, row.label): row.bytes for row in eng.sent.since(before).rows() if row.label != "plan check"
            }
            exact &= sent == {(row.axis, row.label): row.bytes for row in eng.plan.rank(eng.grid.rank).traffic}
        return losses, eng.full_state_dict(), exact


CASES = [
    ("dp2", 1, "none"),
    ("dp2", 3, "full"),
    ("pp2", 1, "none"),
    ("pp2", 1, "full"),
    ("tp2", 1, "none"),
    ("tp2", 1, "full"),
]


BY_KEY = [("dp2", 3, "full"), ("pp2", 1, "full"), ("tp2", 1, "none")]
SHORT = [BY_KEY[0]]
"""Stages are in the tests below."""


@pytest.mark.parametrize(
    ("grid", "stage", "mode", "own"),
    [(*case, True) if case in SHORT else wide(*case, True) for case in CASES] + [wide(*case, False) for case in BY_KEY],
)
def test_grids_equal_plain_torch(run_ranks: RunRanks, grid: str, stage: int, mode: str, own: bool) -> None:
    losses, expected = plain(models.decoder(layers=4), 2)
    ours, weights, exact = run_ranks(train, 2, grid, stage, mode, True, own)[0]
    # tensor ranks round sums of halves anew; everything else adds the same numbers
    assert ours == pytest.approx(losses, rel=2e-4 if grid == "tp2" else 1e-6)
    worst = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
    assert worst <= (1e-3 if grid == "tp2" else 1e-5)
    # autocast saves its casts: what a recomputed block runs again is then more than the plan can see
    assert exact or (grid, mode) == ("tp2", "full")


@pytest.mark.parametrize(("mode", "own"), [("none", True), ("full", True), ("full", False)])
def test_one_process_equals_plain_torch(mode: str, own: bool) -> None:
    losses, expected = plain(models.decoder(layers=4), 2)
    given = config_for(1, 0, gradient_clipping=CLIP, optimizer=ADAMW, activation_checkpointing={"mode": mode})
    del given["scheduler"]
    given |= {} if own else {"torch_autocast": {"enabled": True}}
    with engine.initialize(models.decoder(layers=4), given, loss_sum) as eng:
        ours = []
        for batch in models.batches_for("decoder", ROWS, STEPS):
            with autocast() if own else nullcontext():
                ours.append(eng.train_batch(batch).loss)
        weights = eng.full_state_dict()
    assert ours == losses
    assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) <= 1e-9
    assert all(value.dtype == torch.float32 for value in weights.values())


def without_example(grid: str) -> tuple[list[float], list[float]]:
    """Body of a rank: the plan seen under autocast from the first batch is the same."""
    return train(grid, 1, "none", True)[0], train(grid, 1, "none", False)[0]


@pytest.mark.parametrize("grid", [wide("pp2")])
def test_a_plan_made_at_the_first_batch_sees_autocast_too(run_ranks: RunRanks, grid: str) -> None:
    seen, late = run_ranks(without_example, 2, grid)[0]
    assert seen == late


def predicted_rows() -> Any:
    """Body of a rank: what the model computes for one row, where the plan has seen two."""
    batch = models.batches_for("decoder", ROWS, 1)[0]
    given: dict[str, Any] = {"train_batch_size": 2, "parallel": {"pipeline": 2}, "optimizer": ADAMW}
    given |= {"torch_autocast": {"enabled": True}}
    with engine.initialize(models.decoder(layers=4), given, loss_sum, take_rows(batch, 0, 2)) as eng:
        return eng.predict(take_rows(batch, 0, 1))


@pytest.mark.long
def test_rows_that_the_plan_has_not_seen_have_the_dtypes_of_autocast_on_every_stage(run_ranks: RunRanks) -> None:
    with autocast(), torch.no_grad():
        expected = models.decoder(layers=4).eval()(**take_rows(models.batches_for("decoder", ROWS, 1)[0], 0, 1))
    for found in run_ranks(predicted_rows, 2):
        assert found.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(found, expected)


class MeanError(torch.nn.Module):
    """A layer and a loss that autocast computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(self.layer(x), torch.ones(4, 8))


def test_a_bf16_model_runs_inside_autocast() -> None:
    torch.manual_seed(0)
    model = MeanError()
    x = torch.randn(4, 6).bfloat16()
    alone = copy.deepcopy(model).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(x)
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}
    with engine.initialize(model, config) as eng:
        found = eng(x)
    assert found.dtype == expected.dtype == torch.float32 and torch.equal(found, expected)
