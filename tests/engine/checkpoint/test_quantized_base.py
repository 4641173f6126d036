"""A base in 8 or 4 bits is read from a folder by ranks that never have it whole; adapters alone are saved."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import engine
from tests.engine.checkpoint.test_adapters import keys_of
from tests.resumed_runs import own_rows

WIDTH = 24
"""Blocks of 64 columns: one a row, which tensor ranks share where they cut columns."""
STEPS = [torch.arange(4 * 6 * WIDTH).view(4, 6, WIDTH).sin() * scale for scale in (1.0, 0.5, 2.0)]


class Pair(nn.Module):
    """A frozen perceptron with a trained scale beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return x + y * self.scale


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(), Pair()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return Pairs()


def empty() -> nn.Module:
    with torch.device("meta"):
        return Pairs()


def other() -> nn.Module:
    torch.manual_seed(4)
    return Pairs()


def config(**changes: Any) -> dict[str, Any]:
    checkpoint = {"frozen": False} | changes.pop("checkpoint", {})
    return {
        "train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.01, "checkpoint": checkpoint,
        "quantize_frozen": {"dtype": "nf4"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    } | changes  # fmt: skip


RunRanks = Callable[..., list[Any]]
Trained = tuple[list[float], dict[str, Tensor]]


def train(build: Callable[[], nn.Module], given: dict[str, Any], steps: tuple[int, int] = (0, 3)) -> Trained:
    """Body of a rank: go on from what is saved, if anything is, and save."""
    with engine.initialize(build, given, example_batch=STEPS[0][:1]) as eng:
        if eng.config.checkpoint.folder is not None:
            eng.load_checkpoint(missing_ok=True)
        losses = [eng.train_batch(own_rows(eng, batch)).loss for batch in STEPS[slice(*steps)]]
        if eng.config.checkpoint.folder is not None:
            eng.save_checkpoint().wait()
        return losses, eng.full_state_dict()


def read_or_given(grids: Sequence[dict[str, Any]], folder: str) -> list[tuple[Trained, Trained]]:
    """Body of a rank: for each grid, with a model in memory, and with one that reads the same weights."""
    read = {"init_from": folder}
    return [(train(seeded, config(**grid)), train(empty, config(**grid, checkpoint=read))) for grid in grids]


def test_a_model_without_content_reads_its_base_into_codes(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_file(seeded().state_dict(), tmp_path / "model.safetensors")
    grids = [{"parallel": {"tensor": 2}}, {"zero_optimization": {"stage": 3}}]
    for (losses, weights), (read, same) in run_ranks(read_or_given, 2, grids, str(tmp_path))[0]:
        assert read == losses and weights.keys() == same.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, same[name]), name


@pytest.mark.long
def test_trained_weights_alone_are_saved_and_another_grid_goes_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    tensor: dict[str, Any] = {"parallel": {"tensor": 2}}
    whole, weights = run_ranks(train, 2, seeded, config(**tensor))[0]
    folder = {"folder": str(tmp_path / "run")}
    begun, _ = run_ranks(train, 2, seeded, config(**tensor, checkpoint=folder), (0, 2))[0]
    sharded = config(zero_optimization={"stage": 3}, checkpoint=folder)
    ended, found = run_ranks(train, 2, seeded, sharded, (2, 3))[0]
    assert [*begun, *ended] == pytest.approx(whole, rel=1e-6)
    for name, weight in weights.items():
        assert (weight - found[name]).abs().max() < 1e-5, name
    assert sorted(keys_of(tmp_path / "run/step-00000002/model")) == ["blocks.0.scale", "blocks.1.scale"]


@pytest.mark.long
@pytest.mark.parametrize("grid", [{"parallel": {"tensor": 2}}, {"zero_optimization": {"stage": 3}}], ids=str)
def test_a_base_that_a_checkpoint_has_is_read_into_codes(
    run_ranks: RunRanks, grid: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    run_ranks(train, 2, seeded, config(checkpoint={"folder": folder, "frozen": True}, quantize_frozen=None), (0, 2))
    _, loaded = run_ranks(train, 2, other, config(**grid, checkpoint={"folder": folder}), (2, 2))[0]
    _, same = run_ranks(train, 2, seeded, config(**grid), (0, 0))[0]
    for name in ("blocks.0.up.weight", "blocks.1.down.weight"):
        assert torch.equal(loaded[name], same[name]) and not torch.equal(loaded[name], seeded().state_dict()[name])
