"""Layer norm and RMS norm: torch's functions, and our own operators (``kernels.ops.norm``).

    normalised dims full       each rank normalises its shard; gradients of weight and bias are partial
    a normalised dim sharded   statistics are summed (the norm of all query heads together): one number per token for
                               RMS norm, two for layer norm

Our operators run their kernels on shards in the first case; in the second the reference implementation runs step by
step, under the rules of its functions.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.kernels.ops.norm import norm as norm_operator
from engine.kernels.ops.norm import norm_reference
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, like
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, Sets
from engine.parallel.tensor.global_tensor.operands import broadcast_operands, fit, layout_of, part
from engine.parallel.tensor.global_tensor.rules.reductions import in_32_bits, mean_and_variance, summed

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def layer_norm(
    context: "GlobalTensorContext", func: Function, input: Any, normalized_shape: Any, *affine: Any, **named: Any
) -> Any:
    """Runs ``layer_norm`` on this rank's shard of ``input``; statistics of sharded dims are summed over the ranks.

    ``affine``: weight, bias and eps; weight and bias may be full, or sharded as the normalized dims.
    """
    weight, bias, eps = _affine(affine, named, ("weight", "bias", "eps"), (None, None, 1e-5))
    dims = _dims(input, normalized_shape)
    sets = input.sets[-len(dims) :]
    if any(sets):
        mean, spread = mean_and_variance(in_32_bits(input), dims)
        return _scaled(func, input, (in_32_bits(input) - mean) * torch.rsqrt(spread + eps), weight, bias)
    weight, bias = (None if given is None else part(context, given, sets) for given in (weight, bias))
    return like(input, func(input.local, normalized_shape, weight, bias, eps))


def rms_norm(
    context: "GlobalTensorContext", func: Function, input: Any, normalized_shape: Any, *affine: Any, **named: Any
) -> Any:
    """Runs ``rms_norm`` on this rank's shard of ``input``; statistics of sharded dims are summed over the ranks.

    ``affine``: weight and eps; the weight may be full, or sharded as the normalized dims.
    """
    weight, eps = _affine(affine, named, ("weight", "eps"), (None, None))
    dims = _dims(input, normalized_shape)
    sets = input.sets[-len(dims) :]
    if any(sets):
        wide: Any = in_32_bits(input)
        square = summed(wide * wide, dims, True) / math.prod(input.full[dim] for dim in dims)
        return _scaled(
            func, input, wide * torch.rsqrt(square + (torch.finfo(input.dtype).eps if eps is None else eps)), weight
        )
    return like(
        input, func(input.local, normalized_shape, None if weight is None else part(context, weight, sets), eps)
    )


def _affine(given: Any, named: Any, names: tuple[str, ...], defaults: tuple[Any, ...]) -> list[Any]:
    values = dict(zip(names, defaults, strict=True)) | dict(zip(names, given, strict=False)) | named
    return [values[name] for name in names]


def _dims(x: Any, normalized_shape: Any) -> tuple[int, ...]:
    if type(x) is not GlobalTensor:
        raise NoRuleError("the norm got a plain input.")
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if x.full[-len(shape) :] != shape:
        raise NoRuleError("the sizes do not agree; torch raises its own error.")
    return tuple(range(x.ndim - len(shape), x.ndim))


def _scaled(func: Function, x: GlobalTensor, normal: Any, weight: Tensor | None, bias: Tensor | None = None) -> Any:
    normal = normal if weight is None else normal * weight
    normal = normal if bias is None else normal + bias
    # the dtype of the norm's result, which autocast may choose
    return normal.to(func(x.local.detach().new_zeros(1), (1,)).dtype)


def norm_rule(context: "GlobalTensorContext", func: Function, x: Tensor, *affine_and_form: Any) -> Any:
    """Runs the fused norm :func:`kernels.ops.norm.norm` over the last dim of this rank's shard of ``x``.

    ``affine_and_form``: weight, bias, form (eps, centered, offset), and the choice between Triton and PyTorch. If the
    last dim is sharded, the reference implementation runs and sums the statistics over the ranks.
    """
    weight, bias, form, kernels = affine_and_form
    sets = layout_of(x).sets[-1:]
    weight, bias = _cut(context, weight, sets), None if bias is None else _cut(context, bias, sets)
    if type(x) is not GlobalTensor or any(sets):
        return norm_reference(x, weight, bias, form)
    return like(x, func(x.local, weight.local, None if bias is None else bias.local, form, kernels))


def add_norm_rule(
    context: "GlobalTensorContext", func: Function, x: Tensor, residual: Tensor, *affine_and_form: Any
) -> Any:
    """Runs the fused operator :func:`kernels.ops.norm.add_norm` on this rank's shards of ``x`` and ``residual``.

    Returns (norm of ``x + residual``, ``x + residual``). ``affine_and_form``: (weight, bias), form (eps, centered,
    offset), and the choice between Triton and PyTorch.
    """
    (weight, bias), form, kernels = affine_and_form
    joined = broadcast_operands(context, (x, residual))
    if any(joined.sets[-1:]) or x.shape != residual.shape:
        stream = x + residual
        return norm_operator(stream, weight, bias, form, kernels), stream
    parts = [fit(context, tensor, own) for tensor, own in zip((x, residual), joined.operands, strict=True)]
    local = _cut(context, weight, (None,)).local, None if bias is None else _cut(context, bias, (None,)).local
    made = func(*parts, local, form, kernels)
    return tuple(GlobalTensor(one, joined.shape, joined.sets, context) for one in made)


def _cut(context: "GlobalTensorContext", affine: Tensor, sets: Sets) -> GlobalTensor:
    """Returns a weight or bias sharded as the width; the gradient of a plain one is recorded as partial."""
    return GlobalTensor(part(context, affine, sets), affine.shape, sets, context)
