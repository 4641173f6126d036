"""Rules of slices along positions, of lists of them, and of writes at positions; see :mod:`placed`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from engine.parallel.context.recurrence.placed import (
    PlacedTensor,
    home_of,
    run_on_one_rank,
    slice_on_rank,
    state_of,
)
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, follow_grad
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError
from engine.parallel.tensor.global_tensor.layout import positive_dim
from engine.parallel.tensor.global_tensor.operands import part
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.tensor.global_tensor.rules import metadata, slicing
from engine.parallel.tensor.global_tensor.rules.elementwise import check_memory
from engine.parallel.tensor.global_tensor.rules.table import gathered
from engine.parallel.trace.torch_function import function_name, writes_in_place

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext, TensorRule


_USES_ALONE = 2
"""References to the storage of a tensor without views: the tensor's, and that of the object that asks."""


class WrittenTensors:
    """Record of sharded results of ``zeros_like`` and similar functions without a write so far, and of sharded tensors
    with a write of a differentiable value at one position.
    """

    def __init__(self) -> None:
        self.blank: Any = WeakIdKeyDictionary()
        """By tensor without a write: the function that makes it in full, and its shard's version."""
        self.tied: Any = WeakIdKeyDictionary()
        """By tensor: the relay's token before the last write."""


def select_position(context: "GlobalTensorContext", func: Function, input: Any, dim: int, index: int) -> Any:
    """Computes ``select``; along the only sharded dim, the result is on the rank that stores the position ``index``.

    Without a rule for that, such as under autocast, all ranks get the elements of the sharded dim.
    """
    dim = positive_dim(dim, input.ndim)
    if input.sets[dim] is not None:
        place = positive_dim(int(index), input.full[dim])
        with suppress(NoRuleError):
            return slice_on_rank(input, dim, place, place + 1).select(dim, 0)
    return slicing.select(context, func, input, dim, index)


def get_positions(context: "GlobalTensorContext", func: Function, input: Any, index: Any) -> Any:
    """Computes ``input[index]``; a single position of the sharded dim is only on the rank that stores it."""
    found = _position(input, index)
    if found is None:
        return slicing.getitem(context, func, input, index)
    items, dim, place, start = found
    try:
        piece: Any = slice_on_rank(input, dim, start, start + 1)
    except NoRuleError:
        return slicing.getitem(context, func, input, index)
    items[place] = 0 if isinstance(items[place], int) else slice(None)
    return piece[tuple(items)]


def _position(x: Any, index: Any) -> tuple[list[Any], int, int, int] | None:
    """Returns the complete index, the sharded dim, its place in the index, and the position, if it takes a single one.

    Raises:
        NoRuleError: the index has no rule.
    """
    if type(x) is not GlobalTensor:
        raise NoRuleError("a global tensor cannot index a plain tensor on shards.")
    cut = [dim for dim, own in enumerate(x.sets) if own is not None]
    if len(cut) != 1:
        return None
    items = list(slicing._complete(index if isinstance(index, tuple) else (index,), x.ndim))
    places = [place for place, item in enumerate(items) if item is not None]
    if len(places) <= cut[0] or any(not isinstance(items[place], int | slice) for place in places):
        return None
    place, length = places[cut[0]], x.full[cut[0]]
    item = items[place]
    if isinstance(item, int):
        return items, cut[0], place, positive_dim(item, length)
    chosen = range(*item.indices(length))
    return (items, cut[0], place, chosen[0]) if len(chosen) == 1 and length > 1 else None


def unbind_positions(context: "GlobalTensorContext", func: Function, input: Any, dim: int = 0) -> Any:
    """Computes ``unbind``; along the sharded dim, each result is only on the rank that stores its position."""
    dim = positive_dim(dim, input.ndim)
    if input.sets[dim] is None:
        return slicing.unbind(context, func, input, dim)
    return tuple(slice_on_rank(input, dim, place, place + 1).select(dim, 0) for place in range(input.full[dim]))


