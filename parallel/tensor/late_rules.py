"""Functions that logits pass through without being computed (``logit_slice``): what a loss needs, and nothing else.

Shapes change as ``logit_rules`` say, on the hidden states; a wider dtype is noted; a loss is computed by chunks.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.tensor.logit_losses import cross_entropy, logsumexp
from engine.parallel.tensor.logit_rules import CONVERSIONS, RULES, SHAPES, VIEWS, Rule
from engine.parallel.tensor.logit_slice import LateProduct, Slice


def _widened(func: Callable[..., Any], x: Slice, *args: Any, **kwargs: Any) -> Any:
    """``float`` and its like; tried on an empty tensor."""
    product = x.product
    if product is None or any(isinstance(arg, Slice) for arg in (*args, *kwargs.values())):
        return NotImplemented
    before = torch.empty(0, dtype=x.dtype, device=x.local.device)
    after = func(before, *args, **kwargs)
    if not isinstance(after, Tensor) or after.device != before.device or kwargs.get("copy"):
        return NotImplemented
    if after.dtype == x.dtype:
        return x
    if after.dtype == torch.float64 or torch.promote_types(x.dtype, after.dtype) != after.dtype:
        return NotImplemented
    wider = LateProduct(product.weight, product.bias, after.dtype, product.kernels)
    return Slice(x.local, x.vocabulary, x.dim, x.softmax, wider)


def _contiguous(func: Callable[..., Any], x: Slice, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else x.now(x.local, same=True)


def _detached(func: Callable[..., Any], x: Slice) -> Any:
    return x.detached()


def _viewed(func: Callable[..., Any], x: Slice, *sizes: Any, **kwargs: Any) -> Any:
    """Where the logits will lie in memory, the hidden states need not."""
    return RULES[func](Tensor.reshape, x, *sizes, **kwargs)


def _functions(*names: str) -> list[Callable[..., Any]]:
    return [getattr(owner, name) for owner in (torch, Tensor) for name in names]


LATE_RULES: Mapping[Callable[..., Any], Rule] = MappingProxyType(
    {func: RULES[func] for func in SHAPES}
    | dict.fromkeys(CONVERSIONS, _widened)
    | dict.fromkeys(VIEWS, _viewed)
    | dict.fromkeys(_functions("detach"), _detached)
    | {Tensor.contiguous: _contiguous, functional.cross_entropy: cross_entropy}
    | dict.fromkeys((*_functions("logsumexp"), torch.special.logsumexp), logsumexp)
)


def late_answer(func: Callable[..., Any], x: Slice, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the rule of ``func`` makes of logits that wait and other arguments; ``NotImplemented``: compute them."""
    rule = LATE_RULES.get(func)
    return NotImplemented if rule is None else rule(func, x, *args, **kwargs)
