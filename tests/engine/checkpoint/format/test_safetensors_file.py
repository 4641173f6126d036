"""Our writer and reader of safetensors against the package itself, and files that are packed anew."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.format import safetensors_file as module
from engine.checkpoint.format.checked_blocks import hash_blocks
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.host_image import ImageMemory, as_bytes, as_tensor, kind_of, make_image, write_file
from engine.checkpoint.format.safetensors_file import (
    DTYPES,
    TensorKind,
    code_of,
    lay_out,
    read_header,
    repack,
    shard_bytes,
)
from engine.errors import CheckpointError, EngineError

NAMES = sorted(DTYPES.values())


def values(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Random bits, so that NaN, subnormal and negative numbers are among them; valid bytes where bool is asked."""
    kind, own = TensorKind(code_of(dtype), shape), getattr(torch, dtype)
    generator = torch.Generator().manual_seed(len(dtype))
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (kind.bytes,), dtype=torch.uint8, generator=generator)
    return bits.view(own).view(shape) if kind.bytes else torch.empty(shape, dtype=own)


def zoo() -> dict[str, Tensor]:
    """Every dtype: 0-d, empty, odd sizes."""
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (7,), (5, 3), (1, 2, 3, 4)]
    return {f"{dtype}.{index}": values(dtype, shape) for dtype in NAMES for index, shape in enumerate(shapes)}


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    image = make_image({k: kind_of(t) for k, t in tensors.items()}, {"format": "pt"}, ImageMemory(), "file")
    for key, tensor in tensors.items():
        image.tensor(key).copy_(tensor)
    write_file(Files(), path, image.memory, image.layout.size)


def read(path: Path) -> dict[str, Tensor]:
    data = path.read_bytes()
    header = read_header(lambda start, stop: data[start:stop], len(data), str(path))
    return {
        key: as_tensor(memoryview(bytearray(data[start : start + kind.bytes])), kind)
        for key, (kind, start) in header.items()
    }


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert bytes(as_bytes(found[key].contiguous())) == bytes(as_bytes(tensor)), key


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    write(tmp_path / "ours.safetensors", zoo())
    assert_same_bits(safetensors.torch.load_file(tmp_path / "ours.safetensors"), zoo())
    with safetensors.safe_open(tmp_path / "ours.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    safetensors.torch.save_file(zoo(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert_same_bits(read(tmp_path / "theirs.safetensors"), zoo())


def test_a_file_without_tensors(tmp_path: Path) -> None:
    write(tmp_path / "none.safetensors", {})
    assert safetensors.torch.load_file(tmp_path / "none.safetensors") == {} == read(tmp_path / "none.safetensors")


def test_tensors_begin_at_multiples_of_their_width() -> None:
    layout = lay_out({key: kind_of(tensor) for key, tensor in zoo().items()})
    assert len(layout.header) % 4096 == 0
    assert all(start % kind.width == 0 for kind, start in layout.places.values())


def test_names_of_all_kinds(tmp_path: Path) -> None:
    tensors = {name: torch.ones(2) for name in ('quote"', "back\\slash", "ä λ 漢", "a.b/c", " ", "\n", "\x00")}
    write(tmp_path / "names.safetensors", tensors)
    assert_same_bits(safetensors.torch.load_file(tmp_path / "names.safetensors"), tensors)


def test_a_dtype_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"complex128 cannot be stored; safetensors has float64"):
        kind_of(torch.zeros(1, dtype=torch.complex128))


def test_a_used_image_is_clean_again() -> None:
    """The memory of an earlier, larger file leaves nothing in the padding of the last page."""
    memory = ImageMemory()
    large = make_image({"x": TensorKind("U8", (9000,))}, {}, memory, "file")
    large.tensor("x").fill_(255)
    small = make_image({"x": TensorKind("U8", (10,))}, {}, memory, "file")
    small.tensor("x").fill_(1)
    assert bytes(small.memory[small.layout.size - 10 :]) == b"\x01" * 10 + bytes(4096 - 10)


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "no length": b"1234567",
    "length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "length beyond 64 bits signed": b"\xff" * 8 + b"{}",
    "not json": header({})[:8] + b"{[",
    "not utf-8": (2).to_bytes(8, "little") + b"\xff\xfe",
    "a list": header([]),
    "nan": (5).to_bytes(8, "little") + b'{"a":NaN}'[:5],
    "entry is no object": header({"x": 1}),
    "no dtype": header({"x": {"shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
    "unknown dtype": header({"x": ENTRY | {"dtype": "F31"}}) + bytes(8),
    "negative shape": header({"x": ENTRY | {"shape": [-2]}}) + bytes(8),
    "float shape": header({"x": ENTRY | {"shape": [2.0]}}) + bytes(8),
    "bool shape": header({"x": ENTRY | {"shape": [True, 2]}}) + bytes(8),
    "text shape": header({"x": ENTRY | {"shape": "2"}}) + bytes(8),
    "one offset": header({"x": ENTRY | {"data_offsets": [0]}}) + bytes(8),
    "offsets of another size": header({"x": ENTRY | {"data_offsets": [0, 9]}}) + bytes(9),
    "falling offsets": header({"x": ENTRY | {"data_offsets": [8, 0]}}) + bytes(8),
    "beyond the end": header({"x": ENTRY}) + bytes(7),
    "bytes behind the last": header({"x": ENTRY}) + bytes(9),
    "a gap": header({"x": ENTRY, "y": ENTRY | {"data_offsets": [12, 20]}}) + bytes(20),
    "an overlap": header({"x": ENTRY, "y": ENTRY | {"data_offsets": [4, 12]}}) + bytes(12),
    "a bomb": header({"x": {"dtype": "F32", "shape": [2**31, 2**31, 2**31], "data_offsets": [0, 8]}}) + bytes(8),
    "many dims": header({"x": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}) + bytes(4),
    "a key twice": (34).to_bytes(8, "little") + b'{"x":{"dtype":"F32"},"x":{"a": 1}}',
    "nested": header({"x": ENTRY})[:8] + b"[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_headers_are_refused(name: str) -> None:
    data = DAMAGED[name]
    with pytest.raises(CheckpointError, match="some file"):
        read_header(lambda start, stop: data[start:stop], len(data), "some file")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "whole.safetensors", {"x": torch.ones(3), "y": torch.ones(2, dtype=torch.int8)})
    data = (tmp_path / "whole.safetensors").read_bytes()
    for size in (*range(0, 200), *range(4000, len(data))):
        with pytest.raises(CheckpointError):
            read_header(lambda start, stop, cut=data[:size]: cut[start:stop], size, "file")  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1 << 18, (1 << 18) + 1, (1 << 24) - 1, (1 << 24) + 4097])
def test_a_file_is_written_and_hashed_as_it_is(tmp_path: Path, size: int) -> None:
    memory = ImageMemory().take("file", size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    memory[:size] = data
    hashes = write_file(Files(), tmp_path / "file", memory, size)
    assert (tmp_path / "file").read_bytes() == data
    assert hashes.tolist() == hash_blocks(memoryview(data)).tolist() and len(hashes) == -(-size // (1 << 18))


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
        with pytest.raises(EngineError, match=r"max_shard_size was given .*; pass bytes above 0"):
            shard_bytes(size)
