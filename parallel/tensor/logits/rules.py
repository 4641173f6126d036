"""Rules of functions that are correct on a shard of the vocabulary: they return a :class:`LogitShard` and send nothing.

A rule gets the function and the arguments, with shards in place of sharded logits. The rule returns ``NotImplemented``
if the function needs the full vocabulary with these arguments.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from engine.kernels.device import ACCELERATORS
from engine.parallel.tensor.logits.logit_shard import LogitShard, cut_operand, share_operand
from engine.parallel.tensor.logits.losses import gather, log_softmax, logsumexp, nll_loss, sharded_cross_entropy
from engine.parallel.trace.torch_function import getter

LogitRule = Callable[..., Any]


def _elementwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs elementwise functions of numbers, tensors that broadcast, and other shards of the same vocabulary."""
    leaves = [*args, *kwargs.values()]
    first = next(leaf for leaf in leaves if isinstance(leaf, LogitShard))
    positions = func is torch.where and len(leaves) == 1
    if positions or kwargs.get("out") is not None or not all(_fits(leaf, first) for leaf in leaves):
        return NotImplemented
    parts = [_part(leaf, first) for leaf in args]
    named = {name: _part(leaf, first) for name, leaf in kwargs.items()}
    return first.now(func(*parts, **named))


def _fits(operand: Any, first: LogitShard) -> bool:
    if isinstance(operand, LogitShard):
        return operand.local.dim() == first.local.dim() and first.aligned(operand)
    if not isinstance(operand, Tensor):
        return True
    at = operand.dim() - (first.local.dim() - first.dim)
    return operand.dim() <= first.local.dim() and (at < 0 or operand.shape[at] in (1, first.vocabulary.size))


def _part(operand: Any, first: LogitShard) -> Any:
    if isinstance(operand, LogitShard):
        return operand.local
    if not isinstance(operand, Tensor):
        return operand
    at = operand.dim() - (first.local.dim() - first.dim)
    if at < 0 or operand.shape[at] == 1:
        return share_operand(operand, first.vocabulary.axis)
    return cut_operand(operand, at, first.vocabulary)


def _converted(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs ``to`` and similar functions; a shard may also be the tensor that defines the new dtype."""
    args = tuple(arg.local if isinstance(arg, LogitShard) else arg for arg in args)
    kwargs = {name: arg.local if isinstance(arg, LogitShard) else arg for name, arg in kwargs.items()}
    if not isinstance(x, LogitShard):
        return func(x, *args, **kwargs)
    local = func(x.local, *args, **kwargs)
    if local is x.local:
        return x
    if not isinstance(local, Tensor):  # type() without arguments
        return local
    wider = torch.promote_types(x.local.dtype, local.dtype) == local.dtype
    return x.now(local, same=wider and local.dtype != torch.float64)


def _view(func: Callable[..., Any], x: Any, *sizes: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(x, LogitShard) or (len(sizes) == 1 and isinstance(sizes[0], torch.dtype)):
        return NotImplemented
    shape = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    if not x.is_last or not shape or shape.count(-1) > 1:
        return NotImplemented
    if shape[-1] == -1:  # -1 is the vocabulary if the other sizes leave exactly its size
        rest = 1
        for size in shape[:-1]:
            rest *= size
        total = x.local.numel() // x.width * x.vocabulary.size
        shape[-1] = total // rest if rest else -1
    if shape[-1] != x.vocabulary.size:
        return NotImplemented
    return x.now(func(x.local, (*shape[:-1], x.width)), len(shape) - 1, same=True)


def _flatten(func: Callable[..., Any], x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not isinstance(x, LogitShard):
        return NotImplemented
    start, end = start_dim % x.local.dim(), end_dim % x.local.dim()
    if start <= x.dim <= end and start != end:
        return NotImplemented
    dim = x.dim - (end - start) if x.dim > end else x.dim
    return x.now(torch.flatten(x.local, start, end), dim, same=True)


def _rearranged(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Applies functions that reorder, add or drop dims; an empty tensor with a distinct size per dim shows the
    order."""
    if not isinstance(x, LogitShard) or any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
        return NotImplemented
    sizes = [1 if size == 1 and dim != x.dim else dim + 2 for dim, size in enumerate(x.local.shape)]
    found = func(torch.empty(sizes, device="meta"), *args, **kwargs)
    order = [size - 2 for size in found.shape if size > 1]
    single = [dim for dim, size in enumerate(sizes) if size == 1]
    shape = [1 if size == 1 else x.local.shape[size - 2] for size in found.shape]
    kept = [dim for dim in order if dim != x.dim]
    local = x.local.permute(*order, *single).reshape(shape)
    return x.now(local, list(found.shape).index(x.dim + 2), same=kept == sorted(kept))


def _index(func: Callable[..., Any], x: Any, index: Any) -> Any:
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, LogitShard) or not x.is_last or not entries or not all(_is_simple(entry) for entry in entries):
        return NotImplemented
    addressed = sum(_dims_addressed(entry) for entry in entries)
    ellipsis, last = any(entry is Ellipsis for entry in entries), entries[-1]
    beyond_the_rest = last is Ellipsis if ellipsis else True
    if not (beyond_the_rest and addressed <= x.dim) and not (isinstance(last, slice) and last == slice(None)):
        return NotImplemented
    local = x.local[index]
    return x.now(local, local.dim() - 1)


