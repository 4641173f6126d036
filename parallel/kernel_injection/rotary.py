"""Attention modules that rotate queries and keys by a function of their source file, as Hugging Face's do.

The function is recognised by its parameters (q, k, cos, sin, ...) and by what it computes. A module that calls it gets
a copy of its forward in which the function's name refers to our operator; the source file is untouched.
"""

import inspect
from collections.abc import Callable, Iterator
from dis import get_instructions
from itertools import product
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from engine.kernels.dispatch import REFERENCE, Kernels, is_autocast
from engine.kernels.ops.rotary import Rotary, rotary
from engine.parallel.kernel_injection.equivalence import agrees, own_forward, random
from engine.parallel.model.forward_patch import with_global

_PARAMETERS = ["q", "k", "cos", "sin"]


def rotary_globals(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Functions with these parameters that the module's forward calls by a global name."""
    forward = own_forward(module)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return
    if any(step.opname == "STORE_GLOBAL" for step in get_instructions(forward)):
        return  # the copy of the forward would write its own globals
    for name in forward.__code__.co_names:
        value = forward.__globals__.get(name)
        if isinstance(value, FunctionType) and list(inspect.signature(value).parameters)[:4] == _PARAMETERS:
            yield name, value


def find_rotary(function: FunctionType) -> Rotary | None:
    """The rotation that ``function`` computes with default values for all arguments after sin, or None."""
    given = [random(2, heads, 5, 8, seed=heads) for heads in (3, 1)]
    cos, sin = (random(2, 5, 8, seed=seed) for seed in (4, 5))
    for interleaved, heads_dim in product((False, True), (1, 2)):
        form = Rotary(interleaved, heads_dim)
        q, k = (x.transpose(1, heads_dim).contiguous() for x in given)
        operator = lambda q, k, f=form: rotary(q, k, cos, sin, f, REFERENCE)  # noqa: E731
        if agrees(lambda q, k: function(q, k, cos, sin), operator, [q, k]):
            return form
    return None


def injected_rotary(
    forward: Any, name: str, function: FunctionType, form: Rotary, kernels: Kernels
) -> Callable[..., Any]:
    """``forward`` with the operator in place of ``function``; calls that it does not cover run ``function``."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        full = cos.shape[-1] == q.shape[-1] == k.shape[-1] and cos.ndim == 3 and q.dtype == k.dtype == cos.dtype
        if args or kwargs or not full or is_autocast(q):
            return function(q, k, cos, sin, *args, **kwargs)
        return rotary(q, k, cos, sin, form, kernels)

    return with_global(forward, name, turned)
