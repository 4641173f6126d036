"""Tensors of several files are copied into files of a set size."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.format import safetensors_file as module
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.safetensors_file import repack, shard_bytes
from engine.errors import EngineError


def files(folder: Path) -> dict[str, Tensor]:
    """Two files with tensors of several widths; their content."""
    found = {
        "a": torch.arange(3000, dtype=torch.float32).view(30, 100), "b": torch.arange(7, dtype=torch.bfloat16),
        "c": torch.arange(5000, dtype=torch.int64), "d": torch.tensor(3.0), "e": torch.zeros(0, 4),
    }  # fmt: skip
    for name, keys in (("model-00001-of-00002.safetensors", "ac"), ("model-00002-of-00002.safetensors", "bde")):
        save_file({key: found[key] for key in keys}, folder / name, {"format": "pt"})
    return found


@pytest.mark.parametrize("at_once", [1 << 12, 1 << 24])
@pytest.mark.parametrize(
    ("limit", "expected"), [(1 << 30, [list("abcde")]), (12_100, [["a", "b"], ["c"], ["d", "e"]])], ids=["one", "three"]
)
def test_files_have_the_asked_size(
    limit: int, expected: list[list[str]], at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    given = files(source)
    repack(Files(), source, target, list("abcde"), limit)
    names = sorted(file.name for file in target.iterdir() if file.suffix == ".safetensors")
    loaded = [load_file(target / name) for name in names]
    assert [sorted(own) for own in loaded] == expected
    for own in loaded:
        for key, tensor in own.items():
            assert tensor.dtype == given[key].dtype and torch.equal(tensor, given[key])
    if len(expected) == 1:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {key: name for name, own in zip(names, expected, strict=True) for key in own}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in given.values())


def test_sizes_are_read_as_transformers_reads_them() -> None:
    sizes: dict[int | str, int] = {5: 5, "5GB": 5 * 10**9, "1.5 MB": 1_500_000, "512MiB": 512 << 20, "10kb": 10_000}
    assert {size: shard_bytes(size) for size in sizes} == sizes
    for size in ("", "GB", 0, "0GB", -1, "5 bananas", True):
        with pytest.raises(EngineError, match=r"max_shard_size was given .*; give bytes above 0"):
            shard_bytes(size)
