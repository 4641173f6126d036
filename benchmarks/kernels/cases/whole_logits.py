"""Cross-entropy of whole logits by the softmax kernels, measured against torch's and Liger's.

The engine itself computes the loss on a vocabulary shard or on chunks of tokens, with the same kernels.

Shape suffixes: N rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.cross_entropy import (
    CrossEntropy,
    Question,
    Softmax,
    check_target,
    find_gradient,
    find_statistics,
    fits_softmax_kernels,
    join_softmax_terms,
    uses_triton,
)


def cross_entropy(logits_NV: Tensor, target_N: Tensor, form: CrossEntropy, kernels: Kernels) -> Tensor:
    """Computes the cross-entropy in the dtype of the logits: [], or [N] without reduction. Target int64.
    Differentiable.
    """
    check_target(target_N, logits_NV.shape[-1], form.ignore_index)
    if not fits_softmax_kernels(logits_NV) or not uses_triton("cross_entropy", logits_NV, logits_NV.shape[-1], kernels):
        return reference(logits_NV, target_N, form)
    losses_N: Tensor = _Losses.apply(logits_NV, target_N, form)  # type: ignore[no-untyped-call]
    return form.reduced(losses_N, target_N != form.ignore_index).to(logits_NV.dtype)


def reference(logits_NV: Tensor, target_N: Tensor, form: CrossEntropy) -> Tensor:
    """Computes PyTorch's cross-entropy, in fp32 or wider, rounded once."""
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    found = functional.cross_entropy(
        wide, target_N, ignore_index=form.ignore_index, reduction=form.reduction, label_smoothing=form.label_smoothing
    )
    return found.to(logits_NV.dtype)


class _Losses(torch.autograd.Function):
    """Losses of the rows; the backward reads the logits once more."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, form: CrossEntropy) -> Tensor:
        ctx.form, ctx.question = form, Question(target_N, even=form.label_smoothing > 0)
        width = logits_NV.shape[1]
        found = find_statistics(logits_NV, ctx.question, triton=True)
        softmax, picked_N, weighted_N = join_softmax_terms(found, ctx.question, width, None)
        assert picked_N is not None
        ctx.save_for_backward(logits_NV, target_N, *softmax)
        losses_N = form.losses(softmax.log_sum, picked_N, weighted_N, width)
        return losses_N.masked_fill_(target_N == form.ignore_index, 0)

    @staticmethod
    def backward(ctx: Any, slope_N: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, target_N, *softmax = ctx.saved_tensors
        slopes = ctx.form.slopes(slope_N.masked_fill(target_N == ctx.form.ignore_index, 0), logits_NV.shape[1])
        return find_gradient(logits_NV, ctx.question, Softmax(*softmax), slopes, triton=True), None, None
