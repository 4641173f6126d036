"""Keys that queries see: blocks of queries and keys without a mask where the mask is causal, and the needed keys.

Under a causal mask a run of queries a..b and a run of keys c..d make at most three blocks, each of which a kernel
computes without a mask tensor:

              c ... a     a ... d     keys
    queries   all         square, causal
    after d   all         all
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_runs import Runs, one_run, runs_from
from engine.parallel.tensor.global_tensor.index_sets import Index


class SeenBlock(NamedTuple):
    """Block of neighbouring queries and keys that one kernel call computes, as slices of a rank's local tensors.

    ``causal``: the block is a square in which each query sees keys up to its own.
    """

    queries: slice
    keys: slice
    causal: bool = False


def causal_blocks(queries: Runs, keys: Runs) -> Iterator[SeenBlock]:
    """Yields, for one rank, the blocks of queries and keys that have visible keys under a causal mask.

    ``queries``: positions of its queries. ``keys``: positions of the keys that it has.
    """
    at_query = 0
    for first, last in queries.tolist():
        at_key = 0
        for start, stop in keys.tolist():
            yield from _blocks((first, last, at_query), (start, stop, at_key))
            at_key += stop - start
        at_query += last - first


def _blocks(query: tuple[int, int, int], key: tuple[int, int, int]) -> Iterator[SeenBlock]:
    first, last, at_query = query
    start, stop, at_key = key

    def block(q0: int, q1: int, k0: int, k1: int, causal: bool = False) -> Iterator[SeenBlock]:
        if q0 < q1 and k0 < k1:
            queries = slice(at_query + q0 - first, at_query + q1 - first)
            yield SeenBlock(queries, slice(at_key + k0 - start, at_key + k1 - start), causal)

    yield from block(first, last, start, min(stop, first))
    low, high = max(start, first), min(stop, last)
    yield from block(low, high, low, high, causal=True)
    yield from block(max(high, low), last, low, high)


def all_keys(queries: Runs, keys: Runs) -> Iterator[SeenBlock]:
    """Yields one block of all ``queries`` and ``keys``, without a mask; none if either is empty."""
    sizes = [int((runs[:, 1] - runs[:, 0]).sum()) for runs in (queries, keys)]
    if all(sizes):
        yield SeenBlock(slice(0, sizes[0]), slice(0, sizes[1]))


def needed_keys(queries: Index, keys: int, causal: bool, mask: Tensor | None) -> Index | None:
    """Returns, for each rank, the keys that at least one of its queries sees; every rank gets the same result.

    Returns None if ``mask`` is needed, but is sharded or has no values (a meta tensor). ``queries``: positions of the
    queries of each rank. ``keys``: number of keys. ``mask``: [.., queries or 1, keys or 1], bool or added to scores;
    the host waits for its values.
    """
    if causal:
        ends = (int(runs[-1, 1]) if len(runs) else 0 for runs in queries.runs)
        return Index.of_runs((one_run(0, min(end, keys)) for end in ends), keys)
    if mask is None or mask.shape[-1] != keys or mask.shape[-2] not in (1, queries.size):
        return Index.of_runs((one_run(0, keys) for _ in queries.runs), keys)
    if type(mask) is GlobalTensor or mask.is_meta or isinstance(mask, FakeTensor):
        return None
    seen = [_seen(mask.detach(), runs) for runs in queries.runs]
    found = torch.stack(seen).cpu().numpy()  # one wait for the device, once for all layers that share the mask
    return Index.of_runs((runs_from(np.flatnonzero(row)) for row in found), keys)


def hidden_below(dtype: torch.dtype) -> float:
    """Returns the largest value of an additive mask of ``dtype`` that hides a key: half of the lowest finite number."""
    return torch.finfo(dtype).min / 2


def unseeing_queries(rows: Tensor) -> Tensor | None:
    """Returns bool [.., Q, 1], True for queries without a visible key under the additive mask ``rows`` [.., Q, K].

    Returns None for a bool mask.
    """
    return None if rows.dtype is torch.bool else (rows <= hidden_below(rows.dtype)).all(-1, keepdim=True)


_ELEMENTS, _ROWS = 1 << 24, 64
"""Elements of a mask that are read at a time, and the minimum number of rows."""


def _seen(mask: Tensor, queries: Runs) -> Tensor:
    """Returns True for each key that some query sees; a query without any key weighs finite masked scores equally."""
    found = torch.zeros(mask.shape[-1], dtype=torch.bool, device=mask.device)
    rows = queries.tolist() if mask.shape[-2] != 1 else [(0, 1)] if len(queries) else []
    count = max(_ROWS, _ELEMENTS // max(1, mask.shape[:-2].numel() * mask.shape[-1]))
    for first, last in rows:
        for start in range(first, last, count):
            part = mask[..., start : min(start + count, last), :]
            unseeing = unseeing_queries(part)
            if unseeing is not None:
                part = (part > hidden_below(part.dtype)) | (unseeing & part.isfinite())
            found |= part.reshape(-1, part.shape[-1]).any(0)
    return found
