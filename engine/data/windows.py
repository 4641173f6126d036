"""Batches from a corpus: windows of tokens, in a resumable order that is independent of the grid.

Windows have ``context + 1`` tokens at stride ``context``, so that every target is predicted exactly once. Fewer than
``context`` tokens at the end stay unused.

    tokens    0 1 2 3 4 5 6 7 8 9          context = 3
    window 0  0 1 2 3
    window 1        3 4 5 6
    window 2              6 7 8 9

The training stream is an endless sequence of windows, one permutation per epoch after another:

    epoch     |------- 0 -------|------- 1 -------|---
    stream    4 0 2 5 1 3 | 2 4 0 1 5 3 | 0 ...
    step 0    [4 0 2 5]                            4 rows: data rank 0 of 2 takes 4 0, rank 1 takes 2 5
    step 1            [1 3   2 4]                  a batch may span epochs: nothing dropped, nothing repeated

The stream follows from (seed, number of windows), and a position in it is one integer. Batch size and number of data
ranks may change at any step.

Token files are memory-mapped: Megatron's ``.bin`` with its index ``.idx``, and NumPy's ``.npy``. Imports no torch. The
index, little-endian:

    9 bytes   MMIDIDX 0 0
    u64       version, 1
    u8        type of the tokens: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16
    u64, u64  number of sequences s; number of document borders d, one more than documents
    i32 [s]   tokens of each sequence
    i64 [s]   offset in the ``.bin`` at which each begins, in bytes
    i64 [d]   the sequence at which each document begins, and s at the end
    i8  [s]   modes of the sequences, in multimodal files; not read

With known document lengths, a dataset is packed without reading it: each rank reads only its own rows.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.data.corpus import Corpus
from engine.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


Indices: TypeAlias = NDArray[np.int64]
Batch: TypeAlias = "dict[str, Tensor]"

IGNORED_LABEL = -100


def window_count(tokens: int, context: int) -> int:
    """Returns the number of windows of ``context + 1`` tokens in a corpus; neighboring windows share one token.

    Raises:
        EngineError: the corpus is shorter than one window, or ``context`` is below 1.
    """
    _at_least_one(context=context)
    if tokens < context + 1:
        raise EngineError(
            f"The corpus has {tokens} tokens; one window needs context + 1 = {context + 1}. "
            "Give more text, or choose a smaller context."
        )
    return (tokens - 1) // context


class Sampler:
    """Endless stream of the indices of the text windows on which one data rank trains. In each epoch, the data ranks
    together take every window once, in a new random order.

    ``next()`` returns the indices of this rank's windows in the next global batch: int64 [global_batch / data_size].

    Args:
        windows: number of windows in the corpus.
        global_batch: rows of a batch over all data ranks.
        seed: key of the random order, equal on all data ranks.
        data_rank: index of this data rank.
        data_size: number of data ranks.

    Raises:
        EngineError: a size is below 1, a rank or seed is out of range, or ``data_size`` does not divide
            ``global_batch``.
    """

    def __init__(self, windows: int, global_batch: int, seed: int = 0, data_rank: int = 0, data_size: int = 1) -> None:
        _at_least_one(windows=windows, global_batch=global_batch)
        _check_share(data_rank, data_size)
        if global_batch % data_size:
            raise EngineError(
                f"global_batch = {global_batch} is not divisible by data_size = {data_size}; all ranks take equally "
                f"many rows. Choose a multiple, such as {-(-global_batch // data_size) * data_size}."
            )
        if not 0 <= seed < 2**64:
            raise EngineError(f"seed = {seed} is out of range; it is a 64-bit key. Choose 0 to 2**64 - 1.")
        self.windows = windows
        self.global_batch = global_batch
        self.seed = seed
        self.rows = global_batch // data_size
        self.position = 0
        self._first_row = data_rank * self.rows
        self._epoch = -1
        self._order: Indices = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[Indices]:
        return self

    def __next__(self) -> Indices:
        rows = self.stream(self.position + self._first_row, self.rows)
        self.position += self.global_batch
        return rows

    def stream(self, start: int, count: int) -> Indices:
        """Returns the window indices at positions [start, start + count) of the stream that all data ranks share:
        int64 [count].

        Positions count from 0 over all epochs. The position of ``next()`` is unchanged.
        """
        parts = [np.empty(0, dtype=np.int64)]
        while count:
            epoch, offset = divmod(start, self.windows)
            part = self._epoch_order(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + part.size, count - part.size
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> Indices:
        """Returns the permutation of one epoch; the latest is cached, since a step needs one or two of them."""
        if epoch != self._epoch:
            # Sorts raw Philox output instead of calling Generator.permutation: NumPy guarantees that the raw stream
            # never changes, but not the shuffle, and a checkpoint must continue under another NumPy.
            key = np.array([self.seed, epoch], dtype=np.uint64)
            noise = np.random.Philox(key=key).random_raw(self.windows)
            self._order = np.argsort(noise, kind="stable").astype(np.int64, copy=False)
            self._epoch = epoch
        return self._order

    def state_dict(self) -> dict[str, int]:
        """Returns "position" (number of samples that all data ranks together have consumed), "seed" and "windows",
        equal on every rank.
        """
        return {"position": self.position, "seed": self.seed, "windows": self.windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position in ``state``, a result of ``state_dict``. Batch size and number of data ranks may
        differ from the saved run's.

        Raises:
            EngineError: ``state`` is not from a sampler's ``state_dict``, or its seed or number of windows differs from
                this sampler's.
        """
        for key in ("position", "seed", "windows"):
            if not isinstance(state.get(key), int) or state[key] < 0:
                raise EngineError(
                    f"The sampler state has {key} = {state.get(key)!r}; it must be an integer from 0. "
                    "Pass the result of Sampler.state_dict()."
                )
        if state["seed"] != self.seed:
            raise EngineError(
                f"The sampler state has seed = {state['seed']}, this run has seed = {self.seed}; the order "
                f"follows from the seed. Set seed = {state['seed']}, or start a fresh run."
            )
        if state["windows"] != self.windows:
            raise EngineError(
                f"The sampler state has {state['windows']} windows, this corpus has {self.windows}; a stream "
                "continues only on the same corpus and context. Restore both, or start a fresh run."
            )
        self.position = state["position"]


