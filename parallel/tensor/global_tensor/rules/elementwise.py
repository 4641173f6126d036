"""Functions that work element by element, dtype conversions, and dropout.

    f(x_AB, y_B)      x sharded along A: the shard of x meets all of y, and the result is sharded as x
    f_(x, y)          the shard of x is written in place; y is sliced to fit it, and gathered first if necessary
    x.type_as(y)      only the dtype of y is read

Dropout draws random numbers by the holders of the elements:

    on one rank       numbers of that rank, between two seedings
    on all ranks      equal numbers: generators agree
    on some ranks     every rank draws the mask of the full tensor and takes its slice

Each draw has the two seedings of a region (``layers.parallel_region``): every number in between
belongs to a shard, and afterwards generators agree on all ranks.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.tensor.global_tensor.global_tensor import (
    Function,
    GlobalTensor,
    LocalOnlyError,
    follow_grad,
    like,
)
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, Sets, held_once
from engine.parallel.tensor.global_tensor.operands import broadcast_operands, fit, part
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.trace.torch_function import function_name

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def dropout(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
) -> Any:
    """Runs ``F.dropout`` or ``F.alpha_dropout`` on this rank's shard of ``input``.

    Ranks with different elements draw different random numbers.
    """
    if training is None:
        training = func.__name__ == "dropout"  # the default of F.dropout; F.alpha_dropout's default is False
    return drop(context, func, input, (p, training), inplace)


def dropout_(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    p: float,
    training: bool | None = None,
    train: bool = False,
) -> Any:
    """Runs ``torch.dropout`` or ``torch.alpha_dropout`` on this rank's shard of ``input``.

    ``training``, if given, replaces ``train``.
    """
    return drop(context, func, input, (p, train if training is None else training), None)


def drop(
    context: "GlobalTensorContext", func: Function, input: Any, how: tuple[float, bool], inplace: bool | None
) -> Any:
    """Runs the dropout function ``func`` on this rank's shard of ``input``. ``how``: (probability, training).

    ``inplace``: None if ``func`` has no such argument.

    Raises:
        NoRuleError: ``input`` is a plain tensor. Also for alpha dropout if ``input`` is sharded with some elements on
            several ranks.
    """
    if type(input) is not GlobalTensor:
        raise NoRuleError("dropout got a plain tensor.")
    extra = {} if inplace is None else {"inplace": inplace}
    try:
        alone = draws_alone(input.sets, how[0] if how[1] else 0.0)
    except NoRuleError:
        if func.__name__ != "dropout":
            raise
        mask = functional.dropout(input.local.new_ones(input.full), *how)
        return input.mul_(mask) if inplace else input * mask
    with context.own_draws(input.device) if alone else nullcontext():
        return elementwise(context, func, input, *how, **extra)


def draws_alone(sets: Sets, p: float) -> bool:
    """Returns True if dropout with probability ``p`` must draw a different mask on each rank, for sharding ``sets``.

    Raises:
        NoRuleError: ``p`` is not 0, and some dim is sharded but some elements are on several ranks.
    """
    if p == 0.0 or not any(index is not None for index in sets):
        return False
    if not held_once(sets):
        raise NoRuleError("dropout needs one mask for the several ranks that store an element.")
    return True


def elementwise(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Runs the elementwise function ``func`` on the shards of its operands, without communication in forward.

    Raises:
        NoRuleError: ``out`` is given, or some element of the result would be on no rank.
    """
    if not kwargs:
        first: Any = args[0]
        other: Any = args[1] if len(args) == 2 else None
        if type(first) is GlobalTensor and len(args) < 3 and not isinstance(other, Tensor):
            return like(first, func(first.local, *args[1:]))
        if _alike(first, other):
            return like(first, func(first.local, other.local))
    elif kwargs.get("out") is not None:
        raise NoRuleError("no rule writes into out=.")
    elif kwargs.get("inplace") is True:
        return in_place(context, func, *args, **kwargs)
    return _broadcast(context, func, args, kwargs)


