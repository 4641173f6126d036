"""Layer norm and RMS norm.

Over uncut dims each rank normalises what it holds, and the gradients of weight and bias are parts. Over a cut dim (the
norm of all query heads together) the statistics are summed: one number a token for RMS norm, two for layer norm.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.parallel.tensor.views.index import NoRuleError
from engine.parallel.tensor.views.operands import part
from engine.parallel.tensor.views.reductions import moments, summed
from engine.parallel.tensor.views.view import Function, View, like

if TYPE_CHECKING:
    from engine.parallel.tensor.views.context import Views


def layer_norm(views: "Views", func: Function, input: Any, normalized_shape: Any, *affine: Any, **named: Any) -> Any:
    """``weight`` and ``bias`` may be whole or cut as the normalised dims."""
    weight, bias, eps = _affine(affine, named, ("weight", "bias", "eps"), (None, None, 1e-5))
    dims = _dims(input, normalized_shape)
    sets = input.sets[-len(dims) :]
    if any(sets):
        mean, spread = moments(_wide(input), dims)
        return _scaled(func, input, (_wide(input) - mean) * torch.rsqrt(spread + eps), weight, bias)
    weight, bias = (None if given is None else part(views, given, sets) for given in (weight, bias))
    return like(input, func(input.local, normalized_shape, weight, bias, eps))


def rms_norm(views: "Views", func: Function, input: Any, normalized_shape: Any, *affine: Any, **named: Any) -> Any:
    """``weight`` may be whole or cut as the normalised dims."""
    weight, eps = _affine(affine, named, ("weight", "eps"), (None, None))
    dims = _dims(input, normalized_shape)
    sets = input.sets[-len(dims) :]
    if any(sets):
        wide: Any = _wide(input)
        square = summed(wide * wide, dims, True) / math.prod(input.full[dim] for dim in dims)
        return _scaled(
            func, input, wide * torch.rsqrt(square + (torch.finfo(input.dtype).eps if eps is None else eps)), weight
        )
    return like(input, func(input.local, normalized_shape, None if weight is None else part(views, weight, sets), eps))


def _affine(given: Any, named: Any, names: tuple[str, ...], defaults: tuple[Any, ...]) -> list[Any]:
    values = dict(zip(names, defaults, strict=True)) | dict(zip(names, given, strict=False)) | named
    return [values[name] for name in names]


def _dims(view: Any, normalized_shape: Any) -> tuple[int, ...]:
    if type(view) is not View:
        raise NoRuleError("a plain tensor is normalised")
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if view.full[-len(shape) :] != shape:
        raise NoRuleError("sizes do not agree")
    return tuple(range(view.ndim - len(shape), view.ndim))


def _wide(view: View) -> View:
    """At least 32 bits: statistics of fewer lose too much."""
    return like(view, view.local.float()) if view.local.dtype in (torch.float16, torch.bfloat16) else view


def _scaled(func: Function, view: View, normal: Any, weight: Tensor | None, bias: Tensor | None = None) -> Any:
    normal = normal if weight is None else normal * weight
    normal = normal if bias is None else normal + bias
    return normal.to(func(view.local.detach().new_zeros(1), (1,)).dtype)  # which autocast may choose