def split_positions(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Computes ``split``; along the sharded dim, pieces of one position are only on the ranks that store them."""
    x, sizes, dim = slicing._split_arguments(*args, **kwargs)
    if type(x) is not GlobalTensor or x.sets[dim] is None or sizes != 1:
        return slicing.split(context, func, *args, **kwargs)
    return tuple(slice_on_rank(x, dim, place, place + 1) for place in range(x.full[dim]))


def narrow_positions(
    context: "GlobalTensorContext", func: Function, input: Any, dim: int, start: int, length: int
) -> Any:
    """Computes ``narrow``; a single position of the sharded dim is only on the rank that stores it."""
    at = positive_dim(dim, input.ndim)
    if type(input) is GlobalTensor and input.sets[at] is not None and length == 1 and type(start) is int:
        first = positive_dim(start, input.full[at])
        with suppress(NoRuleError):
            return slice_on_rank(input, at, first, first + 1)
    return slicing.narrow(context, func, input, dim, start, length)


def blank_sequence(context: "GlobalTensorContext", func: Function, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes ``zeros_like`` and similar functions; the result is sharded as ``input``.

    If the first function that writes into it has no rule for sharded tensors, it becomes unsharded.
    """
    if type(input) is not GlobalTensor or not any(input.sets):
        return metadata.blank(context, func, input, *args, **kwargs)
    local = func(input.local.detach(), *args, **kwargs)
    made = GlobalTensor(local, tuple(input.full), input.sets, context)
    whole, dtype, graded = tuple(input.full), local.dtype, local.requires_grad

    def make() -> Tensor:
        made: Tensor = func(local.detach().new_empty(1).expand(whole), *args, **kwargs)
        return made.to(dtype).requires_grad_(graded)

    state_of(input).written.blank[made] = make, local._version
    return made


def blank_of_placed(context: "GlobalTensorContext", func: Function, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes ``zeros_like`` and similar functions for a tensor ``input`` that a single rank stores.

    Returns a plain tensor on every rank.
    """
    if type(input) is not PlacedTensor:
        raise NoRuleError("the result copies the shape of another tensor.")
    return func(torch.empty(1, dtype=input.dtype, device=input.device).expand(input.full), *args, **kwargs)


def gathered_or_blank(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Runs ``func``, which has no rule for sharded tensors, on every rank with gathered arguments.

    If ``func`` writes in place into a result of ``zeros_like`` without earlier writes, this result becomes unsharded
    without a gather.
    """
    name, target = function_name(func), args[0] if args else None
    if type(target) is not GlobalTensor or not writes_in_place(name):
        return gathered(context, func, *args, **kwargs)
    if any(target.sets):
        make, version = state_of(target).written.blank.pop(target, (None, 0))
        if make is None or target.local._version != version or _has_views(target):
            return gathered(context, func, *args, **kwargs)
        target.local, target.sets = make(), (None,) * target.ndim
    func(
        target.local,
        *(gathered_value(one, name) for one in args[1:]),
        **{key: gathered_value(kwargs[key], name) for key in kwargs},
    )
    follow_grad(target)
    return target


def _has_views(x: GlobalTensor) -> bool:
    """Returns True if other tensors share the memory of the shard, so that a new shard would not reach them."""
    count = torch._C._storage_Use_Count(x.local.untyped_storage()._cdata)
    return not x.views.axis.dry and count > _USES_ALONE


def gathered_value(value: Any, name: str) -> Any:
    """Returns ``value`` as a plain tensor on every rank if it is sharded or on a single rank; otherwise unchanged.

    Converts each item of a tuple. ``name``: key under which ``gathers`` of the context counts the gather.
    """
    if type(value) is PlacedTensor:
        return value.everywhere(name)
    if type(value) is GlobalTensor:
        return full(value, name)
    return tuple(gathered_value(one, name) for one in value) if isinstance(value, tuple) else value


def set_position(context: "GlobalTensorContext", func: Function, target: Any, index: Any, value: Any) -> Any:
    """Writes ``value`` to ``target[index]`` in place, for a sharded ``target``.

    A single position is written only by the rank that stores it. A write to all positions runs on every rank.
    """
    if type(target) is not GlobalTensor or not any(target.sets):
        raise NoRuleError("the target is not sharded.")
    check_memory(target, "[...] =")
    found = _position(target, index)
    if found is None:
        if type(value) is PlacedTensor:
            value = value.everywhere("[...] =")
        piece = slicing.getitem(context, func, target, index)
        if type(piece) is not GlobalTensor or piece.copied:
            raise NoRuleError("the written part is not a view of the shard.")
        piece.local.copy_(part(context, value, piece.sets) if isinstance(value, Tensor) else torch.as_tensor(value))
        state_of(target).written.blank.pop(target, None)
        follow_grad(target)
        return None
    items, dim, place, start = found
    own = target.sets[dim]
    assert own is not None
    rank, offset = home_of(context, own, start, start + 1)
    value = _at(value, rank)
    sequences = state_of(target)
    sequences.written.blank.pop(target, None)
    graded = isinstance(value, Tensor) and value.requires_grad
    _tie(target, graded)
    if context.axis.dry:  # a run on shapes reads no content; a write in place into a traced tensor hides its graph
        if graded and context.axis.index == rank:
            target.local = target.local + _local(value).sum().to(target.dtype)
    elif context.axis.index == rank:
        items[place] = offset if isinstance(items[place], int) else slice(offset, offset + 1)
        target.local[tuple(items)] = value.local if type(value) is PlacedTensor else value
    follow_grad(target)
    return None


def _at(value: Any, rank: int) -> Any:
    if type(value) is PlacedTensor:
        return value.on(rank)
    return full(value, "[...] =") if type(value) is GlobalTensor else value


def _tie(target: GlobalTensor, graded: bool) -> None:
    """Lets the backward of ``target`` reach the messages so far, on every rank, before a write on one of them."""
    sequences = state_of(target)
    token, done = sequences.relay.token, sequences.written.tied.get(target)
    if torch.is_grad_enabled() and graded and (done is None or done[0] is not token):
        target.local = sequences.relay.tie(target.local, graded, in_place=True)
        sequences.written.tied[target] = (token,)


def stack_placed(context: "GlobalTensorContext", func: Function, tensors: Any, dim: int = 0) -> Any:
    """Computes ``stack`` of tensors that single ranks store.

    If they are on several ranks, and their number is at least twice the number of ranks, the result is sharded along
    the new dim. Otherwise one rank receives all of them and computes the result.
    """
    dim = positive_dim(dim, tensors[0].ndim + 1)
    return _joined(context, func, list(tensors), dim, [1] * len(tensors))


def cat_placed(context: "GlobalTensorContext", func: Function, tensors: Any, dim: int = 0) -> Any:
    """Computes ``cat`` of tensors that single ranks store; some may be sharded instead.

    If any is sharded, the result is sharded, otherwise placed as by :func:`stack_placed`.
    """
    tensors = list(tensors)
    dim = positive_dim(dim, tensors[0].ndim)
    if any(type(one) is GlobalTensor and any(one.sets) for one in tensors):
        return func([_sharded_along(one, dim) if type(one) is PlacedTensor else one for one in tensors], dim)
    return _joined(context, func, tensors, dim, [one.shape[dim] for one in tensors])


def _sharded_along(x: PlacedTensor, dim: int) -> GlobalTensor:
    """Returns ``x`` as a global tensor with all of ``dim`` on one rank; nothing is communicated."""
    size, context = x.shape[dim], x.views
    if size < 2:
        raise NoRuleError("a dim of one element cannot be sharded, because it broadcasts.")
    index = Index((np.arange(size if rank == x.rank else 0) for rank in range(context.axis.size)), size)
    shape = (*x.full[:dim], 0, *x.full[dim + 1 :])
    local = x.local if x.here else torch.zeros(shape, dtype=x.dtype, device=x.device)
    sets = tuple(index if place == dim else None for place in range(x.ndim))
    local = state_of(x).relay.tie(local, x.requires_grad)
    return GlobalTensor(local, tuple(x.full), sets, context)


def _joined(context: "GlobalTensorContext", func: Function, tensors: list[Any], dim: int, sizes: Sequence[int]) -> Any:
    ranks = _ranks(tensors)
    if len(set(ranks)) == 1 or len(tensors) < 2 * context.axis.size:
        return run_on_one_rank(context, func, (tensors, dim), {})
    index = context.find(("joined", tuple(ranks), tuple(sizes)), lambda: _index(ranks, sizes, context.axis.size))
    mine = [_local(one) for one, rank in zip(tensors, ranks, strict=True) if rank == context.axis.index]
    shape = list(tensors[0].shape)
    if func.__name__ == "stack":
        shape.insert(dim, 1)
    shape[dim] = sum(sizes)
    return _sharded(tensors, func(mine, dim) if mine else None, shape, (dim, index))


def join_pieces(pieces: list[PlacedTensor], dim: int) -> GlobalTensor:
    """Concatenates ``pieces``, each on a single rank, to a tensor sharded along ``dim``, without communication."""
    context, first = pieces[0].views, pieces[0]
    ranks, sizes = [one.rank for one in pieces], [one.shape[dim] for one in pieces]
    index = context.find(("joined", tuple(ranks), tuple(sizes)), lambda: _index(ranks, sizes, context.axis.size))
    mine = [one.local for one in pieces if one.here]
    shape = [*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :]]
    return _sharded(pieces, torch.cat(mine, dim) if mine else None, shape, (dim, index))


def _sharded(pieces: Sequence[Any], local: Tensor | None, shape: Sequence[int], cut: tuple[int, Index]) -> GlobalTensor:
    """Returns the tensor of ``shape`` that is sharded along the dim and by the Index of ``cut``."""
    dim, index = cut
    first = _one_placed(pieces)
    if local is None:
        empty = tuple(0 if place == dim else size for place, size in enumerate(shape))
        local = torch.zeros(empty, dtype=first.dtype, device=first.device)
    local = state_of(first).relay.tie(local, any(one.requires_grad for one in pieces))
    sets = tuple(index if place == dim else None for place in range(len(shape)))
    return GlobalTensor(local, tuple(shape), sets, first.views)


def _one_placed(tensors: Sequence[Any]) -> PlacedTensor:
    return next(one for one in tensors if type(one) is PlacedTensor)


def _local(one: Tensor) -> Tensor:
    return one.local if isinstance(one, GlobalTensor) else one


def _ranks(tensors: list[Any]) -> list[int]:
    """Returns the rank of each tensor; that of a tensor on all ranks is the next one's."""
    found: list[int] = []
    last = next(one.rank for one in reversed(tensors) if type(one) is PlacedTensor)
    for one in reversed(tensors):
        last = one.rank if type(one) is PlacedTensor else last
        found.append(last)
    return found[::-1]


def _index(ranks: list[int], sizes: Sequence[int], count: int) -> Index:
    owner = np.repeat(ranks, sizes)
    return Index((np.flatnonzero(owner == rank) for rank in range(count)), len(owner))


def _named(rules: dict[str, "TensorRule"]) -> Iterator[tuple[Any, "TensorRule"]]:
    for name, rule in rules.items():
        for owner in (Tensor, torch):
            if callable(found := getattr(owner, name, None)):
                yield found, rule


_LIKES: dict[str, Any] = dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like"), blank_sequence)
_ON_POSITIONS: dict[str, Any] = {
    "select": select_position,
    "__getitem__": get_positions,
    "unbind": unbind_positions,
    "split": split_positions,
    "split_with_sizes": split_positions,
    "narrow": narrow_positions,
    "__setitem__": set_position,
    **_LIKES,
}
SLICE_RULES: Mapping[Any, "TensorRule"] = MappingProxyType(
    {**dict(_named(_ON_POSITIONS)), torch.functional.split: split_positions}
)
"""Rules of global tensors that make tensors on one rank, or write them."""

_OF_PLACED: dict[str, Any] = {
    "stack": stack_placed,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat_placed),
    "__setitem__": set_position,
    **dict.fromkeys((*_LIKES, "new_zeros", "new_ones", "new_empty", "new_full"), blank_of_placed),
}
PLACED_RULES: Mapping[Any, "TensorRule"] = MappingProxyType(dict(_named(_OF_PLACED)))
"""Rules of tensors on one rank; all other functions run on that rank."""
