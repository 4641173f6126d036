"""A run goes on under another schedule, where the same ranks hold other stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

RunRanks = Callable[..., list[Any]]
WIDTH = 8


class Statistics(nn.Module):
    """Eight blocks whose running means every step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def settings(schedule: str, virtual_stages: int, **parallel: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "parallel": {"pipeline": 2, "schedule": schedule, "virtual_stages": virtual_stages} | parallel,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    }


def train(eng: engine.Engine, steps: range) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(16, WIDTH, generator=generator) for _ in range(4)]
    return [eng.train_batch(batches[step]).loss for step in steps]


def change(before: dict[str, Any], after: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Body of a rank: losses and state of a run that goes on, and of one that goes on under ``after``."""
    found: dict[str, Any] = {}
    torch.manual_seed(5)
    with engine.initialize(Statistics(), before, example_batch=torch.zeros(4, WIDTH)) as eng:
        train(eng, range(2))
        eng.save_checkpoint(folder).wait()
        found["expected"], found["state"] = train(eng, range(2, 4)), eng.full_state_dict()
    with engine.initialize(Statistics(), after, example_batch=torch.zeros(4, WIDTH)) as eng:
        eng.load_checkpoint(folder)
        found["losses"], found["got"] = train(eng, range(2, 4)), eng.full_state_dict()
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(settings("1f1b", 1), settings("zb-v", 2), marks=pytest.mark.long),
        (settings("zb-v", 2), settings("interleaved", 2)),
        pytest.param(settings("looped-bfs", 4), settings("1f1b", 1, split=["blocks.3"]), marks=pytest.mark.long),
    ],
    ids=["1f1b to zb-v", "zb-v to interleaved", "looped-bfs to 1f1b"],
)
def test_statistics_and_weights_go_with_their_stage(
    run_ranks: RunRanks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    found = run_ranks(change, 2, before, after, tmp_path / "run")[0]
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["state"].keys() == found["got"].keys()
    for name, tensor in found["state"].items():
        assert torch.allclose(found["got"][name].double(), tensor.double(), atol=1e-5), name
