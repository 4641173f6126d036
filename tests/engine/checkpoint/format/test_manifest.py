"""The manifest: out and in again, and what is refused."""

import copy
import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.format import manifest as manifest_file
from engine.checkpoint.format.manifest import Checksum, Manifest, StoredPiece, StoredTensor, from_fields, to_json
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import DTYPES, TensorKind
from engine.checkpoint.format.strict_json import Fields, parse
from engine.errors import CheckpointError
from tests.engine.checkpoint.format.test_hostile import ANY
from tests.engine.checkpoint.format.test_pieces import covers

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FILES = st.from_regex(r"(model|optim|state)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,9}", fullmatch=True)


def from_json(data: bytes, what: str) -> Manifest:
    return from_fields(Fields(parse(data, what), what))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    files = draw(st.dictionaries(FILES, st.integers(0, 2**63 - 1), min_size=1, max_size=4))
    tensors = {}
    for name in draw(st.lists(NAMES, max_size=3)):
        shape, pieces = draw(covers())
        stored = [StoredPiece(draw(st.sampled_from(sorted(files))), draw(NAMES), piece) for piece in pieces]
        folder = draw(st.sampled_from(("param", "buffer", "master", "exp_avg")))
        tensors[f"{folder}/{name}"] = StoredTensor(
            TensorKind(draw(st.sampled_from(sorted(DTYPES))), shape), tuple(stored)
        )
    checksum = Checksum(
        draw(st.sampled_from(("xxh3-64", "crc32"))), 1 << draw(st.integers(12, 24)), draw(NAMES),
        draw(st.integers(0, 2**40)),
    )  # fmt: skip
    objects = st.dictionaries(NAMES, ANY, max_size=2)
    return Manifest(
        step=draw(st.integers(0, 2**63 - 1)),
        attempt=draw(NAMES),
        tensors=tensors,
        files=files,
        checksum=checksum,
        aliases=draw(st.dictionaries(NAMES, NAMES)),
        info=draw(objects),
        progress=draw(objects),
        optimizer=draw(objects),
        user=draw(ANY),
    )


@settings(max_examples=60, deadline=None)
@given(manifests())
def test_out_and_in_again(manifest: Manifest) -> None:
    data = to_json(manifest)
    assert from_json(data, "manifest") == manifest and to_json(from_json(data, "manifest")) == data


def many(parts: int) -> bytes:
    """A manifest of one tensor, of which each piece is a row: of ``parts`` parts, or all of one."""
    manifest, count = sound(), max(parts, 9)
    flats = [[0, 1]] * count if parts > 1 else [[row, row + 1] for row in range(count)]
    rows = [[0, [[row, row + 1]]] if parts > 1 else [0, [[0, count]]] for row in range(count)]
    pieces = [{"file": 0, "key": "w", "rows": row, "flat": flat} for row, flat in zip(rows, flats, strict=True)]
    manifest["tensors"]["param/w"] = {"dtype": "F32", "shape": [count], "pieces": pieces}
    return json.dumps(manifest).encode()


def test_a_part_is_made_once_and_there_are_as_many_as_tensor_ranks() -> None:
    made: list[Part] = []

    def part(rows: Any, shape: tuple[int, ...], what: str) -> Part:
        made.append(Part(shape, 0, ((0, 9),)))
        return made[-1]

    with patch.object(manifest_file, "_part", part), pytest.raises(CheckpointError, match="signature"):
        from_json(many(1), "manifest")
    assert len(made) == 2, "looked at closely once: to check the piece, and to keep its part"
    with pytest.raises(
        CheckpointError, match=r"'param/w'\] has more than 4096 parts, more than any number of tensor ranks"
    ):
        from_json(many(4097), "manifest")
    with pytest.raises(CheckpointError, match="signature"):
        from_json(many(4096), "manifest")


def sound() -> dict[str, Any]:
    """A manifest of one cut tensor."""
    shape = (4, 6)
    part = Part(shape, 0, ((0, 1), (2, 3)))
    pieces = [
        StoredPiece("model/a.safetensors", "w", Piece(part, 0, 12)),
        StoredPiece("optim/b.safetensors", "w", Piece(Part(shape, 0, ((1, 2), (3, 4))), 0, 12)),
    ]
    tensor = StoredTensor(TensorKind("F32", shape), tuple(pieces))
    files = {"model/a.safetensors": 5000, "optim/b.safetensors": 4800}
    manifest = Manifest(
        step=7,
        attempt="ab12",
        tensors={"param/w": tensor},
        files=files,
        checksum=Checksum("crc32", 4096, "0" * 64, 4104),
    )
    value: dict[str, Any] = json.loads(to_json(manifest))
    return value