def _broadcast(context: "GlobalTensorContext", func: Function, args: Any, kwargs: Any) -> GlobalTensor:
    tensors = _tensors(args, kwargs)
    joined = broadcast_operands(context, tensors)
    parts = [fit(context, tensor, own) for tensor, own in zip(tensors, joined.operands, strict=True)]
    return GlobalTensor(_call(func, args, kwargs, parts), joined.shape, joined.sets, context)


def in_place(context: "GlobalTensorContext", func: Function, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the in-place function ``func``, such as ``add_``, on this rank's shard of ``target``. Returns ``target``.

    Raises:
        EngineError: the shard is a copy, so the write would be lost.
        NoRuleError: ``target`` is a plain tensor, or another operand is larger than ``target``.
    """
    if type(target) is not GlobalTensor:
        raise NoRuleError("a shard cannot be written into a plain tensor.")
    check_memory(target, function_name(func))
    tensors = _tensors(args, kwargs)
    for tensor in tensors:
        if torch.broadcast_shapes(tensor.shape, target.full) != target.full:  # type: ignore[no-untyped-call]
            raise NoRuleError("the other operand is larger than the tensor that is written.")
    others = [_fit(context, tensor, target.sets, function_name(func)) for tensor in tensors]
    out = _call(func, (target, *args), kwargs, [target.local, *others])
    if out is target.local:
        follow_grad(target)
        return target
    return like(target, out)


def check_memory(target: GlobalTensor, name: str) -> None:
    """Checks that the shard of ``target`` is a view of the tensor from which ``target`` was sliced.

    ``name``: function that writes, for the error text.

    Raises:
        EngineError: the shard of ``target`` is a copy.
    """
    if target.copied:
        raise LocalOnlyError(
            f"{name} writes in place into a slice of a tensor that is sharded over tensor ranks, but this rank has a "
            f"copy of that slice; write x = {name.strip('_')}(x, ...), which makes a new tensor."
        )


def cast_like(context: "GlobalTensorContext", func: Function, given: Any, *args: Any, **kwargs: Any) -> Any:
    """Converts the dtype or device of this rank's shard of ``given``, by ``func``, such as ``Tensor.to``."""
    args = tuple(other.local if type(other) is GlobalTensor else other for other in args)
    kwargs = {key: other.local if type(other) is GlobalTensor else other for key, other in kwargs.items()}
    if type(given) is GlobalTensor:
        return like(given, func(given.local, *args, **kwargs))
    return func(given, *args, **kwargs)


def where(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Runs ``torch.where`` with condition and two values on shards.

    Raises:
        NoRuleError: only the condition is given.
    """
    if len(args) + len(kwargs) == 1:
        raise NoRuleError("where with one argument returns positions, which depend on the content of all shards.")
    return elementwise(context, func, *args, **kwargs)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    found = [argument for argument in args if isinstance(argument, Tensor)]
    if kwargs:
        found += [argument for argument in kwargs.values() if isinstance(argument, Tensor)]
    return found


def _alike(first: Any, other: Any) -> bool:
    return (
        type(first) is GlobalTensor
        and type(other) is GlobalTensor
        and first.full == other.full
        and first.sets == other.sets
    )


def _fit(context: "GlobalTensorContext", tensor: Tensor, sets: Sets, name: str) -> Tensor:
    try:
        return part(context, tensor, sets)
    except NoRuleError:
        assert type(tensor) is GlobalTensor
        return part(context, full(tensor, name), sets)


def _call(func: Function, args: Any, kwargs: Any, parts: list[Tensor]) -> Any:
    left = iter(parts)
    plain = [next(left) if isinstance(argument, Tensor) else argument for argument in args]
    if not kwargs:
        return func(*plain)
    named = {key: next(left) if isinstance(argument, Tensor) else argument for key, argument in kwargs.items()}
    return func(*plain, **named)
