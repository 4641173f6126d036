"""Rules along a sharded dim of positions that need a few rows of other ranks instead of all.

    conv1d, kernel k    a halo of k-1 rows at each border of a run
    pad, roll, flip     rows that change the rank; F.pad(x, (0, 0, 1, -1)) moves one at each border
    x[:, 1:] * x[:, :-1]   operands that are sharded differently: rows of the later ones move
    cumsum, cumprod     local, with an all-gather of the totals of all runs

A result as long as a sequence of the batch is sharded as that sequence. Other results stay where their source is.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.context.recurrence.moved_rows import moved_local
from engine.parallel.context.recurrence.placed import mapped
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, global_tensors_in, like
from engine.parallel.tensor.global_tensor.index_runs import Runs
from engine.parallel.tensor.global_tensor.index_sets import Index, Indices, NoRuleError, replaced
from engine.parallel.tensor.global_tensor.layout import positive_dim
from engine.parallel.tensor.global_tensor.redistribute import gather_global
from engine.parallel.tensor.global_tensor.rules import elementwise, reductions, slicing
from engine.parallel.tensor.global_tensor.rules.table import TENSOR_RULES

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext, TensorRule

POSITIONS = "positions"
"""First entry of the key of a batch's index sets in a context, followed by the length."""
_Rows = Callable[[], Indices]


def index_of_length(context: "GlobalTensorContext", have: Index, size: int, key: Hashable, near: _Rows) -> Index:
    """Returns the sharding of a result with ``size`` rows that is computed from a source sharded as ``have``.

    A result of as many rows as its source is sharded as ``have``. Another result is sharded as this batch's sequences
    of length ``size``; if there are none, each row is on the rank of its source row. ``near``: callback that returns
    the source row of each result row. ``key``: cache key that identifies ``near``.
    """
    if size == have.size:
        return have
    found: Index | None = context.found((POSITIONS, size))
    return context.find(("near", have, key), lambda: _near(have, near())) if found is None else found


def _near(have: Index, sources: Indices) -> Index:
    near = np.clip(sources, 0, have.size - 1)
    return Index((np.flatnonzero(np.isin(near, held)) for held in have.owned.ranks), len(sources))


def _rows_from(x: GlobalTensor, dim: int, key: Hashable, sources: _Rows, fill: float = 0.0) -> GlobalTensor:
    """Returns the rows ``sources`` of ``x``, named by ``key``; indices outside of the dim are rows of constants."""
    context, have = x.views, x.sets[dim]
    assert have is not None
    size = context.find(("size", have, key), lambda: len(sources()))
    index = index_of_length(context, have, size, key, sources)

    def wanted() -> list[Indices]:
        rows = sources()
        rows = np.where((rows >= 0) & (rows < have.size), rows, -1)
        return [rows[held] for held in index.ranks]

    local = moved_local(x, dim, (key, index), wanted, fill)
    return GlobalTensor(local, replaced(tuple(x.full), dim, size), replaced(x.sets, dim, index), context)


def _sharded(x: Any, dim: int) -> GlobalTensor:
    if type(x) is not GlobalTensor or x.sets[dim] is None:
        raise NoRuleError("the function works along a dim that is not sharded.")
    return x


