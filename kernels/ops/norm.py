"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), fused with an optional residual sum.

    s = x + residual      y = (s - mean) / sqrt(variance + eps) (offset + weight) + bias        over the last dim

PyTorch and Triton both compute in fp32 (fp64 for fp64) and round once, at the end.

Shape suffixes: N rows (all leading dims together), H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.dispatch import Kernels, fused_operator

WIDEST, WIDEST_LAYER_FP32 = 16384, 8192
"""Maximum row width of one program, and of an fp32 LayerNorm."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Hyperparameters of RMSNorm or LayerNorm."""

    eps: float
    centered: bool = False
    """True for LayerNorm, which subtracts the mean."""
    offset: float = 0.0
    """Number added to the weight: 1 for models that store weight - 1."""


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, form: Norm, kernels: Kernels) -> Tensor:
    """Computes RMSNorm, or LayerNorm if ``form.centered``, of ``x`` [.., H] over the last dim. Differentiable.

    The result has the dtype of ``x``. ``weight`` and ``bias`` are [H]. ``kernels`` selects Triton or PyTorch.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(norm, (x, weight), x, weight, bias, form, kernels)
    if not _fits(x, weight, bias, form) or not kernels.triton("norm", x, x.shape[-1]):
        return norm_reference(x, weight, bias, form)
    return _norm(x.contiguous(), weight, bias, form.eps, form.offset, form.centered)[0]


def add_norm(
    x: Tensor, residual: Tensor, affine: tuple[Tensor, Tensor | None], form: Norm, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Returns (norm of x + residual, x + residual), both [.., H] in the dtype of ``x``. Differentiable.

    The norm is RMSNorm, or LayerNorm if ``form.centered``. ``affine`` is its (weight [H], bias [H] or None).
    """
    weight, bias = affine
    if has_torch_function((x, residual, weight)):
        given = x, residual, affine, form, kernels
        return handle_torch_function(add_norm, (x, residual, weight), *given)
    alike = residual.shape == x.shape and residual.dtype == x.dtype
    if not alike or not _fits(x, weight, bias, form) or not kernels.triton("norm", x, x.shape[-1]):
        stream = x + residual
        return norm_reference(stream, weight, bias, form), stream
    y, stream, _, _ = _add_norm(
        x.contiguous(), residual.contiguous(), weight, bias, form.eps, form.offset, form.centered
    )
    return y, stream


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, form: Norm) -> Tensor:
    """Computes RMSNorm, or LayerNorm if ``form.centered``, over the last dim of ``x`` in PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    width, scale = x.shape[-1:], weight.to(wide)
    if form.offset:
        scale = scale + form.offset
    if form.centered:
        shift = None if bias is None else bias.to(wide)
        return functional.layer_norm(x.to(wide), width, scale, shift, form.eps).to(x.dtype)
    y = functional.rms_norm(x.to(wide), width, scale, form.eps)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, form: Norm) -> bool:
    most = WIDEST_LAYER_FP32 if form.centered and x.dtype == torch.float32 else WIDEST
    narrow = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and 0 < x.shape[-1] <= most
    given = [t for t in (weight, bias) if t is not None]
    return narrow and all(t.dtype == x.dtype and t.shape == x.shape[-1:] and t.is_contiguous() for t in given)


@fused_operator("trine::norm")
def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from engine.kernels.gpu.norm import norm_forward

    y, _, mean, rstd = norm_forward(x, None, (weight, bias), eps, offset, centered)
    return y, mean, rstd


@fused_operator("trine::add_norm")
def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from engine.kernels.gpu.norm import norm_forward

    y, stream, mean, rstd = norm_forward(x, residual, (weight, bias), eps, offset, centered)
    assert stream is not None
    return y, stream, mean, rstd


@fused_operator("trine::norm_backward")
def _norm_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from engine.kernels.gpu.norm import norm_backward

    form = offset, mean.numel() > 0, biased
    return norm_backward(dy, dstream, stream, weight, (mean, rstd), form)


@_norm.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _statistic(x, centered), _statistic(x, True)


@_add_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), _statistic(x, centered), _statistic(x, True)


@_norm_backward.register_fake
def _(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dweight = torch.empty_like(weight, dtype=torch.float32)
    return torch.empty_like(stream), dweight, torch.empty_like(dweight) if biased else dweight.new_empty(0)


def _statistic(x: Tensor, present: bool) -> Tensor:
    return x.new_empty(x.shape[:-1].numel() if present else 0, dtype=torch.float32)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, offset, _ = inputs
    _keep(ctx, (x, weight, *output[1:]), offset, bias)


def _norm_gradients(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return *_input_gradients(ctx, dy, None), None, None, None


def _keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _, offset, _ = inputs
    _keep(ctx, (output[1], weight, *output[2:]), offset, bias)


def _add_norm_gradients(ctx: Any, dy: Tensor | None, dstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    ds, dweight, dbias = _input_gradients(ctx, dy, dstream)
    return ds, ds, dweight, dbias, None, None, None


def _keep(ctx: Any, saved: tuple[Tensor, ...], offset: float, bias: Tensor | None) -> None:
    ctx.save_for_backward(*saved)
    ctx.offset, ctx.bias = offset, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)  # mean and rstd have no gradient, and zeros for them would be two launches


def _input_gradients(ctx: Any, dy: Tensor | None, dstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the stream, the weight and the bias."""
    if dy is None:
        return dstream, None, None
    stream, weight, mean, rstd = ctx.saved_tensors
    added = None if dstream is None else dstream.contiguous()
    biased = ctx.bias is not None
    ds, dweight, dbias = _norm_backward(dy.contiguous(), added, stream, weight, mean, rstd, ctx.offset, biased)
    return ds, dweight.to(weight.dtype), dbias.to(ctx.bias) if biased else None


_norm.register_autograd(_norm_gradients, setup_context=_keep_norm)


_add_norm.register_autograd(_add_norm_gradients, setup_context=_keep_add_norm)


_PIECE = 1 << 20
"""Elements per sum of the reference, because torch converts the whole input to fp64 before it sums."""


def squared_norm(parts: Sequence[tuple[Tensor, bool]], kernels: Kernels) -> Tensor:
    """Returns the sum of squares over the tensors marked True in ``parts``, as an fp64 scalar on their device.

    ``parts``: pairs (flat contiguous values, True to include them), all on one device.
    """
    ours = [_squares_fit(values, kernels) for values, _ in parts]
    rest = [part for part, yes in zip(parts, ours, strict=True) if not yes]
    total = squared_norm_reference(rest) if rest or not parts else None
    if not any(ours):
        assert total is not None
        return total
    from engine.kernels.gpu.norm import squared_norm as launch

    found = launch([part for part, yes in zip(parts, ours, strict=True) if yes])
    return found if total is None else found + total


def squared_norm_reference(parts: Sequence[tuple[Tensor, bool]]) -> Tensor:
    """Returns the sum of squares over the tensors marked True in ``parts``, as an fp64 scalar, in PyTorch.

    ``parts``: pairs (values, True to include them).
    """
    norms = [
        torch.linalg.vector_norm(piece, dtype=torch.float64) * (1.0 if counts else 0.0)
        for values, counts in parts
        for piece in torch.split(values, _PIECE)
    ]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _squares_fit(values: Tensor, kernels: Kernels) -> bool:
    narrow = values.dtype in (torch.float32, torch.bfloat16, torch.float16) and values.is_contiguous()
    if not narrow or not values.numel() or not kernels.replaces(values.device):
        return False
    return kernels.triton("squared_norm", values, 1 << (values.numel().bit_length() - 1))
