"""Rows of packed documents.

    documents    a a a a | b b | c c c c c          length = 4
    rows         a a a a   b b c c   c c c .        the last row of an epoch is padded

Rows are computed by index if document lengths are known, else in reading order; both give the same rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.settings import DataPosition, LoaderSettings, Packing
from engine.data.windows import IGNORED_LABEL, Documents, Indices, Sampler
from engine.errors import EngineError


class SampleOrder:
    """Endless sequence of dataset indices, epoch after epoch; each epoch has every index once.

    The order is 0, 1, 2, ... or, with ``settings.shuffle``, a new random order in each epoch.
    """

    def __init__(self, samples: int, settings: LoaderSettings) -> None:
        self.samples = samples
        self._shuffled = Sampler(samples, 1, settings.seed) if settings.shuffle else None

    def at(self, position: int) -> int:
        """Returns the dataset index at ``position``, which counts from 0 over all epochs."""
        if self._shuffled is None:
            return position % self.samples
        return int(self._shuffled.stream(position, 1)[0])

    def of_epoch(self, epoch: int) -> Indices:
        """Returns the dataset indices of epoch number ``epoch`` (from 0) in their order: int64 [samples]."""
        if self._shuffled is None:
            return np.arange(self.samples, dtype=np.int64)
        return self._shuffled.stream(epoch * self.samples, self.samples)


class RowPiece(NamedTuple):
    """Successive tokens of one document that fill a part of a packed row."""

    tokens: NDArray[np.int64]
    after: int
    """Token of the document after the piece; -100 at its end."""


def piece(tokens: NDArray[Any], start: int, stop: int) -> RowPiece:
    """Returns tokens ``start:stop`` of a document as a ``RowPiece``. Its ``after`` is the document's next token, or
    -100 if there is none.

    Args:
        tokens: all tokens of the document, 1-D.
    """
    after = int(tokens[stop]) if stop < len(tokens) else IGNORED_LABEL
    return RowPiece(tokens[start:stop].astype(np.int64), after)


def packed_row(pieces: Sequence[RowPiece], packing: Packing) -> dict[str, Tensor]:
    """Returns the int64 tensors [``packing.length``] of one packed row, padded at the end: ``input_ids``, ``labels``,
    ``position_ids`` and, with ``packing.segments``, ``segment_ids``.

    Args:
        pieces: the row's parts of documents, in their order.
    """
    row = np.full(packing.length, packing.pad_token, dtype=np.int64)
    labels = np.full(packing.length, IGNORED_LABEL, dtype=np.int64)
    positions = np.arange(packing.length, dtype=np.int64)
    segments = np.zeros(packing.length, dtype=np.int64)
    at = 0
    for number, (tokens, after) in enumerate(pieces, start=1):
        end = at + tokens.size
        row[at:end], positions[at:end], segments[at:end] = tokens, np.arange(tokens.size), number
        if packing.labels == "shifted":
            labels[at : end - 1], labels[end - 1] = tokens[1:], after
        else:
            labels[at + 1 : end] = tokens[1:]
        at = end
    positions[at:] = np.arange(packing.length - at)  # padding attends to no document
    made = {"input_ids": row, "labels": labels, "position_ids": positions}
    named = made | ({"segment_ids": segments} if packing.segments else {})
    return {name: torch.from_numpy(values) for name, values in named.items()}


def no_tokens() -> EngineError:
    """Returns the error that a dataset has no tokens to pack."""
    return EngineError("pack: the documents have no tokens, so there are no rows. Pass documents with tokens.")


class PackedRows:
    """Endless sequence of packed rows: the documents of a dataset one after another, cut into rows of
    ``packing.length`` tokens.

    With ``settings.shuffle``, each epoch shuffles the documents, cuts them into rows, and shuffles the rows.

    Raises:
        EngineError: the documents have no tokens.
    """

    def __init__(self, documents: Documents, packing: Packing, settings: LoaderSettings) -> None:
        self._lengths = np.asarray(documents.lengths, dtype=np.int64)
        total = int(self._lengths.sum())
        if not total:
            raise no_tokens()
        self._documents, self._packing = documents, packing
        self.size = -(-total // packing.length)
        """Rows of an epoch."""
        self._order = SampleOrder(self._lengths.size, settings)
        self._rows = SampleOrder(self.size, settings)
        self._epoch = -1
        self._packed = self._ends = np.empty(0, dtype=np.int64)

    def __call__(self, position: int) -> dict[str, Tensor]:
        """Returns the row at a position of the stream."""
        return packed_row(list(self._pieces(position // self.size, self._rows.at(position))), self._packing)

    def _pieces(self, epoch: int, row: int) -> Iterator[RowPiece]:
        if epoch != self._epoch:
            self._packed = self._order.of_epoch(epoch)
            self._ends, self._epoch = np.cumsum(self._lengths[self._packed]), epoch
        at = row * self._packing.length
        last = min(at + self._packing.length, int(self._ends[-1]))
        place = int(np.searchsorted(self._ends, at, side="right"))
        while at < last:
            document, end = int(self._packed[place]), int(self._ends[place])
            begin = end - int(self._lengths[document])
            stop = min(end, last)
            if stop > at:
                yield piece(self._documents.tokens(document), at - begin, stop - begin)
            at, place = max(at, stop), place + 1


def pack_epoch(
    documents: Iterable[Any], start: DataPosition, length: int
) -> Iterator[tuple[DataPosition, list[RowPiece]]]:
    """Packs documents, one after another, into rows; the epoch's last row may be shorter.

    Yields a tuple for each row: the position in the data after the row, and the row's parts of documents.

    Args:
        documents: the epoch's documents from the first that is not fully consumed.
        start: position in the data at which the first row begins; it may be inside the first document.
        length: tokens in a row.
    """
    position, epoch, read, used = start
    pieces: list[RowPiece] = []
    space = length
    for document in documents:
        tokens = tokens_of(document)
        while used < tokens.size:
            stop = min(tokens.size, used + space)
            pieces.append(piece(tokens, used, stop))
            space, used = space - (stop - used), stop
            if not space:
                position += 1
                whole = used == tokens.size
                yield DataPosition(position, epoch, read + whole, 0 if whole else used), pieces
                pieces, space = [], length
        read, used = read + 1, 0
    if pieces:
        yield DataPosition(position + 1, epoch + 1), pieces


def tokens_of(document: Any) -> NDArray[Any]:
    """Returns the tokens of ``document`` as a 1-D integer array.

    ``document`` is a tensor, array or list of tokens, or a dict with them under ``input_ids``.

    Raises:
        EngineError: the tokens are missing, are not integers, or have more than one dim.
    """
    found = document.get("input_ids") if isinstance(document, Mapping) else document
    tokens = found.numpy() if isinstance(found, Tensor) else np.asarray([] if found is None else found)
    if found is None or tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        given = "no input_ids" if found is None else f"{tokens.dtype} in {tokens.ndim} dims"
        raise EngineError(
            f"pack: a document is a {type(document).__name__} with {given}; it must be integers in one dim, or a dict "
            "with them under 'input_ids'. Map the dataset to one of these."
        )
    return tokens