def pad_positions(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """Computes ``F.pad`` with a constant ``value``; along a sharded dim, rows are sent to the ranks of their new
    positions.

    ``pad``: pairs of widths (before, after), from the last dim to the first.

    Raises:
        NoRuleError: ``mode`` is not "constant", or ``input`` is no global tensor.
    """
    if mode != "constant" or type(input) is not GlobalTensor:
        raise NoRuleError("padding along a sharded dim has a rule for constants.")
    widths = [0] * (2 * input.ndim)
    widths[: len(pad)] = pad
    x = input
    for dim in range(input.ndim):
        place = 2 * (input.ndim - 1 - dim)
        before, after = widths[place : place + 2]
        if input.sets[dim] is not None and (before or after):
            rows = partial(np.arange, -before, input.full[dim] + after)
            x = _rows_from(x, dim, ("pad", before, after), rows, value or 0.0)
            widths[place : place + 2] = 0, 0
    return reductions.pad(context, func, x, widths, mode, value) if any(widths) else x


def roll_positions(context: "GlobalTensorContext", func: Function, input: Any, shifts: Any, dims: Any = None) -> Any:
    """Computes ``torch.roll``; along a sharded dim, each row is sent to the rank of its new position."""
    shift, dim = (one[0] if isinstance(one, tuple | list) and len(one) == 1 else one for one in (shifts, dims))
    if not isinstance(shift, int) or not isinstance(dim, int):
        return reductions.roll(context, func, input, shifts, dims)
    dim = positive_dim(dim, input.ndim)
    if input.sets[dim] is None:
        return reductions.roll(context, func, input, shifts, dims)
    size = input.full[dim]
    return _rows_from(input, dim, ("roll", shift % size), lambda: (np.arange(size) - shift) % size)


def flip_positions(context: "GlobalTensorContext", func: Function, input: Any, *sizes: Any, dims: Any = None) -> Any:
    """Computes ``torch.flip``; along a sharded dim, each row is sent to the rank of its new position.

    ``sizes``: the dims, unless ``dims`` is given.
    """
    given = dims if dims is not None else sizes[0] if len(sizes) == 1 else sizes
    x = input
    for dim in reductions.dims_of(input, given):
        if input.sets[dim] is not None:
            x = _rows_from(x, dim, "flip", partial(np.arange, input.full[dim] - 1, -1, -1))
        else:
            x = like(x, torch.flip(x.local, (dim,)))
    return x


def convolve_positions(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    weight: Tensor,
    *options: Any,
    **named: Any,
) -> Any:
    """Computes ``F.conv1d`` on [.., C, S] with the S positions sharded; C: channels.

    Each rank receives the positions of other ranks that its outputs need.

    Raises:
        NoRuleError: the stride is not one, or another dim is sharded.
    """
    x = _sharded(input, input.ndim - 1)
    given = _CONV_DEFAULTS | dict(zip(_CONV_DEFAULTS, options, strict=False)) | named
    bias, stride, padding, dilation, groups = (given[name] for name in _CONV_DEFAULTS)
    (step,), (spread,) = (tuple(one) if isinstance(one, tuple | list) else (one,) for one in (stride, dilation))
    if step != 1 or type(weight) is GlobalTensor or type(bias) is GlobalTensor:
        raise NoRuleError("a convolution along a sharded dim has a rule for stride 1 and full weights.")
    dim, reach = x.ndim - 1, spread * (weight.shape[-1] - 1)
    before, after = _padding(padding, reach)
    size = x.full[dim] + before + after - reach
    if size < 1:
        raise NoRuleError("the window is longer than the sequence; torch raises its own error.")
    # an output without a sequence of its length stays with the last row of its window, or with the nearest row
    have, length = x.sets[dim], x.full[dim]
    assert have is not None
    key = ("conv1d", before, after, reach)
    index = index_of_length(
        context, have, size, key, partial(np.arange, 0 if before else reach, size + (0 if before else reach))
    )
    rows = moved_local(x, dim, (key, index), lambda: [_windows(held, reach, before, length) for held in index.runs])
    outs, start = [], 0
    for first, stop in index.runs[context.axis.index].tolist():
        piece = rows[..., start : start + stop - first + reach]
        outs.append(func(piece, weight, bias, 1, 0, spread, groups))
        start += stop - first + reach
    if not outs:  # a rank without an output
        rows = torch.cat((rows, rows.new_zeros((*rows.shape[:-1], reach + 1))), -1)  # it joins the backward too
        outs = [func(rows, weight, bias, 1, 0, spread, groups)[..., :0]]
    local = torch.cat(outs, -1) if len(outs) > 1 else outs[0]
    shape = (*x.full[:-2], local.shape[-2], size)
    return GlobalTensor(local, shape, replaced(x.sets, dim, index), context)


_CONV_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
"""Options of ``F.conv1d`` after the weight, in their order."""


def _padding(padding: Any, reach: int) -> tuple[int, int]:
    if padding == "same":
        return reach // 2, reach - reach // 2
    if isinstance(padding, str):
        return 0, 0
    width = padding[0] if isinstance(padding, tuple | list) else padding
    return width, width


def _windows(held: Runs, reach: int, before: int, length: int) -> Indices:
    """Returns the rows that the outputs ``held`` read, run after run; -1: a row of zeros."""
    runs = [np.arange(start - before, stop - before + reach) for start, stop in held.tolist()]
    rows = np.concatenate(runs) if runs else np.arange(0)
    return np.where((rows >= 0) & (rows < length), rows, -1)


def scanned(context: "GlobalTensorContext", func: Function, input: Any, dim: Any = -1, **kwargs: Any) -> Any:
    """Computes ``cumsum`` or ``cumprod`` along ``dim``, also if this dim is sharded.

    Each rank then scans its own rows, and combines them with the all-gathered totals of earlier rows.
    """
    dim = positive_dim(dim, input.ndim)
    if type(input) is not GlobalTensor or input.sets[dim] is None:
        return reductions.along(context, func, input, dim, **kwargs)
    x, index = input, input.sets[dim]
    if not index.once or type(x.local) is GlobalTensor or sum(one is not None for one in x.sets) > 1:
        raise NoRuleError("a scan needs each row on one rank.")
    product = func.__name__ == "cumprod"
    most = max(map(len, index.runs))
    order = sorted(
        (start, rank, place) for rank, held in enumerate(index.runs) for place, (start, _) in enumerate(held.tolist())
    )
    lengths = [stop - start for start, stop in index.runs[context.axis.index].tolist()]
    parts = [func(piece, dim, **kwargs) for piece in torch.split(x.local, lengths, dim)] if lengths else []
    empty = func(x.local.narrow(dim, 0, 0), dim, **kwargs)
    # the total of no rows has a gradient too, because all ranks join the backward of the gather
    neutral = (empty.prod if product else empty.sum)(dim, keepdim=True).to(empty.dtype)
    totals = [part.narrow(dim, part.shape[dim] - 1, 1) for part in parts]
    totals += [neutral] * (most - len(parts))
    blocks = context.find(
        ("runs", most), lambda: Index.even_blocks(most * context.axis.size, context.axis.size)
    )  # a dim of runs: equally many on each rank
    shape = replaced(tuple(x.full), dim, blocks.size)
    stacked = GlobalTensor(torch.cat(totals, dim), shape, replaced((None,) * x.ndim, dim, blocks), context)
    all_totals = gather_global(stacked).local
    ranked = {(rank, place): number for number, (_, rank, place) in enumerate(order)}
    in_order = [all_totals.narrow(dim, rank * most + place, 1) for _, rank, place in order]
    made = []
    for place, part in enumerate(parts):
        joined = torch.cat([all_totals.narrow(dim, 0, 0), *in_order[: ranked[context.axis.index, place]]], dim)
        before = (joined.prod if product else joined.sum)(dim, keepdim=True).to(part.dtype)
        made.append(part * before if product else part + before)
    made = made or [empty + all_totals.narrow(dim, 0, 0)]
    return GlobalTensor(torch.cat(made, dim), tuple(x.full), x.sets, context)


def with_aligned_rows(rule: "TensorRule") -> "TensorRule":
    """Returns a rule that runs ``rule``. After a NoRuleError it gives sharded operands the same sharding of rows and
    retries.

    The error remains if they cannot be resharded, or already have the same sharding.
    """

    def run(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
        try:
            return rule(context, func, *args, **kwargs)
        except NoRuleError:
            align = _alignment(context, args, kwargs)
            if align is None:
                raise
        args, kwargs = mapped(lambda one: align(one) if type(one) is GlobalTensor else one, (args, kwargs))
        return rule(context, func, *args, **kwargs)

    return run


def _alignment(context: "GlobalTensorContext", args: Any, kwargs: Any) -> Callable[[GlobalTensor], GlobalTensor] | None:
    """Returns a function that moves rows so that operands are sharded equally; None if they are already, or cannot be.

    Dims are counted from the last one, as in a broadcast.
    """
    tensors = list(global_tensors_in(args, kwargs))
    dims = {place - x.ndim for x in tensors for place, index in enumerate(x.sets) if index is not None}
    if len(dims) != 1:
        return None
    (dim,) = dims
    found = [x for x in tensors if x.ndim >= -dim and x.sets[dim] is not None]
    if len({x.full[dim] for x in found}) > 1 or len({x.sets[dim] for x in found}) < 2:
        return None
    batch = context.found((POSITIONS, found[0].full[dim]))
    target = batch if any(x.sets[dim] == batch for x in found) else found[0].sets[dim]
    assert target is not None

    def align(x: GlobalTensor) -> GlobalTensor:
        if x.ndim < -dim or x.sets[dim] is None or x.sets[dim] == target:
            return x
        local = moved_local(x, x.ndim + dim, ("align", target), lambda: target.ranks)
        return GlobalTensor(local, tuple(x.full), replaced(x.sets, x.ndim + dim, target), context)

    return align


def _rules() -> Iterator[tuple[Any, "TensorRule"]]:
    yield functional.pad, pad_positions
    yield functional.conv1d, convolve_positions
    for name, rule in (("roll", roll_positions), ("flip", flip_positions), ("cumsum", scanned), ("cumprod", scanned)):
        yield from ((function, rule) for function in (getattr(torch, name), getattr(Tensor, name)))
    by_element = (elementwise.elementwise, elementwise.where, elementwise.in_place, slicing.cat, slicing.stack)
    for function, rule in TENSOR_RULES.by_function.items():
        if rule in by_element:
            yield function, with_aligned_rows(rule)


HALO_RULES: Mapping[Any, "TensorRule"] = MappingProxyType(dict(_rules()))
"""Rules along positions, by function."""
