"""Functions that need the shard's metadata or the full shape, gradients of global tensors, and hooks on them."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, follow_grad, like
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, held_once

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def of_part(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Asks the shards, when the answer holds for the full tensors too: dtype, device."""
    args = tuple(value.local if type(value) is GlobalTensor else value for value in args)
    return func(*args, **{key: value.local if type(value) is GlobalTensor else value for key, value in kwargs.items()})


def blank(context: "GlobalTensorContext", func: Function, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``zeros_like`` and similar: a plain tensor of the full shape."""
    if type(input) is not GlobalTensor:
        raise NoRuleError("of a plain tensor")
    return func(input.local.detach().new_empty(1).expand(input.full), *args, **kwargs)


def size_of(context: "GlobalTensorContext", func: Function, input: Any) -> Any:
    """``torch.numel``: the number of elements of the full tensor."""
    return input.numel()


def strides(context: "GlobalTensorContext", func: Function, input: Any, dim: int | None = None) -> Any:
    """Returns the strides that the full tensor has once it is gathered."""
    steps = [1]
    for size in reversed(input.full[1:]):
        steps.insert(0, steps[0] * max(size, 1))
    found = tuple(steps[: input.ndim])
    return found if dim is None else found[dim]


def gradient(context: "GlobalTensorContext", func: Function, input: Any) -> Any:
    """``x.grad``: the gradient of the shard, as a global tensor."""
    return None if input.local.grad is None else GlobalTensor(input.local.grad, input.full, input.sets, context)


def part_of(context: "GlobalTensorContext", func: Function, input: Any, *args: Any) -> Any:
    """``detach``, ``data``: the same elements outside the graph, in the same memory."""
    made = like(input, func(input.local, *args))
    made.copied = input.copied
    return made


def tell_part(context: "GlobalTensorContext", func: Function, input: Any, *args: Any) -> Any:
    """``retain_grad``, ``requires_grad_``: applied to the shard."""
    func(input.local, *args)
    follow_grad(input)
    return input if func.__name__.endswith("_") else None


def register_hook(context: "GlobalTensorContext", func: Function, input: Any, hook: Any) -> Any:
    """``hook`` gets the gradient as a global tensor, and may return another one.

    Raises:
        NoRuleError: several ranks hold some elements, so that the incoming gradient is partial.
    """
    if not held_once(input.sets):
        raise NoRuleError("gradients are parts")

    full, sets = input.full, input.sets  # a hook that kept its own tensor would never be freed

    def on_part(grad: Tensor) -> Tensor | None:
        found = hook(GlobalTensor(grad, full, sets, context))
        if found is None:
            return None
        if type(found) is not GlobalTensor or found.sets != sets:
            found = GlobalTensor(grad.new_zeros(grad.shape), full, sets, context).add_(found)
        return found.local  # type: ignore[no-any-return]

    return func(input.local, on_part)
