"""Files of tokens, memory-mapped: Megatron's ``.bin`` with its index ``.idx``, and NumPy's ``.npy``. Imports no torch.

The index, all numbers little-endian:

    9 bytes   MMIDIDX 0 0
    u64       version, 1
    u8        type of the tokens: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16
    u64, u64  number of sequences s; number of document borders d, one more than documents
    i32 [s]   tokens of each sequence
    i64 [s]   byte in the ``.bin`` at which each begins
    i64 [d]   the sequence at which each document begins, and s at the end
    i8  [s]   modes of the sequences, in multimodal files; not read

A dataset with ``lengths``, the tokens of each document, is packed without reading it: each rank reads its own rows.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_TYPES = MappingProxyType({1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_FLOATS = (6, 7)


@runtime_checkable
class Documents(Protocol):
    """Documents whose lengths are known without reading them."""

    lengths: NDArray[np.int64]
    """Tokens of each document."""

    def tokens(self, index: int) -> NDArray[Any]:
        """The tokens of a document, a view of the file."""


class _TokenFile:
    """What token files have in common: documents that are slices of one array of tokens."""

    def __init__(self, path: Path, stored: NDArray[Any], borders: NDArray[np.int64]) -> None:
        self.path = path
        self.lengths: NDArray[np.int64] = np.diff(borders)
        self._stored, self._borders = stored, borders

    def __len__(self) -> int:
        return self.lengths.size

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """``input_ids`` and ``labels`` of a document, int64 [its length], both the tokens themselves."""
        tokens = self.tokens(index).astype(np.int64)
        return {"input_ids": tokens, "labels": tokens.copy()}

    def tokens(self, index: int) -> NDArray[Any]:
        """The tokens of a document, a view of the file."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._stored[self._borders[index] : self._borders[index + 1]]


class IndexedTokens(_TokenFile):
    """Documents of a ``.bin`` and an ``.idx``, as Megatron's preprocessing writes them.

    Args:
        prefix: the path without the ending; one of the two files does too.

    Raises:
        EngineError: a file is missing, is no index, is cut off, or does not fit to the other.
    """

    def __init__(self, prefix: str | Path) -> None:
        given = Path(prefix)
        self.prefix = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
        index, data = (self.prefix.with_name(self.prefix.name + ending) for ending in (".idx", ".bin"))
        raw = _mapped(index)
        if raw[:9].tobytes() != _MAGIC or raw.size < _HEADER_BYTES:
            raise EngineError(f"{index} does not begin as an index of Megatron does. Give the prefix of such a pair.")
        version, sequences, borders = (int(raw[at : at + 8].view("<u8")[0]) for at in (9, 18, 26))
        kind = int(raw[17])
        if version != 1 or kind not in _TYPES:
            what = "floating-point numbers" if kind in _FLOATS else f"version {version}, type {kind}"
            raise EngineError(f"{index} has {what}; tokens are integers of version 1. Write it anew with such a type.")
        least = _HEADER_BYTES + 12 * sequences + 8 * borders
        if raw.size not in (least, least + sequences):
            raise EngineError(
                f"{index} has {raw.size} bytes; {sequences} sequences and {borders} borders of documents take {least}. "
                "It was cut off or is damaged: copy or write it again."
            )
        lengths = raw[34 : 34 + 4 * sequences].view("<i4").astype(np.int64)
        begins = raw[34 + 4 * sequences : 34 + 12 * sequences].view("<i8")
        documents = raw[34 + 12 * sequences : least].view("<i8").astype(np.int64)
        stored = _tokens(data, np.dtype(_TYPES[kind])) if lengths.sum() else np.empty(0, _TYPES[kind])
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        _check_index(index, documents, sequences)
        if (begins != ends[:-1] * stored.itemsize).any() or ends[-1] > stored.size or (lengths < 0).any():
            raise EngineError(
                f"{index} does not fit to {data}, which has {stored.size} tokens; sequences lie one after the other "
                f"and end at token {ends[-1]}. Give two files that were written together."
            )
        super().__init__(self.prefix, stored, ends[documents])

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedTokens, (self.prefix,)  # a worker maps the file anew; a pickled map would be all its tokens


class NpyTokens(_TokenFile):
    """Documents of a ``.npy`` of integers: each row of two dims, or one dim, cut behind every token ``end``.

    Args:
        path: the file.
        end: the token that ends a document, which stays part of it; None: one dim is one document.

    Raises:
        EngineError: the file is missing, is no ``.npy``, or does not hold integers in one or two dims.
    """

    def __init__(self, path: str | Path, end: int | None = None) -> None:
        self.end = end
        try:
            stored = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} is no .npy file that can be read ({error}); give one of numpy.save.") from None
        if stored.dtype.kind not in "iu" or stored.ndim not in (1, 2):
            raise EngineError(
                f"{path} holds {stored.dtype} in {stored.ndim} dims; token files hold integers in one dim, or a "
                "document a row in two. Convert it."
            )
        borders = np.arange(0, stored.size + 1, max(stored.shape[-1], 1), dtype=np.int64)
        if end is not None:
            behind = np.flatnonzero(stored.reshape(-1) == end) + 1
            borders = np.unique(np.concatenate([borders, behind]))
        super().__init__(Path(path), stored.reshape(-1), borders)

    def __reduce__(self) -> tuple[Any, ...]:
        return NpyTokens, (self.path, self.end)


def token_file(path: str | Path) -> IndexedTokens | NpyTokens:
    """The documents of a file of tokens, by its ending."""
    return NpyTokens(path) if Path(path).suffix == ".npy" else IndexedTokens(path)


def _mapped(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # a file of no bytes cannot be mapped
        raise EngineError(
            f"{path} cannot be read ({error}); a token file has a .bin and an .idx. Check the path."
        ) from None


def _tokens(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    raw = _mapped(path)
    return raw[: raw.size // kind.itemsize * kind.itemsize].view(kind)


def _check_index(index: Path, documents: NDArray[np.int64], sequences: int) -> None:
    whole = documents.size > 0 and documents[0] == 0 and documents[-1] == sequences
    if not whole or (np.diff(documents) < 0).any():
        raise EngineError(
            f"{index} has borders of documents that do not rise from 0 to its {sequences} sequences. Write it again."
        )
