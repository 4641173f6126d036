"""Functions that work element by element, and the choice of a dtype.

f(x_AB, y_B)      x cut along A: y is used whole, x's part as it is; the result is cut as x
f_(x, y)          the part of x is written in place; y is cut to fit it, gathered first if it must be
x.type_as(y)      y gives a dtype and nothing else
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.tensor.views.gathered import name_of
from engine.parallel.tensor.views.index import NoRuleError, Sets
from engine.parallel.tensor.views.moves import full
from engine.parallel.tensor.views.operands import fit, join, part
from engine.parallel.tensor.views.view import Function, View, follow_grad, like

if TYPE_CHECKING:
    from engine.parallel.tensor.views.context import Views


def elementwise(views: "Views", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Broadcast and run on parts."""
    if not kwargs:
        first: Any = args[0]
        other: Any = args[1] if len(args) == 2 else None
        if type(first) is View and len(args) < 3 and not isinstance(other, Tensor):
            return like(first, func(first.local, *args[1:]))
        if _alike(first, other):
            return like(first, func(first.local, other.local))
    elif kwargs.get("out") is not None:
        raise NoRuleError("out")
    elif kwargs.get("inplace") is True:
        return in_place(views, func, *args, **kwargs)
    return _broadcast(views, func, args, kwargs)


def _broadcast(views: "Views", func: Function, args: Any, kwargs: Any) -> View:
    tensors = _tensors(args, kwargs)
    joined = join(views, tensors)
    parts = [fit(views, tensor, own) for tensor, own in zip(tensors, joined.operands, strict=True)]
    return View(_call(func, args, kwargs, parts), joined.shape, joined.sets, views)


def in_place(views: "Views", func: Function, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Write into the part of ``target``.

    Raises:
        EngineError: the part is a copy of what plain code would write into.
    """
    if type(target) is not View:
        raise NoRuleError("a plain tensor is written")
    check_memory(target, name_of(func))
    tensors = _tensors(args, kwargs)
    for tensor in tensors:
        if torch.broadcast_shapes(tensor.shape, target.full) != target.full:  # type: ignore[no-untyped-call]
            raise NoRuleError("more than is written")
    others = [_fit(views, tensor, target.sets, name_of(func)) for tensor in tensors]
    out = _call(func, (target, *args), kwargs, [target.local, *others])
    if out is target.local:
        follow_grad(target)
        return target
    return like(target, out)


def check_memory(target: View, name: str) -> None:
    """Raise where writing into ``target`` would not write into the tensor that it was taken from."""
    if target.copied:
        raise EngineError(
            f"{name} writes in place into a piece of a tensor that is cut over tensor ranks, and this rank holds a "
            f"copy of that piece: write x = {name.strip('_')}(x, ...) instead, which makes a new tensor."
        )


def cast_like(views: "Views", func: Function, given: Any, *args: Any, **kwargs: Any) -> Any:
    """``given`` in another dtype or on another device, perhaps those of another tensor."""
    args = tuple(other.local if type(other) is View else other for other in args)
    kwargs = {key: other.local if type(other) is View else other for key, other in kwargs.items()}
    if type(given) is View:
        return like(given, func(given.local, *args, **kwargs))
    return func(given, *args, **kwargs)


def where(views: "Views", func: Function, *args: Any, **kwargs: Any) -> Any:
    """A choice; the form with one argument asks for places."""
    if len(args) + len(kwargs) == 1:
        raise NoRuleError("places depend on content")
    return elementwise(views, func, *args, **kwargs)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    found = [argument for argument in args if isinstance(argument, Tensor)]
    if kwargs:
        found += [argument for argument in kwargs.values() if isinstance(argument, Tensor)]
    return found


def _alike(first: Any, other: Any) -> bool:
    return type(first) is View and type(other) is View and first.full == other.full and first.sets == other.sets


def _fit(views: "Views", tensor: Tensor, sets: Sets, name: str) -> Tensor:
    try:
        return part(views, tensor, sets)
    except NoRuleError:
        assert type(tensor) is View
        return part(views, full(tensor, name), sets)


def _call(func: Function, args: Any, kwargs: Any, parts: list[Tensor]) -> Any:
    left = iter(parts)
    plain = [next(left) if isinstance(argument, Tensor) else argument for argument in args]
    if not kwargs:
        return func(*plain)
    named = {key: next(left) if isinstance(argument, Tensor) else argument for key, argument in kwargs.items()}
    return func(*plain, **named)