W = ("tensors", "param/w")
CHANGES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("format",), "other", "format 'other', but this engine reads"),
    (("format",), 3, "format is 3"),
    (("version",), "2.0", r"version '2.0', but this engine reads 1.x"),
    (("version",), "10.0", "version '10.0'"),
    (("version",), 1.0, "version is 1.0"),
    (("step",), -1, "step is -1"),
    (("step",), 1.5, "step is 1.5"),
    (("step",), "7", "step is '7'"),
    (("attempt",), None, "attempt is None"),
    (("signature",), "0" * 64, "signature"),
    (("files",), {}, "files is {}"),
    (("files", 0, "name"), "../a.safetensors", r"names file '\.\./a"),
    (("files", 0, "name"), "/etc/passwd", "names file '/etc/passwd'"),
    (("files", 0, "name"), "model/../../a", "names file"),
    (("files", 0, "name"), "model/a/b", "names file"),
    (("files", 0, "name"), "model/.hidden", "names file"),
    (("files", 0, "name"), "model/a\n", "names file"),
    (("files", 0, "name"), "manifest.json", "names file"),
    (("files", 0, "name"), "optim/b.safetensors", "names file"),
    (("files", 0, "bytes"), -1, "bytes is -1"),
    (("files", 0, "bytes"), 2**63, "bytes is"),
    (("checksum",), None, "checksum is None"),
    (("checksum", "algorithm"), "md5", "algorithm 'md5' is none of"),
    (("checksum", "block_bytes"), 0, "block_bytes is 0, not a power of 2"),
    (("checksum", "block_bytes"), 4097, "block_bytes is 4097, not"),
    (("checksum", "block_bytes"), 1 << 30, "block_bytes"),
    ((*W, "dtype"), "F31", "dtype 'F31' is none of"),
    ((*W, "dtype"), "BF16", "signature"),
    ((*W, "shape"), [6, 4], "outside the part"),
    ((*W, "shape"), [2**31, 2**31, 2**31], "too large for any tensor"),
    ((*W, "shape"), "24", "not a list"),
    ((*W, "pieces"), [], "have 0 elements and must cover its 24 elements exactly once"),
    ((*W, "pieces"), None, "pieces is None"),
    ((*W, "pieces", 0), None, "is None, not a dict"),
    ((*W, "pieces", 0, "file"), 2, "file number 2 is not below 2"),
    ((*W, "pieces", 0, "file"), -1, "file is -1"),
    ((*W, "pieces", 0, "file"), True, "file is True"),
    ((*W, "pieces", 0, "key"), 1, "key is 1"),
    ((*W, "pieces", 0, "flat"), [0], "elements"),
    ((*W, "pieces", 0, "flat"), [0, 13], "outside the part"),
    ((*W, "pieces", 0, "flat"), [12, 0], "outside the part"),
    ((*W, "pieces", 0, "flat"), [0, 11], "must cover"),
    ((*W, "pieces", 0, "flat"), [1, 12], "must cover"),
    ((*W, "pieces", 0, "rows"), None, "must cover"),
    ((*W, "pieces", 0, "rows"), [0], "rows are not"),
    ((*W, "pieces", 0, "rows"), [2, [[0, 1]]], "ascending ranges inside shape"),
    ((*W, "pieces", 0, "rows"), [0, []], "ascending ranges inside shape"),
    ((*W, "pieces", 0, "rows"), [0, [[0, 1], [0, 1]]], "ascending ranges inside shape"),
    ((*W, "pieces", 0, "rows"), [0, [[2, 3], [0, 1]]], "ascending ranges inside shape"),
    ((*W, "pieces", 0, "rows"), [0, [[0, 1], [2, 5]]], "ascending ranges inside shape"),
    ((*W, "pieces", 0, "rows"), [0, [[0, 1, 2]]], "ascending ranges inside shape"),
    ((*W, "pieces", 0, "rows"), [0, [[0, 1], []]], "ascending ranges inside shape"),
    ((*W, "pieces", 0, "rows"), [0, [[0, 2]]], "must cover"),
    (("aliases",), [], r"aliases is \[\]"),
    (("aliases", "x"), 1, "not a string"),
    (("progress",), None, "progress is None"),
    (("optimizer",), [], "optimizer is"),
    (("info",), 1, "info is 1"),
]


@pytest.mark.parametrize(("path", "value", "said"), CHANGES, ids=lambda given: str(given)[:40])
def test_what_is_refused(path: tuple[str | int, ...], value: Any, said: str) -> None:
    changed = copy.deepcopy(sound())
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(CheckpointError, match=said) as caught:
        from_json(json.dumps(changed).encode(), "manifest.json")
    assert str(caught.value).startswith("manifest.json")


@pytest.mark.parametrize("key", sorted(sound()))
def test_every_field_is_needed(key: str) -> None:
    changed = {name: value for name, value in sound().items() if name != key}
    if key == "user":
        assert from_json(json.dumps(changed).encode(), "manifest.json").user is None
        return
    with pytest.raises(CheckpointError, match=r"^manifest.json"):
        from_json(json.dumps(changed).encode(), "manifest.json")


def test_the_sound_one_is_read_and_a_newer_minor_version_too() -> None:
    assert from_json(json.dumps(sound()).encode(), "manifest.json").step == 7
    assert from_json(json.dumps(sound() | {"version": "1.9", "more": 1}).encode(), "manifest.json").step == 7


def test_the_signature_knows_names_shapes_and_dtypes_of_the_model() -> None:
    one = from_json(json.dumps(sound()).encode(), "manifest.json")

    def with_tensor(name: str, kind: TensorKind) -> str:
        whole = StoredTensor(kind, (StoredPiece("model/a", "w", Part(kind.shape).whole()),))
        return Manifest(
            step=1, attempt="a", tensors={name: whole}, files={"model/a": 1}, checksum=one.checksum
        ).signature

    assert with_tensor("param/w", TensorKind("F32", (4, 6))) == one.signature
    others = [
        ("param/v", TensorKind("F32", (4, 6))),
        ("param/w", TensorKind("F16", (4, 6))),
        ("param/w", TensorKind("F32", (6, 4))),
    ]
    assert one.signature not in {with_tensor(*other) for other in others}
    assert with_tensor("master/w", TensorKind("F32", (4, 6))) == with_tensor("exp_avg/v", TensorKind("F16", (1,)))
