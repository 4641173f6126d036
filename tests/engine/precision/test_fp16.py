"""fp16 with a loss scale is the same thing as in plain torch, skipped steps included, on every grid."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.models.decoder import loss_sum
from engine.verify import Parity, verify
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.resumed_runs import own_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
STAGES = (0, 1, 2, 3)
STEPS, ROWS, CLIP, POWER = 8, 16, 0.5, 18


def plain(model: nn.Module, batches: list[Any], dp: int, micro: int) -> tuple[list[float], list[bool], list[Tensor]]:
    """fp16 weights, fp32 master and sums, DeepSpeed's dynamic scale from 2 to the POWER, hysteresis 1."""
    low = [p for p in model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().clone()) for p in low]
    for p in model.parameters():
        p.data = p.data.half()
    adamw = torch.optim.AdamW(masters, lr=3e-3, eps=1e-5, weight_decay=0.1, fused=True)
    scale, losses, skipped = 2.0**POWER, [], []
    for batch in batches:
        sums, total = [torch.zeros_like(m) for m in masters], 0.0
        for rank in range(dp):
            own = [torch.zeros_like(m) for m in masters]
            for start in range(rank * ROWS // dp, (rank + 1) * ROWS // dp, micro):
                loss = model(*(part[start : start + micro] for part in batch))[1]
                (loss.float() * scale).backward()
                total += float(loss.detach())
                for grad, p in zip(own, low, strict=True):
                    grad += p.grad if p.grad is not None else 0
                    p.grad = None
            sums = [a + b for a, b in zip(sums, own, strict=True)]
        weight = ROWS / micro * scale
        norm = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in sums) ** 0.5 / weight
        losses.append(total / (ROWS / micro))
        skipped.append(not norm < float("inf"))
        if skipped[-1]:
            scale /= 2
            continue
        for master, grad in zip(masters, sums, strict=True):
            used = bool(grad.any())  # a parameter that nobody uses has no gradient
            master.grad = grad * (min(1.0, CLIP / (norm + 1e-6)) / weight) if used else None
        adamw.step()
        with torch.no_grad():
            for p, master in zip(low, masters, strict=True):
                p.copy_(master)
    return losses, skipped, [m.detach() for m in masters]


def settings(dp: int, stage: int, **changes: Any) -> dict[str, Any]:
    fp16 = {"enabled": True, "initial_scale_power": POWER, "hysteresis": 1}
    config = config_for(dp, stage, fp16=fp16, gradient_clipping=CLIP) | changes
    del config["scheduler"]
    return config


def train(stage: int) -> dict[str, Any]:
    """Body of a rank: the engine beside plain torch."""
    dp = torch.distributed.get_world_size()
    config = settings(dp, stage)
    batches = models.batches_for("nano", ROWS, STEPS)
    with engine.initialize(models.nano(), config) as eng:
        reports = [eng.train_batch(own_rows(eng, batch)) for batch in batches]
        weights = eng.full_state_dict()
    found: dict[str, Any] = {"scales": [r.loss_scale for r in reports], "worst": 0.0}
    found["ours"] = found["plain"] = [r.loss for r in reports], [r.skipped for r in reports]
    found["named"] = [r.nonfinite is not None for r in reports]
    if weights:
        losses, skipped, masters = plain(models.nano(), batches, dp, config["train_micro_batch_size_per_gpu"])
        names = [name for name, p in models.nano().named_parameters() if p.requires_grad]
        found["plain"] = losses, skipped
        found["worst"] = max(float((weights[n] - m).abs().max()) for n, m in zip(names, masters, strict=True))
    return found


@pytest.mark.parametrize(
    ("dp", "stage"),
    [(2, 3), wide(2, 1), wide(2, 2), *(wide(1, stage) for stage in STAGES), wide(2, 0)],
)
def test_losses_masters_and_skipped_steps_equal_plain_torch(run_ranks: RunRanks, dp: int, stage: int) -> None:
    found, *others = run_ranks(train, dp, stage)
    losses, skipped = found["ours"]
    assert found["ours"] == found["plain"] and found["worst"] <= 1e-9
    assert skipped[0] and not skipped[-1] and losses[-1] < losses[0] and found["named"] == skipped
    assert found["scales"] == [2.0 ** (POWER - sum(skipped[:n])) for n in range(STEPS)]
    assert all(other["ours"] == found["ours"] and other["scales"] == found["scales"] for other in others)


