"""A folder of versions: whole Hugging Face folders, links to what is unchanged, and kills at any moment."""

import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.format.filesystem import Files
from engine.errors import CheckpointError, EngineError
from engine.weights_out.blocks import WeightBlocks, deliver
from engine.weights_out.consumers.folder import VersionFolder
from engine.weights_out.reader import WeightReader
from engine.weights_out.version import WeightVersion
from tests.engine.weights_out.trainer import KilledError, Trainer, breaks, random_weights

BUCKET = 600_000
"""Bytes of a bucket: each large tensor has a file of its own."""


def take(folder: Path, reader: WeightReader, version: WeightVersion, keep: int = 2) -> None:
    deliver(WeightBlocks(reader, version, monotonic() + reader.deadline, BUCKET), [VersionFolder(folder, keep)])


def read(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    return {key: found[name][key] for key, name in index["weight_map"].items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_versions_are_whole_and_unchanged_files_are_links(tmp_path: Path) -> None:
    trainer, reader, weights = Trainer(2), None, random_weights(1)
    reader = trainer.reader()
    take(tmp_path, reader, trainer.publish(weights))
    assert reader.traffic.received == sum(value.nbytes for value in weights.values())
    changed = {**weights, "layers.0.up.weight": weights["layers.0.up.weight"] + 1}
    before = reader.traffic.received
    take(tmp_path, reader, trainer.publish(changed))
    assert reader.traffic.received - before == weights["layers.0.up.weight"].nbytes
    first, second = tmp_path / "version-000001", tmp_path / "version-000002"
    assert same(read(first), weights) and same(read(second), changed)
    index = json.loads((second / "model.safetensors.index.json").read_text())
    assert (index["metadata"]["version"], index["metadata"]["base"]) == (2, 1)
    linked = {path.name: path.stat().st_nlink for path in second.glob("*.safetensors")}
    assert linked.pop(index["weight_map"]["layers.0.up.weight"]) == 1 and set(linked.values()) == {2}
    take(tmp_path, reader, trainer.publish(changed))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000002", "version-000003"]
    again = trainer.reader()  # another process, whose trainer has another name: it hashes the files
    again._geometry = None
    note = tmp_path / "version-000003/trine-version.json"
    note.write_text(note.read_text().replace('"run"', '"ran"'))
    take(tmp_path, again, trainer.publish(changed))
    assert again.traffic.received == 0 and same(read(tmp_path / "version-000004"), changed)


def test_a_folder_beside_a_new_one_still_links_what_is_unchanged(tmp_path: Path) -> None:
    trainer, weights = Trainer(2), random_weights(1)
    reader = trainer.reader()
    take(tmp_path / "old", reader, trainer.publish(weights))
    for number in (2, 3):  # the new folder reads all blocks at the same time by the same reader
        blocks = WeightBlocks(reader, trainer.publish(weights), monotonic() + reader.deadline, BUCKET)
        deliver(blocks, [VersionFolder(tmp_path / "old", 9), VersionFolder(tmp_path / f"new-{number}")])
        folder = tmp_path / f"old/version-{number:06d}"
        assert same(read(folder), weights) and same(read(tmp_path / f"new-{number}/version-{number:06d}"), weights)
        assert {path.stat().st_nlink for path in folder.glob("*.safetensors")} == {number}


def test_blocks_are_an_iterator_of_whole_tensors_in_buckets() -> None:
    trainer, weights = Trainer(3, held=("embed.weight",)), random_weights(1)
    blocks = WeightBlocks(trainer.reader(), trainer.publish(weights), monotonic() + 30, BUCKET)
    assert max(sum(t.nbytes for t in group.values()) for group in blocks.iter_groups()) <= BUCKET
    found = dict(blocks)
    assert same(found, {key: value for key, value in weights.items() if key != "embed.weight"})


class DyingFiles(Files):
    """Disk whose process is killed before an operation."""

    def __init__(self, left: int) -> None:
        self.left = left

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def sync(self, file: int) -> None:
        self._count()
        super().sync(file)

    def rename(self, path: Path, target: Path) -> None:
        self._count()
        super().rename(path, target)

    def sync_folder(self, path: Path) -> None:
        self._count()
        super().sync_folder(path)


def test_a_writer_that_is_killed_leaves_whole_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, old, new = Trainer(2), random_weights(1), random_weights(2)
    seen = set()
    monkeypatch.setattr("engine.weights_out.consumers.folder.remove_tree", lambda *_: None)  # a process that is gone
    for operation in range(0, 20, 3):
        folder = tmp_path / str(operation)
        take(folder, trainer.reader(), trainer.publish(old))
        first = VersionFolder(folder).last
        version, files = trainer.publish(new), DyingFiles(operation)
        try:
            blocks = WeightBlocks(trainer.reader(), version, monotonic() + 30, BUCKET)
            deliver(blocks, [VersionFolder(folder, 2, files)])
        except KilledError:
            pass
        last = VersionFolder(folder).last
        assert same(read(folder / f"version-{last:06d}"), new if last > first else old)
        seen.add(last > first)
    assert seen == {True, False}


def test_a_sender_that_is_killed_leaves_the_last_folder(tmp_path: Path) -> None:
    trainer, old = Trainer(2), random_weights(1)
    take(tmp_path, trainer.reader(), trainer.publish(old))
    version = trainer.publish(random_weights(2))
    for byte in breaks(3, 0, 1_200_000, 6):
        with pytest.raises(EngineError):
            take(tmp_path, trainer.reader(0.3, life=byte), version)
        assert [path.name for path in tmp_path.iterdir()] == ["version-000001"]
    assert same(read(tmp_path / "version-000001"), old)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer: Any = Trainer(1)
    with pytest.raises(CheckpointError, match=r"file cannot be written .*; give another folder in weights_out"):
        take(tmp_path / "file", trainer.reader(), trainer.publish(random_weights(1)))
