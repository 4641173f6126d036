"""Token files: the bytes of Megatron's index, documents of ``.npy``, and files that are none."""

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.data import IndexedTokens, NpyTokens
from engine.data.windows import Documents
from engine.errors import EngineError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}

BY_HAND = bytes.fromhex(
    "4d4d4944494458 0000"  # MMIDIDX, two zeros
    "0100000000000000 08"  # version 1, u16
    "0300000000000000 0300000000000000"  # three sequences, three borders: two documents
    "02000000 01000000 03000000"  # tokens of the sequences
    "0000000000000000 0400000000000000 0600000000000000"  # where they begin, in bytes
    "0000000000000000 0200000000000000 0300000000000000"  # sequences 0 and 1 are a document, 2 is one
)


def write(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "int32") -> None:
    """Documents of sequences, as the preprocessing writes them."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    sizes = [sequence.nbytes for sequence in sequences]
    borders = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(borders))
        + struct.pack(f"<{len(sequences)}i", *(sequence.size for sequence in sequences))
        + struct.pack(f"<{len(sequences)}q", *(sum(sizes[:at]) for at in range(len(sizes))))
        + struct.pack(f"<{len(borders)}q", *borders)
    )


def read(tokens: IndexedTokens | NpyTokens) -> list[list[int]]:
    return [tokens.tokens(index).tolist() for index in range(len(tokens))]


def test_bytes_that_were_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "text.idx").write_bytes(BY_HAND)
    (tmp_path / "text.bin").write_bytes(struct.pack("<6H", 10, 11, 12, 60000, 21, 22))
    tokens = IndexedTokens(tmp_path / "text")
    assert read(tokens) == [[10, 11, 12], [60000, 21, 22]]
    assert tokens.lengths.tolist() == [3, 3] and isinstance(tokens, Documents)
    assert tokens[1]["input_ids"].tolist() == [60000, 21, 22] and tokens[1]["labels"].dtype == np.int64
    with pytest.raises(IndexError):
        tokens.tokens(2)
    write(tmp_path / "same", [[[10, 11], [12]], [[60000, 21, 22]]], "uint16")
    assert (tmp_path / "same.idx").read_bytes() == BY_HAND, "the writer of these tests writes the format"


@pytest.mark.parametrize("dtype", CODES)
def test_every_type_of_token(tmp_path: Path, dtype: str) -> None:
    documents: list[list[list[int]]] = [[[1, 2, 3]], [], [[4], [], [5, 6]], [[]], [[7]]]
    write(tmp_path / "a.b", documents, dtype)
    tokens = IndexedTokens(tmp_path / "a.b.bin")
    assert read(tokens) == [[1, 2, 3], [], [4, 5, 6], [], [7]]
    assert read(pickle.loads(pickle.dumps(tokens))) == read(tokens)
    assert len(pickle.dumps(tokens)) < 500, "a worker maps the file itself"
    index = tmp_path / "a.b.idx"
    index.write_bytes(index.read_bytes() + bytes(6))  # modes of a multimodal file
    assert read(IndexedTokens(index)) == read(tokens)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", [[[1, 2, 3]], [[4, 5]]])
    index, data = tmp_path / "t.idx", tmp_path / "t.bin"
    good, tokens = index.read_bytes(), data.read_bytes()

    def refused(content: bytes, match: str, stored: bytes = tokens) -> None:
        index.write_bytes(content)
        data.write_bytes(stored)
        with pytest.raises(EngineError, match=match):
            IndexedTokens(tmp_path / "t")

    refused(b"PK" + good[2:], "does not begin like a Megatron index")
    refused(good[:20], "does not begin like a Megatron index")
    refused(good[:9] + bytes([2]) + good[10:], "version 2, type 4")
    refused(good[:17] + bytes([7]) + good[18:], "floating-point numbers")
    refused(good[:-1], "has 81 bytes; 2 sequences and 3 borders of documents need 82")
    refused(good[:-8] + struct.pack("<q", 1), "do not rise from 0 to 2, the number of sequences")
    refused(good, r"up to token 5 and .* has 4 tokens, but", tokens[:-4])
    refused(good[:42] + struct.pack("<q", 4) + good[50:], "must follow each other without gaps")
    refused(b"", "cannot be read")
    with pytest.raises(EngineError, match=r"none\.idx cannot be read"):
        IndexedTokens(tmp_path / "none")


def test_documents_of_npy_files(tmp_path: Path) -> None:
    flat, rows = tmp_path / "flat.npy", tmp_path / "rows.npy"
    np.save(flat, np.array([5, 0, 6, 7, 0, 8], np.uint16))
    np.save(rows, np.arange(6).reshape(2, 3))
    assert read(NpyTokens(flat)) == [[5, 0, 6, 7, 0, 8]]
    assert read(NpyTokens(flat, end=0)) == [[5, 0], [6, 7, 0], [8]]
    assert read(NpyTokens(rows)) == [[0, 1, 2], [3, 4, 5]]
    assert read(pickle.loads(pickle.dumps(NpyTokens(flat, end=0)))) == [[5, 0], [6, 7, 0], [8]]
    np.save(rows, np.zeros(3))
    with pytest.raises(EngineError, match="holds float64 in 1 dims; token files hold integers"):
        NpyTokens(rows)
    flat.write_bytes(b"text")
    with pytest.raises(EngineError, match=r"is not a readable \.npy file"):
        NpyTokens(flat)