GRIDS: dict[str, dict[str, int]] = {
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
}


def on_grid(grid: str, wire: str | None, power: int) -> Parity | None:
    """Body of a rank."""
    config = settings(1, 1, parallel={"data": 1} | GRIDS[grid], communication_data_type=wire)
    config["fp16"] = config["fp16"] | {"initial_scale_power": power}
    return verify(lambda: models.decoder(layers=4), config, models.batches_for("decoder", ROWS, STEPS), loss_sum)


@pytest.mark.parametrize("grid", [wide(grid) for grid in GRIDS])
def test_every_grid_skips_the_same_steps_and_stays_close(run_ranks: RunRanks, grid: str) -> None:
    result = run_ranks(on_grid, prod(GRIDS[grid].values()), grid, None, POWER)[0]
    finite = [[norm < float("inf") for norm in run.norms] for run in (result.engine, result.reference)]
    assert finite[0] == finite[1] and not finite[0][0] and finite[0][-1]
    assert result.loss <= (5e-5 if "tp" in grid else 1e-6), str(result)


@pytest.mark.long
def test_gradients_on_the_wire_in_fp16_stay_close(run_ranks: RunRanks) -> None:
    result = run_ranks(on_grid, 2, "dp2", "fp16", 10)[0]
    assert all(norm < float("inf") for norm in result.engine.norms)
    assert 0 < result.loss <= 5e-5, str(result)


class Loud(nn.Module):
    """A gradient of 40000 on each data rank, which fp16 holds once and not twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def on_the_wire(wire: str) -> list[tuple[bool, str | None, bool]]:
    """Body of a rank: without fp16 training, so that nothing but the wire can overflow."""
    found = []
    for stage in STAGES:
        zero = {"stage": stage, "reduce": "microbatch" if stage == 2 else "step"}
        config = {"train_batch_size": 2, "zero_optimization": zero, "communication_data_type": wire}
        with engine.initialize(Loud(), config) as eng:
            report = eng.train_batch(torch.full((1, 4), 40000.0))
            with eng.full_parameters("weight") as named:
                found.append((report.skipped, report.nonfinite, bool(named["weight"].eq(1).all())))
    return found


def test_an_overflow_on_the_wire_is_seen(run_ranks: RunRanks) -> None:
    assert run_ranks(on_the_wire, 2, "fp16") == [[(True, "weight", True)] * len(STAGES)] * 2
    assert run_ranks(on_the_wire, 2, "fp32")[0] == [(False, None, False)] * len(STAGES)


def three_calls() -> list[tuple[float, bool, float]]:
    """Losses, skips and scales of the loop in one process."""
    found = []
    with engine.initialize(models.nano(), settings(1, 0)) as eng:
        for batch in models.batches_for("nano", ROWS, STEPS):
            for start in range(0, ROWS, 2):
                eng.backward(eng(*(part[start : start + 2] for part in batch))[1])
                report = eng.step()
            assert report is not None
            found.append((report.loss, report.skipped, report.loss_scale))
    return found


def test_the_three_calls_scale_alike() -> None:
    with engine.initialize(models.nano(), settings(1, 0)) as eng:
        reports = [eng.train_batch(batch) for batch in models.batches_for("nano", ROWS, STEPS)]
    assert three_calls() == [(r.loss, r.skipped, r.loss_scale) for r in reports]


def test_a_run_that_only_overflows_ends_at_the_lowest_scale() -> None:
    config = {
        "train_batch_size": 1,
        "fp16": {"enabled": True, "initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 2.0},
        "max_skipped_steps": 4,
    }
    with engine.initialize(Loud(), config) as eng:
        scales = [eng.train_batch(torch.full((1, 4), 60000.0)).loss_scale for _ in range(3)]
        with pytest.raises(engine.EngineError, match=r"with the loss scale at 2, which cannot fall further, because"):
            eng.train_batch(torch.full((1, 4), 60000.0))
    assert scales == [8.0, 4.0, 2.0]
