"""Checkpoints that somebody has made to harm, with a right COMMIT and right hashes where that gets them further in."""

import hashlib
import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from engine.checkpoint.format.checked_blocks import hash_blocks

MODEL, OPTIM = "model/model-00001-of-00001.safetensors", "optim/optim-00000.safetensors"
STATE, MANIFEST, SUMS = "state/rank-00000.safetensors", "manifest.json", "checksums.safetensors"
WEIGHT = "param/up.weight"
Attack = Callable[[Path], object]


class Bomb:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/trine-checkpoint-ran-code",)


PICKLE = pickle.dumps(Bomb())


def manifest_of(step: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((step / MANIFEST).read_bytes())
    return found


def commit(step: Path, text: bytes) -> None:
    """Any manifest with a COMMIT that fits it."""
    (step / MANIFEST).write_bytes(text)
    fields = {"manifest_bytes": len(text), "manifest_sha256": hashlib.sha256(text).hexdigest()}
    (step / "COMMIT").write_bytes(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def seal(step: Path, manifest: dict[str, Any], hashes: dict[str, Any] | None = None) -> None:
    """Sizes, hashes, signature and COMMIT of what is there now."""
    found = {}
    for entry in manifest["files"]:
        path = step / entry["name"]
        try:
            data = path.read_bytes() if path.is_file() else None
        except (OSError, ValueError):  # a name that no file can have
            continue
        if data is not None:
            entry["bytes"] = len(data)
            found[entry["name"]] = hash_blocks(memoryview(data))
    data = safetensors.numpy.save({**found, **(hashes or {})})
    (step / SUMS).write_bytes(data)
    manifest["checksum"] |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    try:
        model = {n: t for n, t in manifest["tensors"].items() if n.startswith(("param/", "buffer/"))}
        rows = [(name, tensor["dtype"], tuple(tensor["shape"])) for name, tensor in sorted(model.items())]
        manifest["signature"] = hashlib.sha256(repr(rows).encode()).hexdigest()
    except (TypeError, KeyError, AttributeError):
        pass
    commit(step, json.dumps(manifest).encode())


def with_manifest(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = manifest_of(step)
    change(manifest)
    seal(step, manifest)


def with_file(step: Path, name: str, data: bytes) -> None:
    (step / name).write_bytes(data)
    seal(step, manifest_of(step))


def header_of(step: Path, name: str, change: Callable[[dict[str, Any]], Any], text: bytes | None = None) -> None:
    """Another header over the same bytes."""
    data = (step / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    new = text if text is not None else json.dumps(header).encode()
    with_file(step, name, len(new).to_bytes(8, "little") + new + data[8 + length :])


def put(path: tuple[str | int, ...], value: Any) -> Attack:
    """A value anywhere in the manifest; everything else fits it."""

    def change(manifest: dict[str, Any]) -> None:
        inner: Any = manifest
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return partial(with_manifest, change=change)


def put_after_seal(path: tuple[str | int, ...], value: Any) -> Attack:
    """The same for what sealing computes."""

    def attack(step: Path) -> None:
        manifest = manifest_of(step)
        inner: Any = manifest
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        commit(step, json.dumps(manifest).encode())

    return attack


def in_header(name: str, key: str, field: str, value: Any) -> Attack:
    return partial(header_of, name=name, change=lambda header: header[key].__setitem__(field, value))


def link(name: str, target: str | None = None) -> Attack:
    """A link in place of a file or folder; without a target to a sound copy outside."""

    def attack(step: Path) -> None:
        outside = step.parent.parent / f"outside of {step.parent.name}"
        (step / name).rename(outside)
        (step / name).symlink_to(target if target is not None else outside)

    return attack


def in_place_of(name: str, make: Callable[[Path], Any]) -> Attack:
    def attack(step: Path) -> None:
        (step / name).unlink()
        make(step / name)

    return attack


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path.name)
    os.chdir(here)


def sparse(name: str, size: int) -> Attack:
    def attack(step: Path) -> None:
        os.truncate(step / name, size)

    return attack


def sparse_everywhere(step: Path) -> None:
    """A manifest of 1 GiB that COMMIT confirms."""
    os.truncate(step / MANIFEST, 1 << 30)
    fields = {"manifest_bytes": 1 << 30, "manifest_sha256": "0" * 64}
    (step / "COMMIT").write_bytes(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def sparse_model(step: Path) -> None:
    """A file of 1 TiB; the manifest agrees, and says it has a list of hashes for it."""
    manifest = manifest_of(step)
    os.truncate(step / MODEL, 1 << 40)
    next(entry for entry in manifest["files"] if entry["name"] == MODEL)["bytes"] = 1 << 40
    commit(step, json.dumps(manifest).encode())


def many_families(manifest: dict[str, Any]) -> None:
    """As many kinds of moments as to fill the memory, none of which has values."""
    for index in range(5000):
        manifest["tensors"][f"f{index}/up.weight"] = {"dtype": "F32", "shape": [0], "pieces": []}


def bomb_of(name: str, shape: list[int], rows: Any) -> Attack:
    elements = 1
    for size in shape:
        elements *= size

    def change(manifest: dict[str, Any]) -> None:
        piece = {"file": 0, "key": "x", "rows": rows, "flat": [0, elements]}
        manifest["tensors"][name] = {"dtype": "F32", "shape": shape, "pieces": [piece]}

    return partial(with_manifest, change=change)


def retyped(name: str, dtype: str) -> Attack:
    """A tensor of another dtype, in header and manifest, of the same number of elements."""

    def attack(step: Path) -> None:
        manifest = manifest_of(step)
        tensor = manifest["tensors"][name]
        file = manifest["files"][tensor["pieces"][0]["file"]]["name"]
        width = {"C64": 8, "I32": 4, "BOOL": 1, "I64": 8}[dtype]
        data = (step / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        body, end = b"", 0
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            part = data[8 + length + start : 8 + length + stop]
            if key == tensor["pieces"][0]["key"]:
                part, entry["dtype"] = bytes((stop - start) // 4 * width), dtype
            body, entry["data_offsets"] = body + part, [end, end + len(part)]
            end += len(part)
        text = json.dumps(header).encode()
        (step / file).write_bytes(len(text).to_bytes(8, "little") + text + body)
        tensor["dtype"] = dtype
        seal(step, manifest)

    return attack


def state_with(change: Callable[[dict[str, Any]], None]) -> Attack:
    """Other raw states of generators, sealed."""

    def attack(step: Path) -> None:
        tensors = safetensors.numpy.load((step / STATE).read_bytes())
        change(tensors)
        with_file(step, STATE, safetensors.numpy.save(tensors))

    return attack


def as_bytes(value: Any) -> Any:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * depth + b"]" * depth + b"}"


PIECE: tuple[str | int, ...] = ("tensors", WEIGHT, "pieces", 0)
UP: tuple[str | int, ...] = ("tensors", WEIGHT)
BIG: dict[str, Any] = {
    "no number": "x",
    "negative": -1,
    "float": 1.0,
    "nan": float("nan"),
    "true": True,
    "huge": 10**400,
}

ATTACKS: dict[str, Attack] = {
    **{f"pickle as {name}": partial(with_file, name=name, data=PICKLE) for name in (MODEL, OPTIM, STATE)},
    "pickle as manifest": partial(commit, text=PICKLE),
    "pickle as COMMIT": lambda step: (step / "COMMIT").write_bytes(PICKLE),
    "pickle as checksums": lambda step: (step / SUMS).write_bytes(PICKLE),
    "zip as model": partial(with_file, name=MODEL, data=b"PK\x03\x04" + PICKLE),
    **{f"link {name}": link(name) for name in ("COMMIT", MANIFEST, SUMS, MODEL, OPTIM, STATE, "model", "optim")},
    "link to itself": link(MANIFEST, MANIFEST),
    "link to zeros": link(MODEL, "/dev/zero"),
    "link to the process": link(MODEL, "/proc/self/mem"),
    "link to a terminal": link("COMMIT", "/dev/tty"),
    **{f"pipe {name}": in_place_of(name, os.mkfifo) for name in ("COMMIT", MANIFEST, SUMS, MODEL)},
    "folder as file": in_place_of(MODEL, Path.mkdir),
    "socket": in_place_of(MODEL, bind),
    **{
        f"name {name[:20]!r}": put(("files", 0, "name"), name)
        for name in (
            "../manifest.json", "/etc/passwd", "model/../../x", "model/./x", "model//x", "C:\\x", "model/x\0y",
            "model/ä", "model/" + "x" * 5000, "", "model/", "model/..", "./model/x", "latest", MANIFEST,
        )
    },
    "a file twice": put(("files", 1, "name"), "model/" + MODEL.split("/")[1]),
    "header of 2**63": lambda step: with_file(step, MODEL, (1 << 63).to_bytes(8, "little") + bytes(5000)),
    "header over all": lambda step: with_file(step, MODEL, (4992).to_bytes(8, "little") + b"{" * 4992),
    "header nested": partial(header_of, name=MODEL, change=len, text=nested(1_000_000)),
    "header with a key twice": partial(header_of, name=MODEL, change=len, text=b'{"a":{},"a":{}}'),
    "header of objects": partial(
        header_of, name=MODEL, change=len, text=b"{" + b",".join(b'"%d":{}' % i for i in range(100_000)) + b"}"
    ),
    "header overlapping": in_header(MODEL, "up.weight", "data_offsets", [0, 2332]),
    "header beyond": in_header(MODEL, "up.weight", "data_offsets", [1 << 40, (1 << 40) + 2332]),
    "header negative": in_header(MODEL, "up.weight", "data_offsets", [-2332, 0]),
    "header float": in_header(MODEL, "up.weight", "data_offsets", [0.0, 2332.0]),
    "header nan": in_header(MODEL, "up.weight", "shape", [float("nan")]),
    "header dtype": in_header(MODEL, "up.weight", "dtype", "object"),
    "header dtype list": in_header(MODEL, "up.weight", "dtype", ["F32"]),
    "header shape bomb": in_header(MODEL, "up.weight", "shape", [1 << 31, 1 << 31]),
    "header shape of ones": in_header(MODEL, "up.weight", "shape", [1] * 100_000),
    "header without tensor": partial(header_of, name=MODEL, change=lambda header: header.clear()),
    "pieces overlapping": put((*UP, "pieces"), [{"file": 0, "key": "up.weight", "rows": None, "flat": [0, 583]}] * 2),
    "pieces none": put((*UP, "pieces"), []),
    "piece beyond": put((*PIECE, "flat"), [1, 584]),
    "piece falling": put((*PIECE, "flat"), [583, 0]),
    "piece rows beyond": put((*PIECE, "rows"), [0, [[0, 54]]]),
    "piece dim beyond": put((*PIECE, "rows"), [1 << 62, [[0, 53]]]),
    "piece rows true": put((*PIECE, "rows"), [0, [[False, 53]]]),
    "piece of another key": put((*PIECE, "key"), "down.weight.x"),
    "piece of a smaller tensor": put((*PIECE, "key"), "up.bias"),
    "piece of another file": put((*PIECE, "file"), 2),
    "piece of no file": put((*PIECE, "file"), 1 << 62),
    "shape of 2**62": bomb_of(WEIGHT, [1 << 31, 1 << 31], None),
    "columns of 2**62": bomb_of(WEIGHT, [1 << 31, 1 << 31], [1, [[0, 1 << 31]]]),
    "columns of moments of 2**62": bomb_of("exp_avg/up.weight", [1 << 31, 1 << 31], [1, [[0, 1 << 31]]]),
    "columns of a buffer of 2**62": bomb_of("buffer/x", [1 << 31, 1 << 31], [1, [[0, 1 << 31]]]),
    "shape of 2**63": put((*UP, "shape"), [1 << 31, 1 << 31, 2]),
    "moments of 5000 kinds": partial(with_manifest, change=many_families),
    "weight complex": retyped(WEIGHT, "C64"),
    "weight whole numbers": retyped(WEIGHT, "I32"),
    "weight bool": retyped(WEIGHT, "BOOL"),
    "moment complex": retyped("exp_avg/up.weight", "C64"),
    "moment bool": retyped("exp_avg/up.weight", "BOOL"),
    **{f"step {what}": put(("step",), value) for what, value in BIG.items()},
    **{f"bytes {what}": put_after_seal(("files", 0, "bytes"), value) for what, value in BIG.items()},
    "version": put(("version",), "9.0"),
    "format": put(("format",), "trine-checkpoint-x"),
    "algorithm": put(("checksum", "algorithm"), "md5"),
    "blocks of a byte": put(("checksum", "block_bytes"), 1),
    "blocks of 2**62": put(("checksum", "block_bytes"), 1 << 62),
    "sha256 short": put_after_seal(("checksum", "sha256"), "00"),
    "sha256 of another length": put_after_seal(("checksum", "bytes"), 1 << 50),
    "hashes too few": lambda step: seal(step, manifest_of(step), {MODEL: np.zeros(0, dtype=np.uint64)}),
    "hashes too many": lambda step: seal(step, manifest_of(step), {MODEL: np.zeros(9, dtype=np.uint64)}),
    "hashes as floats": lambda step: seal(step, manifest_of(step), {MODEL: np.zeros(1, dtype=np.float64)}),
    "hashes wrong": lambda step: seal(step, manifest_of(step), {MODEL: np.zeros(1, dtype=np.uint64)}),
    "manifest of 1 GiB": sparse(MANIFEST, 1 << 30),
    "manifest of 1 GiB, committed": sparse_everywhere,
    "COMMIT of 1 TiB": sparse("COMMIT", 1 << 40),
    "checksums of 1 TiB": sparse(SUMS, 1 << 40),
    "model of 1 TiB": sparse_model,
    "manifest nested": lambda step: commit(step, nested(1_000_000)),
    "manifest of lists": lambda step: commit(step, b'{"a":[' + b",".join([b"{}"] * 600_000) + b"]}"),
    "manifest with a key twice": lambda step: commit(step, b'{"step":1,"step":2}'),
    "manifest with nan": put(("user",), float("nan")),
    "counters of text": put(("progress", "update", "made"), "1"),
    "counters negative": put(("progress", "update", "made"), -1),
    "counters of another step": put(("progress", "update", "made"), 7),
    "no counters": put(("progress",), {}),
    "tracked list": put(("progress", "tracked"), []),
    "no groups": put(("optimizer", "groups"), None),
    "groups of text": put(("optimizer", "groups"), ["x"]),
    "optimizer's step": put(("optimizer", "groups", 0, "options"), {"step": -5}),
    "optimizer's step as text": put(("optimizer", "groups", 0, "options"), {"step": "x"}),
    "numbers with code": put(("optimizer", "numbers"), {"0": {"step": [1, "load"]}}),
    "optimizer by half a letter": put(("optimizer", "type"), "\ud800"),
    "grid of text": put(("info", "grid"), "x"),
    "no grid": put(("info",), {}),
    "states of nothing": state_with(lambda tensors: tensors.clear()),
    "state too short": state_with(lambda tensors: tensors.update({"torch/0": np.zeros(3, dtype=np.uint8)})),
    "state of text": state_with(lambda tensors: tensors.update({"python": as_bytes("x")})),
    "state of huge numbers": state_with(
        lambda tensors: tensors.update({"python": as_bytes([3, [10**30] * 625, None])})
    ),
    "numpy's state of huge numbers": state_with(
        lambda tensors: tensors.update({"numpy": as_bytes({"state": {"key": [10**30], "pos": 0}})})
    ),
    "numpy's other generator": state_with(
        lambda tensors: tensors.update({"numpy": as_bytes({"bit_generator": "os.system", "state": {"key": [1]}})})
    ),
}  # fmt: skip
HARMLESS: dict[str, Attack] = {
    "a pickle beside": lambda step: (step / "model" / "pytorch_model.bin").write_bytes(PICKLE),
    "a link beside": lambda step: (step / "model" / "more").symlink_to("/etc"),
    "code in the client state": put(("user",), {"__reduce__": "os.system", "py/object": "os.system"}),
    "unknown fields": put(("more",), {"a": 1}),
}
"""What must load as if it were not there."""


def make(attack: Attack, sound: Path, run: Path) -> None:
    """A run whose only checkpoint is attacked."""
    run.mkdir(parents=True)
    shutil.copytree(sound, run / sound.name)
    attack(run / sound.name)
