"""Manifests in parts: out and in again, what a rank reads of them, and damage in any part."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from engine.checkpoint.format import manifest_parts, step_folders
from engine.checkpoint.format.checked_blocks import HashSlice, hash_slices
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.manifest import Checksum, Manifest, StoredPiece, StoredTensor, hashes_file
from engine.checkpoint.format.manifest_parts import from_index, is_indexed, sharing, to_parts
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.checkpoint.format.step_reader import StepReader
from engine.checkpoint.format.strict_json import Fields, parse
from engine.errors import CheckpointError
from tests.engine.checkpoint.fake_ranks import FakeRun, random_tensors
from tests.engine.checkpoint.format.test_manifest import manifests
from tests.engine.checkpoint.test_grids import CELLS, loads, run_on
from tests.selection import wide

SLICE = HashSlice(8, "0" * 64)


class Disk:
    """The parts of one manifest, and which of them were read."""

    def __init__(self, manifest: Manifest) -> None:
        self.index, self.parts = to_parts(manifest, dict.fromkeys(manifest.files, SLICE))
        self.read: list[str] = []

    def open(self) -> Manifest:
        """Read the index."""
        return from_index(Fields(parse(self.index, "manifest"), "manifest"), self._part)

    def _part(self, name: str, limit: int) -> bytes:
        self.read.append(name)
        return self.parts[name][:limit]


def plain(manifest: Manifest) -> Manifest:
    """With all parts read."""
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    tensors = {
        name: StoredTensor(tensor.kind, tuple(sorted(tensor.pieces, key=repr)))
        for name, tensor in manifest.tensors.items()
    }
    return Manifest(**fields | {"tensors": tensors, "files": dict(manifest.files)})


@settings(max_examples=60, deadline=None)
@given(manifests())
def test_out_and_in_again(manifest: Manifest) -> None:
    disk = Disk(manifest)
    found = disk.open()
    assert disk.read == [] and found.signature == manifest.signature
    assert plain(found) == plain(manifest)


def many(ranks: int, tensors: int) -> Manifest:
    """Each tensor has a piece on each rank."""
    part = Part((ranks, 4))
    stored = {
        f"{family}/{number}": StoredTensor(
            TensorKind("F32", (ranks, 4)),
            tuple(
                StoredPiece(f"optim/optim-{rank:05d}.safetensors", str(number), Piece(part, 4 * rank, 4 * rank + 4))
                for rank in range(ranks)
            ),
        )
        for family in ("master", "exp_avg")
        for number in range(tensors)
    }
    names = [f"{folder}-{rank:05d}.safetensors" for folder in ("optim/optim", "state/rank") for rank in range(ranks)]
    return Manifest(
        step=1, attempt="a", tensors=stored, files=dict.fromkeys(names, 64), checksum=Checksum("crc32", 4096, "", 0)
    )


@pytest.mark.parametrize("ranks", [64, 4096])
def test_a_rank_reads_the_parts_of_what_it_needs(ranks: int) -> None:
    disk = Disk(many(ranks, 8))
    found = disk.open()
    assert found.kinds == {
        f"{family}/{n}": TensorKind("F32", (ranks, 4)) for family in ("master", "exp_avg") for n in range(8)
    }
    part = Part((ranks, 4))
    stored = list(sharing(found.tensors["exp_avg/5"], Piece(part, 4 * ranks - 6, 4 * ranks - 4)))
    assert [one.file for one in stored] == [f"optim/optim-{ranks - 2:05d}.safetensors"]
    assert found.files[f"state/rank-{ranks - 1:05d}.safetensors"] == 64
    assert len([name for name in disk.parts if "tensors" in name]) == 1, "ranks are runs, however many they are"
    assert len(disk.parts[disk.read[0]]) < 2800 and disk.read[0] == "index/tensors-00000.json"
    if ranks == 64:
        assert disk.read[1:] == ["index/files-00000.json"]
    else:  # 2,048 files a part
        assert disk.read[1:] == ["index/files-00001.json", "index/files-00003.json"] and len(disk.parts) == 1 + 4


def spoil(disk: Disk, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a part, with an index that agrees."""
    content = json.loads(disk.parts[name])
    change(content)
    disk.parts[name] = data = json.dumps(content).encode()
    index = json.loads(disk.index)
    kind, number = name.removeprefix("index/").removesuffix(".json").split("-")
    index[f"{kind.removesuffix('s')}_parts"][int(number)] |= {
        "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    disk.index = json.dumps(index).encode()


HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "another kind": (
        "tensors", lambda part: part["tensors"]["master/0"].update(dtype="BF16"), "in the index",
    ),
    "no tensor": ("tensors", lambda part: part["tensors"].pop("master/0"), "not a dict"),
    "a piece too few": ("tensors", lambda part: part["tensors"]["master/0"]["pieces"].pop(), "exactly once"),
    "a file too many": ("tensors", lambda part: part["tensors"]["master/0"]["pieces"][0].update(file=128), "are below"),
    "a file outside": ("files", lambda part: part["files"][3].__setitem__(0, "../x"), r"names file '\.\./x'"),
    "a file twice": ("files", lambda part: part["files"][3].__setitem__(0, part["files"][2][0]), "listed once"),
    "a file too few": ("files", lambda part: part["files"].pop(), "does not list the 128 files"),
    "no size": ("files", lambda part: part["files"][3].__setitem__(1, -1), "whole number"),
    "no row": ("files", lambda part: part["files"].__setitem__(3, 7), "names file ''"),
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_a_part_that_says_what_cannot_be_is_refused(how: str) -> None:
    kind, change, words = HOSTILE[how]
    disk = Disk(many(64, 2))
    spoil(disk, f"index/{kind}-00000.json", change)
    with pytest.raises(CheckpointError, match=words):
        plain(disk.open())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("file_count", 5000, "do not list its 5000 files"), ("file_parts", [], "do not list its 128 files"),
        ("tensor_parts", [], "a part that it does not have"), ("version", "3.0", "reads 1.x and 2.x"),
        ("format", "other", "has format 'other'"),
    ],
)  # fmt: skip
def test_an_index_that_says_what_cannot_be_is_refused(key: str, value: Any, words: str) -> None:
    disk = Disk(many(64, 2))
    disk.index = json.dumps(json.loads(disk.index) | {key: value}).encode()
    with pytest.raises(CheckpointError, match=words):
        disk.open()


