"""Attention work of context ranks: pairs of a query and a key that it sees.

    causal       zig-zag chunks have equal work
    documents    chunks of one length, dealt so that ranks have equally many positions and nearly equal work

Two kinds of batch tensors show packed documents. A wrong guess costs balance alone, since any sharding of positions
gives the same result.

    0 1 2 3 0 1 0 1 2    position ids [B, S]: a document begins where they restart
    1 1 1 1 2 2 3 3 3    numbers of documents [B, S]: a document begins where they grow
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.parallel.context.cuts import evenly, zigzag
from engine.parallel.tensor.global_tensor.index_runs import join_runs, run_length
from engine.parallel.tensor.global_tensor.index_sets import Index, Indices

EVEN = 1.05
"""Work of the rank with the most, divided by the mean, up to which no smaller chunks are tried."""
LEAST_CHUNK = 64
"""Minimum positions of a chunk where ranks have more than two."""
_MOST_CHUNKS = 32
"""Largest number of chunks of a rank."""
_NAMES = ("position", "document", "segment", "seq_idx", "doc_id")
"""Parts of the names of batch tensors that are read on the host."""


class WorkBalance(NamedTuple):
    """Attention work of each context rank: its number of (query, key) pairs in one head."""

    pairs: tuple[int, ...]

    @property
    def most_over_mean(self) -> float:
        """Largest number of pairs on a rank, divided by the mean over all ranks."""
        return max(self.pairs) * len(self.pairs) / max(sum(self.pairs), 1)


def causal_balance(length: int, ranks: int, unit: int = 1) -> WorkBalance:
    """Returns the attention work of each context rank for ``length`` positions under a causal mask.

    The positions are sharded zig-zag over ``ranks`` ranks, in chunks that are multiples of ``unit``.
    """
    return runs_balance(zigzag(length, ranks, unit))


def runs_balance(index: Index) -> WorkBalance:
    """Returns the attention work of each context rank under a causal mask, if positions are sharded as ``index``."""
    return WorkBalance(
        tuple(int(((runs[:, 1] - runs[:, 0]) * (runs[:, 0] + runs[:, 1] + 1) // 2).sum()) for runs in index.runs)
    )


def work_balance(work: Indices, index: Index) -> WorkBalance:
    """Returns the attention work of each context rank, if S positions are sharded as ``index``.

    ``work`` [S]: number of (query, key) pairs of the query at each position.
    """
    before = np.append(0, np.cumsum(work))
    return WorkBalance(tuple(int((before[runs[:, 1]] - before[runs[:, 0]]).sum()) for runs in index.runs))


def by_work(work: Indices, ranks: int, unit: int = 1) -> Index:
    """Returns a sharding of S positions that gives ``ranks`` context ranks nearly equal attention work.

    ``work`` [S]: number of (query, key) pairs of the query at each position. All ranks have as many positions as in the
    zig-zag sharding. The zig-zag sharding itself is returned if no rank then has more than 1.05 times the mean work.
    Chunks are multiples of ``unit``.
    """
    plain = zigzag(len(work), ranks, unit)
    best, found = work_balance(work, plain).most_over_mean, plain
    for chunks in _numbers(len(work), ranks):
        if best <= EVEN:
            break
        dealt = _dealt(work, plain, chunks, unit)
        for tried in (dealt, _exchanged(work, dealt, unit)):
            most = work_balance(work, tried).most_over_mean
            if most < best and best > EVEN:
                best, found = most, tried
    return found


def _numbers(length: int, ranks: int) -> Iterator[int]:
    """Yields the numbers of chunks of a rank to try."""
    chunks = 2
    while chunks == 2 or (chunks <= _MOST_CHUNKS and length >= chunks * ranks * LEAST_CHUNK):
        yield chunks
        chunks *= 2


def _dealt(work: Indices, plain: Index, chunks: int, unit: int) -> Index:
    """Returns ``chunks`` chunks for each rank, with as many positions as in ``plain``: the heaviest chunk first, to the
    rank with the least work.
    """
    ranks, length = len(plain.runs), len(work)
    ends = np.array([stop for _, stop in evenly(length // unit, chunks * ranks)]) * unit
    weights = np.diff(np.append(0, np.cumsum(work)[ends - 1]))
    loads, counts, owner = [0] * ranks, [0] * ranks, [0] * len(weights)
    for chunk in np.argsort(-weights, kind="stable").tolist():
        rank = min((rank for rank in range(ranks) if counts[rank] < chunks), key=lambda rank: (loads[rank], rank))
        owner[chunk], loads[rank], counts[rank] = rank, loads[rank] + int(weights[chunk]), counts[rank] + 1
    sizes = [iter(evenly(run_length(held) // unit, chunks)) for held in plain.runs]
    runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    start = 0
    for rank in owner:
        first, last = next(sizes[rank])
        stop = start + (last - first) * unit
        if stop > start:
            runs[rank].append((start, stop))
        start = stop
    return Index.of_runs((join_runs(np.array(held, np.int64).reshape(-1, 2)) for held in runs), length)


def _exchanged(work: Indices, index: Index, unit: int) -> Index:
    """Returns ``index`` after exchanges of equally long ends of runs between the ranks with the most and the least
    work, at most two a rank.
    """
    before, ranks = np.append(0, np.cumsum(work)), len(index.runs)
    runs = [held.tolist() for held in index.runs]
    for _ in range(2 * ranks):
        loads = [sum(int(before[stop] - before[start]) for start, stop in held) for held in runs]
        most, least = loads.index(max(loads)), loads.index(min(loads))
        if max(loads) * ranks <= EVEN * sum(loads):
            break
        gap = (loads[most] - loads[least]) / 2
        pairs = product(runs[most], runs[least])
        left, length, given, taken = min(_ends(before, given, taken, unit, gap) for given, taken in pairs)
        if left >= gap:
            break
        runs[most].remove(given)
        runs[least].remove(taken)
        runs[most] += [[given[0], given[1] - length], [taken[0], taken[0] + length]]
        runs[least] += [[taken[0] + length, taken[1]], [given[1] - length, given[1]]]
        runs = [sorted(run for run in held if run[0] < run[1]) for held in runs]
    return Index.of_runs((join_runs(np.array(held, np.int64).reshape(-1, 2)) for held in runs), index.size)


def _ends(
    before: Indices, given: list[int], taken: list[int], unit: int, gap: float
) -> tuple[float, int, list[int], list[int]]:
    """Returns the length for which the last positions of ``given`` have ``gap`` more work than the first ones of
    ``taken``, behind the work that is then missing.
    """
    longest = min(given[1] - given[0], taken[1] - taken[0])
    lengths = np.arange(min(longest, max(unit, LEAST_CHUNK // 4 // unit * unit)), longest + 1, unit)
    moved = before[given[1]] - before[given[1] - lengths] - before[taken[0] + lengths] + before[taken[0]]
    left = np.abs(gap - moved)
    best = int(left.argmin())
    return float(left[best]), int(lengths[best]), given, taken


def work_of_documents(batch: Iterable[tuple[str, Tensor]]) -> Mapping[int, Indices]:
    """Returns, for each sequence length S with packed documents, the attention work [S] at each position.

    The work is the number of keys that the position's query sees, summed over batch rows.

    ``batch``: pairs (name, tensor). Documents are read from integer tensors [B, S] with "position", "document",
    "segment", "seq_idx" or "doc_id" in their names, and only these are copied to the host.
    """
    found: dict[int, Indices] = {}
    for name, tensor in batch:
        if not _may_show(name, tensor) or tensor.shape[-1] in found:
            continue
        begins = _begins(tensor.detach().cpu())
        if begins is not None:
            places = np.arange(begins.shape[1])
            first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            found[tensor.shape[-1]] = (places - first + 1).sum(0)
    return found


def _may_show(name: str, tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.ndim != 2:
        return False
    whole = tensor.dtype in (torch.int64, torch.int32) and tensor.shape[1] > 1 and tensor.shape[0] > 0
    return whole and any(part in name.lower() for part in _NAMES)


def _begins(tensor: Tensor) -> np.ndarray | None:
    """Returns True [B, S] at the first position of each later document; None if the tensor shows no documents."""
    values = tensor.numpy()
    steps = np.diff(values, axis=1)
    restarts = (steps != 1) & (values[:, 1:] == 0)
    if bool((restarts | (steps == 1)).all()):
        later = restarts
    elif bool(((steps == 0) | (steps == 1)).all()):
        later = steps == 1
    else:
        return None
    return np.pad(later, ((0, 0), (1, 0))) if bool(later.any()) and not bool(later.all()) else None
