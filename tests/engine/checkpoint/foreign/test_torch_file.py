"""Files of ``torch.save``: every tensor is found on the disk, and damaged or hostile files end in one sentence."""

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.checkpoint.foreign.pickle_values import PickledObject
from engine.checkpoint.foreign.torch_file import TorchTensor, read_torch_file
from engine.checkpoint.format.file_spans import SpannedTensor, pieces_of_box, read_spans
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.host_image import as_bytes, torch_dtype
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.step_reader import ReadRequest
from engine.errors import CheckpointError

FILES = Files()


def values(found: TorchTensor) -> Tensor:
    """The values on the disk."""
    whole = Part(found.kind.shape).whole()
    out = torch.empty(found.kind.shape, dtype=torch_dtype(found.kind))
    read_spans(
        FILES, {"it": SpannedTensor(found.kind, (found.span(whole),))}, [ReadRequest("it", whole, as_bytes(out))]
    )
    return out


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    given = (
        torch.randint(0, 2, (*shape, 8), dtype=torch.uint8).view(-1)[: torch.Size(shape).numel()].view(shape).to(dtype)
    )
    torch.save({"it": given}, tmp_path / "a.pt")
    found = read_torch_file(FILES, tmp_path / "a.pt")["it"]
    assert found.kind.shape == shape and torch_dtype(found.kind) == dtype
    assert torch.equal(values(found).view(-1).view(torch.uint8), given.view(-1).view(torch.uint8))


def test_containers_views_and_parameters(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    marked = nn.Parameter(base[:4].clone())
    marked.ds_id = 7  # type: ignore[attr-defined]
    given: dict[str, Any] = {
        "view": base[8:20].view(3, 4), "parameter": nn.Parameter(base.clone()), "marked": marked,
        "dict": OrderedDict(a=base), "default": defaultdict(list, {"x": [1]}), "size": base.shape, "set": {3},
        "number": torch.tensor(2.5), "device": torch.device("cpu"), "dtype": torch.float16,
    }  # fmt: skip
    torch.save(given, tmp_path / "a.pt")
    found = read_torch_file(FILES, tmp_path / "a.pt")
    assert torch.equal(values(found["view"]), given["view"])
    assert torch.equal(values(found["parameter"]), base)
    assert torch.equal(values(found["marked"]), base[:4])
    assert torch.equal(values(found["dict"]["a"]), base)
    assert found["default"] == {"x": [1]} and found["size"] == (24,) and found["set"] == [3]
    assert found["number"].number(FILES) == 2.5
    assert isinstance(found["device"], PickledObject) and str(found["dtype"]) == "torch.float16"


def test_a_file_inside_another(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(5), buffer)
    (tmp_path / "many").write_bytes(b"x" * 1000 + buffer.getvalue() + b"y" * 50)
    found = read_torch_file(FILES, tmp_path / "many", 1000, len(buffer.getvalue()))
    assert torch.equal(values(found), torch.arange(5))


def test_elements_that_do_not_lie_in_a_row(tmp_path: Path) -> None:
    torch.save(torch.arange(12).view(3, 4).t(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"strides \[1, 4\].*contiguous"):
        values(read_torch_file(FILES, tmp_path / "a.pt"))
    torch.save(torch.zeros(1).expand(2**40), tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="contiguous"):
        read_torch_file(FILES, tmp_path / "b.pt").check_row("it")


def test_boxes_are_pieces() -> None:
    draw = random.Random(0)
    for _ in range(500):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 4)))
        start = tuple(draw.randrange(size) for size in shape)
        size = tuple(draw.randint(1, whole - at) for whole, at in zip(shape, start, strict=True))
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        box = full[tuple(slice(at, at + count) for at, count in zip(start, size, strict=True))].reshape(-1)
        found = torch.full_like(box, -1)
        for piece, first in pieces_of_box(shape, start, size):
            for whole, local, count in zip(*(column.tolist() for column in piece.spans()), strict=True):
                found[first + local : first + local + count] = torch.arange(whole, whole + count)
        assert torch.equal(found, box), (shape, start, size)


# ------------------------------------------------------------------ hostile


def rewritten(path: Path, changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Replace entries of the archive."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, changes.get(name.split("/", 1)[1], data))


class Runs:
    """Unpickling this would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_a_hostile_checkpoint_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module": {"weight": torch.ones(2)}, "client": Runs()}, "a.pt")
    found = read_torch_file(FILES, tmp_path / "a.pt")
    assert isinstance(found["client"], PickledObject) and [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert torch.equal(values(found["module"]["weight"]), torch.ones(2))
    torch.load("a.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "torch.load would run it"


REBUILT = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    b"X\x01\0\0\0%sX\x03\0\0\0cpuK\x04tQ%stR."
)
"""A tensor of the storage and the place that are filled in."""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (REBUILT % (b"9", b"K\0K\x04\x85K\x01\x85"), "no uncompressed entry 'data/9'"),
        (REBUILT % (b"0", b"K\0K\x05\x85K\x01\x85"), "but the storage has only 16 bytes"),
        (REBUILT % (b"0", b"K\x01K\x04\x85K\x01\x85"), "but the storage has only 16 bytes"),
        (REBUILT % (b"0", b"J\xff\xff\xff\xffK\x04\x85K\x01\x85"), "unknown dtype or shape"),
        (REBUILT % (b"0", b"K\0K\x04\x85K\x01K\x01\x86"), "unknown dtype or shape"),
        (REBUILT % (b"0", b"K\0X\x01\0\0\0a\x85K\x01\x85"), "unknown dtype or shape"),
        (REBUILT.replace(b"Float", b"Evil.") % (b"0", b"K\0K\x04\x85K\x01\x85"), "which cannot be read"),
        (pickle.dumps([1])[:-1], "damaged"),
    ],
)
def test_damaged_tensors_are_refused(data: bytes, words: str, tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", {"data.pkl": data})
    with pytest.raises(CheckpointError, match=words):
        read_torch_file(FILES, tmp_path / "a.pt")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(torch.ones(4), path)
    sound = path.read_bytes()
    rewritten(path, {"byteorder": b"big"})
    with pytest.raises(CheckpointError, match="big-endian"):
        read_torch_file(FILES, path)
    path.write_bytes(sound)
    rewritten(path, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="no uncompressed entry"):
        read_torch_file(FILES, path)
    torch.save(torch.ones(4), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch 1\.6 or later"):
        read_torch_file(FILES, path)
    for cut in (0, 10, len(sound) // 2, len(sound) - 1):
        path.write_bytes(sound[:cut])
        with pytest.raises(CheckpointError, match="damaged"):
            read_torch_file(FILES, path)
    path.unlink()
    path.symlink_to(tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="link"):
        read_torch_file(FILES, path)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_mutated_files_end_in_one_sentence(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0), "b": [torch.ones(2, 3), {"c": "text"}]}, tmp_path / "a.pt")
    sound, draw, path = (tmp_path / "a.pt").read_bytes(), random.Random(0), tmp_path / "b.pt"
    refused = 0
    for _ in range(1500):
        data = bytearray(sound)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        try:
            read_torch_file(FILES, path)
        except CheckpointError:
            refused += 1
    assert refused > 300