@pytest.mark.parametrize("name", ["index/files-00000.json", "index/tensors-00000.json"])
def test_a_part_that_was_changed_is_named(name: str) -> None:
    disk = Disk(many(64, 2))
    disk.parts[name] = disk.parts[name].replace(b"64", b"65", 1)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        plain(disk.open())


def test_a_slice_is_where_the_hashes_are() -> None:
    hashes = {
        "optim/b": np.arange(3, dtype="<u8"),
        "model/a": np.arange(7, 9, dtype="<u8"),
        "state/c": np.zeros(0, "<u8"),
    }
    data, _ = hashes_file(hashes)
    for name, place in hash_slices(hashes).items():
        found = bytes(data[place.start : place.start + 8 * len(hashes[name])])
        assert found == hashes[name].tobytes() and hashlib.sha256(found).hexdigest() == place.sha256


# ------------------------------------------------------------------------------------------------ of whole checkpoints


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, and a manifest in parts however small it is."""
    monkeypatch.setattr(step_folders, "WHOLE_PIECES", 0)
    monkeypatch.setattr(manifest_parts, "PIECES", 16)
    monkeypatch.setattr(manifest_parts, "FILES", 3)


def saved(run: FakeRun, folder: Path) -> Path:
    logical = random_tensors([run])
    for rank in run.ranks:
        rank.fill(logical)
    return run.save(folder)[0]


@pytest.mark.long
@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("cell", [(2, 1, 2, 1), wide((1, 4, 1, 0)), wide((4, 1, 1, 3))])
def test_a_checkpoint_in_parts_loads_on_any_grid(cell: tuple[int, int, int, int], tmp_path: Path) -> None:
    run = run_on(cell)
    logical = random_tensors([run_on((1, 1, 1, 0))])
    for rank in run.ranks:
        rank.fill(logical)
    step = run.save(tmp_path)[0]
    assert is_indexed(Fields(json.loads((step / "manifest.json").read_text()), "it"))
    assert len(list((step / "index").iterdir())) > 10
    for other in (cell, *CELLS[:: len(CELLS) // 4]):
        loads(step, other, logical)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("kind", ["model", "optim", "checksums.safetensors", "index"])
@pytest.mark.parametrize("how", ["changed", "shortened", "removed"])
def test_damage_anywhere_is_found(kind: str, how: str, tmp_path: Path) -> None:
    step = saved(run_on((2, 1, 2, 1)), tmp_path)
    StepReader(Files(), step).verify()
    path = sorted((step / kind).iterdir())[-1] if (step / kind).is_dir() else step / kind
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "shortened" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=path.name.partition("-")[0]):
        StepReader(Files(), step).verify()


def test_a_small_manifest_is_one_file_as_before(tmp_path: Path) -> None:
    step = saved(run_on((2, 1, 2, 1)), tmp_path)
    assert json.loads((step / "manifest.json").read_text())["version"] == "1.0" and not (step / "index").exists()
