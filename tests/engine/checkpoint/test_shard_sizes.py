"""``save_pretrained`` writes one file, or files of a set size, whatever the grid is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import engine
from tests import models
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def saves(grid: dict[str, int], stage: int, folder: str) -> None:
    """Body of a rank: save in files of several sizes, the last two into one folder."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "parallel": grid,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    example = models.batches_for("llama", 2, 1)[0]
    with engine.initialize(models.llama(), config, example_batch=example) as eng:
        eng.train_batch(example)
        eng.save_pretrained(f"{folder}/ranks")
        eng.save_pretrained(f"{folder}/sizes", max_shard_size="20KB")
        eng.save_pretrained(f"{folder}/one", max_shard_size=20_000)
        eng.save_pretrained(f"{folder}/one", max_shard_size="5GB")
        with pytest.raises(engine.EngineError, match="max_shard_size was given 'large'"):
            eng.save_pretrained(f"{folder}/none", max_shard_size="large")


@pytest.mark.parametrize(
    ("grid", "stage"),
    [({"data": 2}, 3), wide({"tensor": 2}, 0), wide({"pipeline": 2}, 0), wide({"data": 2, "tensor": 2}, 1)],
)
def test_files_are_as_large_as_asked(run_ranks: RunRanks, grid: dict[str, int], stage: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    world = grid.get("data", 1) * grid.get("tensor", 1) * grid.get("pipeline", 1)
    run_ranks(saves, world, grid, stage, str(tmp_path))

    def content(name: str) -> tuple[list[Path], dict[str, torch.Tensor]]:
        found = sorted((tmp_path / name).glob("*.safetensors"))
        return found, {key: tensor for file in found for key, tensor in load_file(file).items()}

    _, expected = content("ranks")
    one, whole = content("one")
    assert [file.name for file in one] == ["model.safetensors"]
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    sizes, parts = content("sizes")
    assert len(sizes) > 2
    for file in sizes:
        own = load_file(file)
        assert len(own) == 1 or sum(tensor.nbytes for tensor in own.values()) <= 20_000
    for found in (whole, parts):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    for name in ("one", "sizes"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert all(torch.equal(loaded.state_dict()[key], expected[key]) for key in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "ranks", "sizes"]