class Batches:
    """Endless training batches of one data rank. Each row is a window of ``context + 1`` successive tokens, chosen by
    ``sampler``.

    ``next()`` returns ``input_ids`` and ``labels``, int64 CPU tensors [sampler.rows, context]. ``labels[:, t]`` is the
    token after ``input_ids[:, t]``.

    Raises:
        EngineError: the corpus is shorter than one window, or the sampler was made for another number of windows.
    """

    def __init__(self, corpus: Corpus, context: int, sampler: Sampler) -> None:
        windows = window_count(corpus.tokens.size, context)
        if sampler.windows != windows:
            raise EngineError(
                f"The sampler draws from {sampler.windows} windows; corpus {corpus.name} has {windows} at "
                f"context = {context}. Make it with windows = window_count(corpus.tokens.size, context)."
            )
        self.corpus = corpus
        self.context = context
        self.sampler = sampler

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return _read_windows(self.corpus, self.context, next(self.sampler))

    def state_dict(self) -> dict[str, int]:
        """Returns the sampler's state: "position" (number of samples that all data ranks together have consumed),
        "seed" and "windows".
        """
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position in ``state``, a result of ``state_dict``. Batch size and number of data ranks may
        differ from the saved run's.

        Raises:
            EngineError: ``state`` is not from a sampler's ``state_dict``, or its seed or number of windows differs from
                this run's.
        """
        self.sampler.load_state_dict(state)


def evaluation_batches(
    corpus: Corpus, context: int, rows: int, data_rank: int = 0, data_size: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """Yields one data rank's batches of one pass over the corpus: ``input_ids`` and ``labels``, int64 [rows, context].

    All data ranks together get every window (``context + 1`` tokens) once, unless ``limit`` ends the pass. Every rank
    gets equally many batches, at most ``limit``; rows without a window have labels of -100.

    Raises:
        EngineError: the corpus is shorter than one window, a size is below 1, or a rank is out of range.
    """
    windows = window_count(corpus.tokens.size, context)
    _at_least_one(rows=rows, limit=1 if limit is None else limit)
    _check_share(data_rank, data_size)
    count = -(-windows // (rows * data_size))
    firsts = range(data_rank * rows, count * rows * data_size, rows * data_size)[:limit]
    # Returns an expression instead of yielding: the checks above must run at the call, not at the first batch.
    return (_read_padded(corpus, context, np.arange(first, first + rows), windows) for first in firsts)


def _read_padded(corpus: Corpus, context: int, indices: Indices, windows: int) -> Batch:
    """Reads windows as ``_read_windows`` does; an index past the last window becomes a row without labels."""
    batch = _read_windows(corpus, context, np.minimum(indices, windows - 1))
    absent = int((indices >= windows).sum())
    if absent:
        batch["input_ids"][-absent:] = 0
        batch["labels"][-absent:] = IGNORED_LABEL
    return batch


def _read_windows(corpus: Corpus, context: int, indices: Indices) -> Batch:
    # Imported here, because a sampler is planned and tested without torch, whose import takes seconds.
    import torch

    places = indices[:, None] * context + np.arange(context + 1)
    tokens = torch.from_numpy(corpus.tokens[places].astype(np.int64))
    # clone() instead of contiguous(), which returns a view of a single row: both tensors would share memory.
    layout = torch.contiguous_format
    return {
        "input_ids": tokens[:, :-1].clone(memory_format=layout),
        "labels": tokens[:, 1:].clone(memory_format=layout),
    }


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise EngineError(f"{name} = {size} is too small; the smallest is 1. Choose 1 or more.")


def _check_share(data_rank: int, data_size: int) -> None:
    _at_least_one(data_size=data_size)
    if not 0 <= data_rank < data_size:
        raise EngineError(
            f"data_rank = {data_rank} is not among data_size = {data_size} ranks; they count from 0. "
            f"Choose 0 to {data_size - 1}, such as grid.coord().dp."
        )


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_TYPES = MappingProxyType({1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_FLOATS = (6, 7)


@runtime_checkable
class Documents(Protocol):
    """Protocol of a dataset of tokenized documents with known lengths, such as a token file."""

    lengths: NDArray[np.int64]
    """Number of tokens of each document."""

    def tokens(self, index: int) -> NDArray[Any]:
        """Returns the tokens of document ``index``, a 1-D array, possibly memory-mapped."""


class _TokenFile:
    """Base of token files: documents are slices of one array of tokens."""

    def __init__(self, path: Path, stored: NDArray[Any], borders: NDArray[np.int64]) -> None:
        self.path = path
        self.lengths: NDArray[np.int64] = np.diff(borders)
        self._stored, self._borders = stored, borders

    def __len__(self) -> int:
        return self.lengths.size

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Returns ``input_ids`` and ``labels`` of a document, int64 [its length], both the tokens themselves."""
        tokens = self.tokens(index).astype(np.int64)
        return {"input_ids": tokens, "labels": tokens.copy()}

    def tokens(self, index: int) -> NDArray[Any]:
        """Returns the tokens of a document, a view of the file."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._stored[self._borders[index] : self._borders[index + 1]]


class IndexedTokens(_TokenFile):
    """Tokenized documents in Megatron's memory-mapped pair of files, ``.bin`` (tokens) and ``.idx`` (lengths of
    documents).

    Args:
        prefix: path without suffix, or path of either file.

    Raises:
        EngineError: a file is missing, malformed or truncated, or the two files do not match.
    """

    def __init__(self, prefix: str | Path) -> None:
        given = Path(prefix)
        self.prefix = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
        index, data = (self.prefix.with_name(self.prefix.name + ending) for ending in (".idx", ".bin"))
        raw = _mapped(index)
        if raw[:9].tobytes() != _MAGIC or raw.size < _HEADER_BYTES:
            raise EngineError(f"{index} does not begin like a Megatron index. Pass the prefix of a .bin and an .idx.")
        version, sequences, borders = (int(raw[at : at + 8].view("<u8")[0]) for at in (9, 18, 26))
        kind = int(raw[17])
        if version != 1 or kind not in _TYPES:
            what = "floating-point numbers" if kind in _FLOATS else f"version {version}, type {kind}"
            raise EngineError(
                f"{index} has {what}, but only indexes of version 1 with integer tokens can be read. Write the .bin "
                "and .idx again, such as with Megatron's tools/preprocess_data.py."
            )
        least = _HEADER_BYTES + 12 * sequences + 8 * borders
        if raw.size not in (least, least + sequences):
            raise EngineError(
                f"{index} has {raw.size:,} bytes; {sequences:,} sequences and {borders:,} borders of documents need "
                f"{least:,}. It was cut off or is damaged: copy or write it again."
            )
        lengths = raw[34 : 34 + 4 * sequences].view("<i4").astype(np.int64)
        begins = raw[34 + 4 * sequences : 34 + 12 * sequences].view("<i8")
        documents = raw[34 + 12 * sequences : least].view("<i8").astype(np.int64)
        stored = _tokens(data, np.dtype(_TYPES[kind])) if lengths.sum() else np.empty(0, _TYPES[kind])
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        _check_index(index, documents, sequences)
        if (begins != ends[:-1] * stored.itemsize).any() or ends[-1] > stored.size or (lengths < 0).any():
            raise EngineError(
                f"{index} has sequences up to token {ends[-1]:,} and {data} has {stored.size:,} tokens, but the "
                "sequences must follow each other without gaps, and end within the data. Pass two files that were "
                "written together."
            )
        super().__init__(self.prefix, stored, ends[documents])

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedTokens, (self.prefix,)  # a worker maps the file again; a pickled map would contain all tokens


class NpyTokens(_TokenFile):
    """Tokenized documents in a ``.npy`` file of integers: the rows of a 2-D array, or the parts of a 1-D array that end
    with the token ``end``.

    Args:
        path: the file.
        end: last token of each document; None: a 1-D array is one document.

    Raises:
        EngineError: the file is missing, or is not a ``.npy`` with a 1-D or 2-D array of integers.
    """

    def __init__(self, path: str | Path, end: int | None = None) -> None:
        self.end = end
        try:
            stored = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} is not a readable .npy file ({error}); pass a file of numpy.save.") from None
        if stored.dtype.kind not in "iu" or stored.ndim not in (1, 2):
            raise EngineError(
                f"{path} holds {stored.dtype} in {stored.ndim} dims; token files hold integers in one dim, or in two "
                "with a document in each row. Convert the array to this form."
            )
        borders = np.arange(0, stored.size + 1, max(stored.shape[-1], 1), dtype=np.int64)
        if end is not None:
            behind = np.flatnonzero(stored.reshape(-1) == end) + 1
            borders = np.unique(np.concatenate([borders, behind]))
        super().__init__(Path(path), stored.reshape(-1), borders)

    def __reduce__(self) -> tuple[Any, ...]:
        return NpyTokens, (self.path, self.end)


def token_file(path: str | Path) -> IndexedTokens | NpyTokens:
    """Opens a file of tokenized documents: NpyTokens for the suffix ``.npy``, otherwise IndexedTokens."""
    return NpyTokens(path) if Path(path).suffix == ".npy" else IndexedTokens(path)


def _mapped(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
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
            f"{index} is damaged: its document borders do not rise from 0 to {sequences}, the number of sequences. "
            "Copy or write the .bin and .idx again."
        )
