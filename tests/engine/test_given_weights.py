"""Models as they are given: with other weights on each rank, or in 16 bits in an fp32 run."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests import models
from tests.engine.every_grid import every_grid
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import CLIP, ROWS, data, settings

RunRanks = Callable[..., list[Any]]


class Counting(nn.Module):
    """A decoder with a buffer of every kind of dtype, of odd sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = models.decoder()
        torch.manual_seed(seed)
        for parameter in self.inner.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.register_buffer("seen", torch.randint(100, (3,)))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("scale", torch.rand(()).double())
        self.register_buffer("spread", torch.rand(3, 1).expand(3, 4))

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids) * self.scale.float()


def from_rank0(grid: dict[str, int], stage: int, weights: str) -> dict[str, Tensor] | str:
    """Body of a rank, whose model differs from that of every other rank."""
    config = settings(grid, stage) | {"initial_weights": weights, "gradient_clipping": 0.02}
    try:
        rank = torch.distributed.get_rank()
        with engine.initialize(Counting(rank), config, loss_of, example_batch=data(1)[0][: ROWS // 2]) as eng:
            for ids in data(eng.grid.dp)[:3]:
                eng.train_batch(ids.chunk(eng.grid.dp)[eng.grid.coord().dp])
            assert all(torch.equal(a, b) for a, b in zip(eng.module.buffers(), Counting(0).buffers(), strict=True))
            return eng.full_state_dict()
    except engine.PlanError as error:
        return str(error)


@pytest.mark.parametrize(("grid", "stage"), every_grid("dp2-zero3", "tp2"))
def test_all_ranks_take_the_weights_of_rank_0(grid: dict[str, int], stage: int, run_ranks: RunRanks) -> None:
    weights = run_ranks(from_rank0, math.prod(grid.values()), grid, stage, "rank0")[0]
    model, dp = Counting(0), grid["data"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for ids in data(dp)[:3]:
        loss_of(model(ids), ids).backward()  # type: ignore[no-untyped-call]
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.02)) > 0.02
        optimizer.step()
        optimizer.zero_grad()
    assert max(float((weights[name] - value.detach()).abs().max()) for name, value in model.named_parameters()) <= 1e-5


def test_other_weights_are_refused_where_they_have_to_be_equal(run_ranks: RunRanks) -> None:
    for text in run_ranks(from_rank0, 2, {"data": 2}, 1, "equal"):
        assert "were given different weights" in text and text.endswith('or give "initial_weights": "rank0".')


def half_in_one_process(dtype: torch.dtype, dp: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch with fp32 masters and sums of gradients."""
    model, norms = models.decoder().to(dtype), []
    masters = {name: nn.Parameter(value.detach().float()) for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, eps=1e-5)
    for batch in data(dp):
        parts = [part for share in batch.chunk(dp) for part in torch.split(share, ROWS // 2)]
        for ids in parts:
            loss_of(model(ids), ids).backward()  # type: ignore[no-untyped-call]
            for name, value in model.named_parameters():
                grad = value.grad.float() / len(parts)  # type: ignore[union-attr]
                master = masters[name]
                master.grad = grad if master.grad is None else master.grad + grad
                value.grad = None
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(masters[name])
    return norms, {name: value.detach() for name, value in masters.items()}


def half_on_ranks(grid: dict[str, int], stage: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor], str]:
    model, norms = models.decoder().to(dtype), []
    with engine.initialize(model, settings(grid, stage), loss_of, example_batch=data(1)[0][: ROWS // 2]) as eng:
        for ids in data(eng.grid.dp):
            norms.append(eng.train_batch(ids.chunk(eng.grid.dp)[eng.grid.coord().dp]).grad_norm)
        with eng.masters() as masters:
            assert all(value.dtype == torch.float32 for value in masters.values())
        return norms, eng.full_state_dict(), " ".join(eng.plan.notes)


@pytest.mark.parametrize(
    ("dtype", "grid", "stage"),
    [
        pytest.param(dtype, *case.values, marks=case.marks, id=f"{case.id}-{str(dtype).removeprefix('torch.')}")
        for dtype, often in ((torch.bfloat16, ["dp2-zero3"]), (torch.float16, []))
        for case in every_grid(*often)
    ],
)
def test_a_model_in_16_bits_trains_in_an_fp32_run(
    dtype: torch.dtype, grid: dict[str, int], stage: int, run_ranks: RunRanks
) -> None:
    norms, weights, notes = run_ranks(half_on_ranks, math.prod(grid.values()), grid, stage, dtype)[0]
    expected = half_in_one_process(dtype, grid["data"])
    exact = half_in_one_process(torch.float32, grid["data"])[0]
    # sums over tensor ranks are rounded elsewhere than one process rounds, so both are compared with the exact run
    worst = max(abs(half / true - 1) for half, true in zip(expected[0], exact, strict=True))
    assert norms == pytest.approx(exact, rel=1.25 * worst), "as close to the run in fp32 as plain torch is"
    assert all(value.dtype == dtype for value in weights.values())
    far = sum(float((weights[name] - value.detach()).square().sum()) for name, value in expected[1].items())
    assert far < 1e-4 * sum(float(value.detach().square().sum()) for value in expected[1].values())
    assert f"computes in {str(dtype).removeprefix('torch.')} with an fp32 master" in notes
    assert ("without a loss scale" in notes) == (dtype == torch.float16)
