"""Rows of a sharded dim that move to the ranks that need them: one exchange forward, and one back for the gradients.

    rows of rank 1 before   4 5 6 7
    wanted                  2 3 4 5 6 7      2 and 3 come from rank 0; their gradients return to it
    wanted                  -1 0 1 2         -1: a row of a constant

All counts follow from the index sets, so ranks exchange no sizes.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.parallel.tensor.collectives import refuse_second_derivatives
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, Indices, NoRuleError
from engine.parallel.tensor.tp_axis import TensorAxis

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext

HALO = "halo"
"""Label of exchanged rows."""


class RowRun(NamedTuple):
    """Rows from ``start`` to before ``stop``, all from the same source: own, received or constant rows."""

    source: int
    """0: rows of this rank; 1: received rows; -1: constants."""
    start: int
    stop: int


class RowMoves:
    """Plan of an exchange along a dim sharded as ``have``, after which each rank r has the rows ``wanted[r]``.

    Missing rows come from the first rank that stores them; index -1 denotes a row of a constant. ``rank``: this rank.
    """

    def __init__(self, have: Index, wanted: Sequence[Indices], rank: int) -> None:
        self._rank = rank
        first = have.owned
        owner = np.full(have.size, -1)
        for peer, held in enumerate(first.ranks):
            owner[held] = peer
        self._counts = np.zeros((len(wanted), len(wanted)), dtype=np.int64)
        gives: list[Indices] = []
        for peer, rows in enumerate(wanted):
            real = rows[rows >= 0]
            missing = real[~np.isin(real, have.ranks[peer])]
            sources = owner[missing]
            self._counts[:, peer] = np.bincount(sources, minlength=len(wanted))
            gives.append(np.searchsorted(have.ranks[rank], missing[sources == rank]))
            if peer == rank:
                self.segments = _segments(*_sources(rows, have.ranks[rank], missing, sources))
        self.gives = tuple(map(tuple, map(_runs, gives)))
        """Runs (start, stop) of the rows of this rank that each peer gets."""

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Number of rows that each rank sends, by rank."""
        return tuple(self._counts.sum(1).tolist())

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Number of rows that each rank receives, by rank."""
        return tuple(self._counts.sum(0).tolist())

    @property
    def gets(self) -> tuple[int, ...]:
        """Number of rows that this rank receives from each rank."""
        return tuple(self._counts[:, self._rank].tolist())


def _sources(rows: Indices, held: Indices, missing: Indices, owners: Indices) -> tuple[Indices, Indices]:
    """Returns source and row within it for each wanted row; received rows are in the order of their owners."""
    source, place = np.full(len(rows), -1), np.zeros(len(rows), dtype=np.int64)
    here = np.isin(rows, held)
    source[here], place[here] = 0, np.searchsorted(held, rows[here])
    away = (rows >= 0) & ~here
    source[away] = 1
    arrived = np.empty(len(missing), dtype=np.int64)
    arrived[np.argsort(owners, kind="stable")] = np.arange(len(missing))
    place[away] = arrived
    return source, place


def _segments(source: Indices, place: Indices) -> tuple[RowRun, ...]:
    ends = np.flatnonzero((np.diff(source) != 0) | ((np.diff(place) != 1) & (source[1:] >= 0))) + 1
    borders = [0, *ends.tolist(), len(source)]
    found = []
    for start, stop in pairwise(borders):
        if start < stop:
            first = int(place[start])
            found.append(RowRun(int(source[start]), first, first + stop - start))
    return tuple(found)


def _runs(places: Indices) -> list[tuple[int, int]]:
    return [(one.start, one.stop) for one in _segments(np.zeros(len(places), dtype=np.int64), places)]


def moved_local(
    x: GlobalTensor, dim: int, key: Hashable, wanted: Callable[[], Sequence[Indices]], fill: float = 0.0
) -> Tensor:
    """Exchanges rows of ``x`` along ``dim``; returns this rank's new rows, ``wanted()[rank]``, as a local tensor.

    The callback ``wanted`` returns the row indices of each rank; the plan is cached under ``key``. ``fill``: value of
    the rows with index -1.

    Raises:
        NoRuleError: ``dim`` is not the only sharded dim, or tensor ranks shard ``x`` too.
    """
    context, have = x.views, x.sets[dim]
    if (
        have is None
        or type(x.local) is GlobalTensor
        or any(index is not None for place, index in enumerate(x.sets) if place != dim)
    ):
        raise NoRuleError("rows move along the only sharded dim.")
    moves = context.find(("moves", have, key), lambda: RowMoves(have, wanted(), context.axis.index))
    return _moved(context, x.local, dim, moves, fill)


def _moved(context: "GlobalTensorContext", local: Tensor, dim: int, moves: RowMoves, fill: float) -> Tensor:
    out: Tensor = _Move.apply(local, context.axis, moves, dim, fill)  # type: ignore[no-untyped-call]
    if not any(moves.sent):
        return out
    row = local.element_size() * math.prod(size for place, size in enumerate(local.shape) if place != dim)
    context.axis.expect_rows(HALO, tuple(count * row for count in moves.sent), local)
    if torch.is_grad_enabled() and local.requires_grad:
        context.axis.expect_rows(HALO, tuple(count * row for count in moves.received), local, out)
    return out


def _exchanged(axis: TensorAxis, rows: list[Tensor], gives: Sequence[int], gets: Sequence[int], like: Tensor) -> Tensor:
    """Exchanges rows [n, ..] in the order of the peers."""
    given = torch.cat(rows) if rows else like[:0]
    return axis.exchange(given.contiguous(), gives, gets, HALO)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: TensorAxis, moves: RowMoves, dim: int, fill: float) -> Tensor:
        ctx.axis, ctx.moves, ctx.dim, ctx.rows = axis, moves, dim, local.shape[dim]
        ctx.save_for_backward(local.new_empty(0))  # read in backward, so that all ranks recompute before they exchange
        first = local.movedim(dim, 0)
        received = first[:0]
        if any(moves.sent):
            rows = [first[start:stop] for runs in moves.gives for start, stop in runs]
            received = _exchanged(axis, rows, _sizes(moves), moves.gets, first)
        pieces = []
        for source, start, stop in moves.segments:
            if source < 0:
                pieces.append(first.new_full((stop - start, *first.shape[1:]), fill))
            else:
                pieces.append((first, received)[source][start:stop])
        return torch.cat(pieces or [first[:0]]).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivatives("cp")
        _ = ctx.saved_tensors
        moves, grad = ctx.moves, grad.movedim(ctx.dim, 0)
        own = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        back = grad.new_zeros((sum(moves.gets), *grad.shape[1:]))
        place = 0
        for source, start, stop in moves.segments:
            if source >= 0:
                (own, back)[source][start:stop] += grad[place : place + stop - start]
            place += stop - start
        if any(moves.sent):
            received = _exchanged(ctx.axis, [back], moves.gets, _sizes(moves), back)
            place = 0
            for runs in moves.gives:
                for start, stop in runs:
                    own[start:stop] += received[place : place + stop - start]
                    place += stop - start
        return own.movedim(0, ctx.dim), None, None, None, None


def _sizes(moves: RowMoves) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in runs) for runs in moves.gives)
