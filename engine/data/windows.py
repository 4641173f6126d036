"""Batches from a corpus: windows, a resumable order that is independent of the grid, and tensors.

The corpus is cut into windows of ``context + 1`` tokens at stride ``context``: adjacent windows share one token, which
is the last target of one and the first input of the next, so every target is predicted exactly once. Fewer than
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

A stream is identified by (seed, number of windows), and a position in it by one integer, ``position``. Batch size and
number of data ranks may change at any step.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

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
    """Return the number of windows of ``context + 1`` tokens in a corpus of ``tokens`` tokens.

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
    """Window indices that one data rank trains on, step by step; endless, seeded, resumable.

    ``next()`` returns the window indices of this rank's rows of the next global batch: int64, shape
    [global_batch / data_size]. Rank r of N gets rows [r*B/N, (r+1)*B/N). Communicates nothing.

    Raises:
        EngineError: a size is below 1, a rank or seed is out of range, or the ranks cannot share the batch equally.
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
        """Return the window indices at positions [start, start + count) of the stream, without moving the position."""
        parts = [np.empty(0, dtype=np.int64)]
        while count:
            epoch, offset = divmod(start, self.windows)
            part = self._epoch_order(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + part.size, count - part.size
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> Indices:
        """Return the permutation of one epoch; the latest is cached, since a step needs one or two of them."""
        if epoch != self._epoch:
            # Sorts raw Philox output instead of calling Generator.permutation: NumPy guarantees that the raw stream
            # never changes, but not the shuffle, and a checkpoint must continue under another NumPy.
            key = np.array([self.seed, epoch], dtype=np.uint64)
            noise = np.random.Philox(key=key).random_raw(self.windows)
            self._order = np.argsort(noise, kind="stable").astype(np.int64, copy=False)
            self._epoch = epoch
        return self._order

    def state_dict(self) -> dict[str, int]:
        """Return the position in the stream, equal on every rank. ``position`` counts samples over all ranks."""
        return {"position": self.position, "seed": self.seed, "windows": self.windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, under any batch size and number of data ranks.

        Raises:
            EngineError: ``state`` is not a sampler's, or its seed or number of windows differs.
        """
        for key in ("position", "seed", "windows"):
            if not isinstance(state.get(key), int) or state[key] < 0:
                raise EngineError(
                    f"The sampler state has {key} = {state.get(key)!r}; it must be an integer from 0. "
                    "Pass what Sampler.state_dict() returned."
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
    """Endless training batches of one data rank, driven by a sampler.

    ``next()`` returns ``input_ids`` and ``labels``, int64 CPU tensors of shape [sampler.rows, context]. The labels are
    already shifted: ``labels[:, t]`` is the token after ``input_ids[:, t]``.

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
        """Return the sampler's state; see :meth:`Sampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sampler's state; see :meth:`Sampler.load_state_dict`."""
        self.sampler.load_state_dict(state)


def evaluation_batches(
    corpus: Corpus, context: int, rows: int, data_rank: int = 0, data_size: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """Yield one pass over the corpus in order: every window exactly once over all data ranks.

    Batches hold ``input_ids`` and ``labels``, int64 [rows, context]. Every rank gets equally many of them, at most
    ``limit``. Rows that pad the last batch have only labels of -100: a (sum, weight) loss ignores them, and its weight
    can be 0 on a rank.

    Raises:
        EngineError: the corpus is shorter than one window, a size is below 1, or a rank is out of range.
    """
    windows = window_count(corpus.tokens.size, context)
    _at_least_one(rows=rows, limit=1 if limit is None else limit)
    _check_share(data_rank, data_size)
    count = -(-windows // (rows * data_size))
    firsts = range(data_rank * rows, count * rows * data_size, rows * data_size)[:limit]
    # An expression and no generator function: the checks above must run at the call, not at the first batch.
    return (_read_padded(corpus, context, np.arange(first, first + rows), windows) for first in firsts)


def _read_padded(corpus: Corpus, context: int, indices: Indices, windows: int) -> Batch:
    """Read windows as ``_read_windows`` does; an index past the last window becomes a row without labels."""
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
            f"Choose 0 to {data_size - 1}, as grid.coord().dp gives it."
        )
