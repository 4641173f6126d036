"""Rules of functions along dims: softmax, sum, mean, max and others.

along full dims                     on shards
sum, mean, var over sharded dims    each rank sums the elements it owns; one small all-reduce, label "statistics"
others over sharded dims            gathered
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, like
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, replaced
from engine.parallel.tensor.global_tensor.layout import positive_dim
from engine.parallel.tensor.global_tensor.operands import pick
from engine.parallel.tensor.global_tensor.redistribute import STATISTICS, add
from engine.parallel.tensor.global_tensor.rules.shapes import given_sizes

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


_TopK = type(torch.zeros(1).topk(1))


def dims_of(x: GlobalTensor, dim: Any) -> tuple[int, ...]:
    """Returns the dims of ``x`` that ``dim`` names, counted from the front; None names all dims."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.ndim))
    return tuple(positive_dim(one, x.ndim) for one in (dim if isinstance(dim, tuple | list) else (dim,)))


def along(context: "GlobalTensorContext", func: Function, input: Any, dim: Any = -1, *args: Any, **kwargs: Any) -> Any:
    """Runs a shape-preserving function along ``dim``, such as softmax or cumsum, on this rank's shard.

    Raises:
        NoRuleError: ``dim`` is sharded; the caller then gathers ``input``.
    """
    if type(input) is not GlobalTensor or any(input.sets[one] is not None for one in dims_of(input, dim)):
        raise NoRuleError("the function works along a dim that is sharded.")
    return like(input, func(input.local, dim, *args, **kwargs))


def flip(context: "GlobalTensorContext", func: Function, input: Any, *sizes: Any, dims: Any = None) -> Any:
    """Runs ``flip`` on this rank's shard of ``input``.

    ``sizes``: dims to flip, as separate numbers or one sequence; or keyword ``dims``.

    Raises:
        NoRuleError: a dim to flip is sharded; the caller then gathers ``input``.
    """
    given = given_sizes(sizes, dims=dims)
    if any(input.sets[one] is not None for one in dims_of(input, given)):
        raise NoRuleError("the function works along a dim that is sharded.")
    return like(input, func(input.local, given))


def extremes(context: "GlobalTensorContext", func: Function, input: Any, **kwargs: Any) -> Any:
    """Runs ``aminmax`` on this rank's shard of ``input`` and returns (minima, maxima) as global tensors.

    Raises:
        NoRuleError: a reduced dim is sharded; the caller then gathers ``input``.
    """
    if any(input.sets[one] is not None for one in dims_of(input, kwargs.get("dim"))):
        raise NoRuleError("the reduction runs over a dim that is sharded.")
    kept = _kept(input, dims_of(input, kwargs.get("dim")), kwargs.get("keepdim", False))
    return tree_map(lambda local: GlobalTensor(local, *kept, context), func(input.local, **kwargs))


def roll(context: "GlobalTensorContext", func: Function, input: Any, shifts: Any, dims: Any = None) -> Any:
    """Runs ``roll`` on this rank's shard of ``input``.

    Raises:
        NoRuleError: ``dims`` is None or contains a sharded dim; the caller then gathers ``input``.
    """
    if dims is None or any(input.sets[one] is not None for one in dims_of(input, dims)):
        raise NoRuleError("the function works along a dim that is sharded.")
    return like(input, func(input.local, shifts, dims))


