"""A plan passes on what ``initialize`` does: inputs of forward, metrics, a gather of rows, thawed weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engine
from engine.config import load_config
from engine.launch.cli import main
from engine.launch.planner import planned_model
from engine.launch.planner.plan_request import ModelSource
from engine.launch.planner.planned_model import build_model

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "monitor": {"metrics": ["accuracy"]},
    "optimizer": {"type": "AdamW", "include_frozen": ["first.*"]},
}  # fmt: skip


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden: Tensor = self.second(functional.gelu(self.first(x))) * scale
        return hidden


def loss(output: Tensor, batch: Any, gather_rows: Any = None) -> Any:
    return functional.mse_loss(gather_rows(output), gather_rows(batch["y"])), {"accuracy": 0.5}


def subject() -> tuple[nn.Module, Any, Any]:
    rows = torch.zeros(2, 8)
    return Scaled(), {"x": rows, "y": rows, "scale": torch.ones(())}, loss


def test_a_plan_gives_each_entry_of_a_batch_to_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planned_model, "find_function", lambda _: subject)
    plan = build_model(ModelSource(function="mine:subject")).plan(load_config(CONFIG, 1))
    with engine.initialize(Scaled(), CONFIG, loss_fn=loss) as eng:
        assert plan.rank(0) == eng.plan.rank(0) and plan.rank(0).state_bytes["frozen parameters"] == 0
    (tmp_path / "run.json").write_text(json.dumps(CONFIG))
    assert main(["plan", "mine:subject", str(tmp_path / "run.json"), "--world", "1", "--json"]) == 0
    assert "by storages on shapes" in json.loads(capsys.readouterr().out)["counted"]


def test_a_plan_takes_a_loss_of_torch_and_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = torch.zeros(2, 8), torch.zeros(2, 8)
    monkeypatch.setattr(planned_model, "find_function", lambda _: lambda: (nn.Linear(8, 8), pair, nn.MSELoss()))
    found = build_model(ModelSource(function="mine:pair"))
    assert found.workload(load_config({"train_batch_size": 2}, 1)).products
