"""Rules of functions that read metadata or the full shape, and of gradients and hooks of global tensors."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, follow_grad, like
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, held_once

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def of_part(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Runs ``func`` on the shards, for properties common to shard and full tensor, such as dtype and device."""
    args = tuple(value.local if type(value) is GlobalTensor else value for value in args)
    return func(*args, **{key: value.local if type(value) is GlobalTensor else value for key, value in kwargs.items()})


def blank(context: "GlobalTensorContext", func: Function, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs ``zeros_like``, ``new_zeros`` or a similar function as on a plain tensor of the full shape of ``input``.

    Returns a plain tensor.
    """
    if type(input) is not GlobalTensor:
        raise NoRuleError("the result copies the shape of a plain tensor.")
    return func(input.local.detach().new_empty(1).expand(input.full), *args, **kwargs)


def size_of(context: "GlobalTensorContext", func: Function, input: Any) -> Any:
    """Returns the number of elements of the full tensor, for ``torch.numel``."""
    return input.numel()


def strides(context: "GlobalTensorContext", func: Function, input: Any, dim: int | None = None) -> Any:
    """Returns the strides that a contiguous tensor of the full shape would have, or the stride of ``dim``."""
    steps = [1]
    for size in reversed(input.full[1:]):
        steps.insert(0, steps[0] * max(size, 1))
    found = tuple(steps[: input.ndim])
    return found if dim is None else found[dim]


def gradient(context: "GlobalTensorContext", func: Function, input: Any) -> Any:
    """Returns the gradient of the shard as a global tensor sharded as ``input``, for ``x.grad``; None without one."""
    return None if input.local.grad is None else GlobalTensor(input.local.grad, input.full, input.sets, context)


def part_of(context: "GlobalTensorContext", func: Function, input: Any, *args: Any) -> Any:
    """Returns a global tensor that shares the shard's memory, without autograd graph, for ``detach`` or ``data``."""
    made = like(input, func(input.local, *args))
    made.copied = input.copied
    return made


def tell_part(context: "GlobalTensorContext", func: Function, input: Any, *args: Any) -> Any:
    """Runs ``retain_grad`` or ``requires_grad_`` on this rank's shard, and copies ``requires_grad`` to ``input``."""
    func(input.local, *args)
    follow_grad(input)
    return input if func.__name__.endswith("_") else None


def register_hook(context: "GlobalTensorContext", func: Function, input: Any, hook: Any) -> Any:
    """Registers the gradient hook ``hook`` on this rank's shard of ``input``; the hook gets a global tensor.

    Raises:
        NoRuleError: some elements are on several ranks.
    """
    if not held_once(input.sets):
        raise NoRuleError("a hook cannot get the gradient of a shard with elements on several ranks, which is partial.")

    # captured instead of input: a hook that refers to its own tensor would never be freed
    full, sets = input.full, input.sets

    def on_part(grad: Tensor) -> Tensor | None:
        found = hook(GlobalTensor(grad, full, sets, context))
        if found is None:
            return None
        if type(found) is not GlobalTensor or found.sets != sets:
            found = GlobalTensor(grad.new_zeros(grad.shape), full, sets, context).add_(found)
        return found.local  # type: ignore[no-any-return]

    return func(input.local, on_part)