def corner(context: "GlobalTensorContext", func: Function, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs ``tril`` or ``triu`` on this rank's shard of ``input``.

    Raises:
        NoRuleError: one of the last two dims is sharded; the caller then gathers ``input``.
    """
    if any(index is not None for index in input.sets[-2:]):
        raise NoRuleError("the function works along a dim that is sharded.")
    return like(input, func(input.local, *args, **kwargs))


def pad(
    context: "GlobalTensorContext", func: Function, input: Any, pad: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """Runs ``F.pad`` on this rank's shard of ``input``. ``pad``: pairs of widths as in torch, last dim first.

    Raises:
        NoRuleError: a padded dim is sharded; the caller then gathers ``input``.
    """
    grown = list(input.full)
    for place in range(len(pad) // 2):
        dim = input.ndim - 1 - place
        before, after = pad[2 * place : 2 * place + 2]
        if (before or after) and input.sets[dim] is not None:  # (1, -1) moves elements without changing the size
            raise NoRuleError("the function works along a dim that is sharded.")
        grown[dim] += before + after
    return GlobalTensor(func(input.local, pad, *args, **kwargs), tuple(grown), input.sets, context)


def reduced(
    context: "GlobalTensorContext", func: Function, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Runs a reduction such as max, argmax, logsumexp or any on this rank's shard of ``input``.

    Returns a global tensor, or (values, indices) if ``func`` returns both.

    Raises:
        NoRuleError: a reduced dim is sharded, or ``dim`` is a tensor.
    """
    if type(input) is not GlobalTensor or isinstance(dim, Tensor):
        raise NoRuleError("the rule reduces one global tensor, not the elementwise extreme of two tensors.")
    dims = dims_of(input, dim)
    if any(input.sets[one] is not None for one in dims):
        raise NoRuleError("the reduction runs over a dim that is sharded.")
    out = func(input.local, **kwargs) if dim is None else func(input.local, dim, keepdim, **kwargs)
    kept = _kept(input, dims, keepdim)
    return tree_map(lambda local: GlobalTensor(local, *kept, context), out)


def vector_norm_rule(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    *args: Any,
    **named: Any,
) -> Any:
    """Runs ``torch.norm`` or ``torch.linalg.vector_norm`` on this rank's shard of ``input``.

    Raises:
        NoRuleError: a reduced dim is sharded; the caller then gathers ``input``.
    """
    keepdim = named.pop("keepdim", bool(args and args[0]))
    dims = dims_of(input, dim)
    if any(input.sets[one] is not None for one in dims) or len(args) > 1:
        raise NoRuleError("the reduction runs over a dim that is sharded.")
    return GlobalTensor(func(input.local, p, dim, keepdim, **named), *_kept(input, dims, keepdim), context)


def vector_norm(context: "GlobalTensorContext", func: Function, x: Any, ord: Any = 2, *args: Any, **named: Any) -> Any:
    """Runs ``torch.linalg.vector_norm`` of order ``ord`` on this rank's shard of ``x``.

    Raises:
        NoRuleError: a reduced dim is sharded; the caller then gathers ``x``.
    """
    return vector_norm_rule(context, func, x, ord, *args, **named)


def topk(
    context: "GlobalTensorContext", func: Function, input: Any, k: int, dim: int = -1, *args: Any, **kwargs: Any
) -> Any:
    """Runs ``topk`` along ``dim`` on this rank's shard of ``input``. Returns (values, indices) as global tensors.

    Raises:
        NoRuleError: ``dim`` is sharded; the caller then gathers ``input``.
    """
    dim = positive_dim(dim, input.ndim)
    if input.sets[dim] is not None:
        raise NoRuleError("the function works along a dim that is sharded.")
    shape = replaced(input.full, dim, k)
    values, places = func(input.local, k, dim, *args, **kwargs)
    return _TopK((GlobalTensor(values, shape, input.sets, context), GlobalTensor(places, shape, input.sets, context)))


def _kept(x: GlobalTensor, dims: Sequence[int], keepdim: bool) -> tuple[tuple[int, ...], Any]:
    """Returns full shape and index sets without ``dims``, or with ``dims`` of size one if ``keepdim``."""
    places = [one for one in range(x.ndim) if keepdim or one not in dims]
    shape = tuple(1 if one in dims else x.full[one] for one in places)
    return shape, tuple(None if one in dims else x.sets[one] for one in places)


def total(
    context: "GlobalTensorContext", func: Function, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Runs ``sum`` or ``mean`` on this rank's shard of ``input``.

    Returns a plain tensor, all-reduced, if a reduced dim is sharded; otherwise a global tensor.
    """
    dims = dims_of(input, dim)
    if not any(input.sets[one] is not None for one in dims):
        if dim is None and not keepdim:
            return GlobalTensor(func(input.local, **kwargs), *_kept(input, dims, keepdim), context)
        return GlobalTensor(func(input.local, dims, keepdim, **kwargs), *_kept(input, dims, keepdim), context)
    dtype: Any = kwargs.get("dtype")
    if func.__name__ != "mean":
        return summed(input, dims, keepdim, dtype)
    dtype = dtype or input.dtype
    # in at least 32 bits: fp16 holds the mean of numbers whose sum is infinite
    out = summed(input, dims, keepdim, torch.promote_types(dtype, torch.float32))
    return (out / math.prod(input.full[one] for one in dims)).to(dtype)


def summed(x: GlobalTensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the sum of ``x`` over ``dims`` as a plain tensor, all-reduced over the ranks of the axis.

    Raises:
        NoRuleError: more than one dim of ``x`` is sharded, or the sharded dim is not in ``dims``.
    """
    context = x.views
    (cut, *others) = [one for one in range(x.ndim) if x.sets[one] is not None]
    index = x.sets[cut]
    if others or cut not in dims or index is None:
        raise NoRuleError("a sum over a sharded dim needs all other dims full.")
    # an index on several ranks counts once
    local = x.local if index.once else pick(context, x.local, cut, index, index.owned)
    return add(context, local.sum(tuple(dims), keepdim, dtype=dtype), STATISTICS)


def variance(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> Any:
    """Runs ``var`` or ``std`` on this rank's shard of ``input``.

    Returns a plain tensor, after two all-reduces, if a reduced dim is sharded; otherwise a global tensor.
    """
    correction = kwargs.get("correction")
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    if isinstance(dim, bool):  # x.var(False)
        dim, correction = None, int(dim)
    dims = dims_of(input, dim)
    if not any(input.sets[one] is not None for one in dims):
        local = func(input.local, dims, correction=correction, keepdim=keepdim)
        return GlobalTensor(local, *_kept(input, dims, keepdim), context)
    _, spread = mean_and_variance(in_32_bits(input), dims)
    count = math.prod(input.full[one] for one in dims)
    spread = spread * (count / (count - correction)) if correction else spread
    spread = spread if keepdim else spread.squeeze(dims)
    return (spread.sqrt() if func.__name__ == "std" else spread).to(input.dtype)


def in_32_bits(x: GlobalTensor) -> GlobalTensor:
    """Returns ``x`` in at least 32 bits, because statistics in fewer bits lose digits or overflow."""
    return like(x, x.local.float()) if x.local.dtype in (torch.float16, torch.bfloat16) else x


def mean_and_variance(x: GlobalTensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the mean of ``x`` over ``dims`` and the mean squared deviation from the mean: all-reduced plain tensors.

    Both keep ``dims`` with size one.
    """
    count = math.prod(x.full[one] for one in dims)
    mean = summed(x, dims, True) / count
    deviation: Any = x - mean
    return mean, summed(deviation * deviation, dims, True) / count