def _is_simple(entry: Any) -> bool:
    return entry is None or entry is Ellipsis or (isinstance(entry, int | slice | Tensor) and type(entry) is not bool)


def _dims_addressed(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def _split(func: Callable[..., Any], x: Any, size: Any = None, dim: int = 0, *, chunks: Any = None) -> Any:
    """Runs ``split`` and ``chunk`` along a dim other than the vocabulary."""
    size = chunks if size is None else size
    if not isinstance(x, LogitShard) or isinstance(size, Tensor) or dim % x.local.dim() == x.dim:
        return NotImplemented
    return tuple(x.now(piece) for piece in func(x.local, size, dim=dim))


def _along(func: Callable[..., Any], x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Returns a slice along a dim other than the vocabulary; the selection of one row drops the dim."""
    if not isinstance(x, LogitShard) or not isinstance(dim, int) or dim % x.local.dim() == x.dim:
        return NotImplemented
    local = func(x.local, dim, *args, **kwargs)
    lost = local.dim() < x.local.dim() and dim % x.local.dim() < x.dim
    return x.now(local, x.dim - lost)


def is_view(func: Callable[..., Any], x: LogitShard) -> bool:
    """Implements ``Tensor._is_view`` for sharded logits: returns True if the shard's local tensor is a view."""
    return x.local._is_view()


def _functions(*names: str) -> list[Callable[..., Any]]:
    """Returns the functions of torch and methods of tensors with these names, as far as they exist."""
    found = [getattr(owner, name, None) for owner in (torch, Tensor) for name in names]
    return [function for function in found if function is not None]


_ELEMENTWISE = (
    "mul", "div", "true_divide", "add", "sub", "neg", "tanh", "exp", "log", "sigmoid", "clamp", "clip", "clone",
    "detach", "multiply", "divide", "subtract", "negative", "abs", "pow", "square", "sqrt", "relu", "where",
    "masked_fill", "nan_to_num", "maximum", "minimum", "isnan", "isinf", "isfinite", "logical_not", "gt", "ge", "lt",
    "le", "eq", "ne", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__", "__add__", "__radd__",
    "__sub__", "__rsub__", "__neg__", "__pow__", "__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__",
    "__abs__", "__invert__",
)  # fmt: skip
CONVERSIONS = tuple(
    getattr(Tensor, name)
    for name in ("float", "double", "half", "bfloat16", "to", "type", "type_as", "cpu", *ACCELERATORS)
)
VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
_REARRANGEMENTS = (
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "unsqueeze", "squeeze",
)  # fmt: skip


LOGIT_RULES: Mapping[Callable[..., Any], LogitRule] = MappingProxyType(
    dict.fromkeys(_functions(*_ELEMENTWISE), _elementwise)
    | dict.fromkeys((*CONVERSIONS, Tensor.contiguous), _converted)
    | dict.fromkeys(VIEWS, _view)
    | dict.fromkeys(_functions("flatten"), _flatten)
    | dict.fromkeys(_functions(*_REARRANGEMENTS), _rearranged)
    | dict.fromkeys(map(getter, ("T", "mT")), _rearranged)
    | dict.fromkeys(_functions("split", "chunk"), _split)
    | dict.fromkeys(_functions("narrow", "select", "index_select"), _along)
    | {Tensor.__getitem__: _index, Tensor._is_view: is_view}
    | {functional.cross_entropy: sharded_cross_entropy, functional.nll_loss: nll_loss}
    | dict.fromkeys((*_functions("logsumexp"), torch.special.logsumexp), logsumexp)
    | dict.fromkeys((*_functions("log_softmax"), functional.log_softmax, torch.special.log_softmax), log_softmax)
    | dict.fromkeys(_functions("gather"), gather)
)


SHAPES = tuple(func for func, rule in LOGIT_RULES.items() if rule in (_flatten, _rearranged, _split, _along, _index))
"""Functions that change shapes and read no elements."""


def answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Computes the torch function ``func``. Sharded logits in ``args``, ``kwargs`` and the result are
    :class:`LogitShard` objects.

    Returns ``NotImplemented`` if ``func`` needs the full vocabulary; the caller then gathers the logits.
    """
    rule = LOGIT_RULES.get(func)
    if not args and "input" in kwargs and "condition" not in kwargs:  # torch's name of the first argument
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    leaves = pytree.tree_leaves(args) if rule is _index else (*args, *kwargs.values())
    if rule is None or not any(isinstance(leaf, LogitShard) for leaf in leaves):
        return NotImplemented
    return rule(func, *args, **kwargs)
