"""Cross-entropy of full logits, as ``torch.nn.functional.cross_entropy`` defines it for class indices.

    loss = log_sum - (1 - s) picked - s / V weighted        s: label smoothing (Szegedy et al. 2016, section 7)

The kernels read the logits once in the forward and once in the backward, and keep three numbers a row. They compute in
fp32 (fp64 for fp64) and round once. The terms are defined in ``parallel_softmax``.

Shape suffixes: N rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.kernels.dispatch import Kernels
from engine.kernels.fused_operator import fused_operator
from engine.kernels.ops.parallel_softmax import (
    Question,
    Slopes,
    Softmax,
    find_gradient,
    find_statistics,
    fits_softmax_kernels,
    join_softmax_terms,
    uses_triton,
)

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Parameters of a cross-entropy, named as in PyTorch."""

    ignore_index: int = -100
    """Target of rows that are left out of the loss; their gradient is exactly 0."""
    label_smoothing: float = 0.0
    reduction: Reduction = "mean"

    def slopes(self, slope_N: Tensor, vocabulary: int) -> Slopes:
        """Gradients of the terms of each row, given ``slope_N``, the gradient of the row's loss."""
        smoothing = self.label_smoothing
        weighted_N = slope_N * (-smoothing / vocabulary) if smoothing else None
        return Slopes(slope_N, slope_N * (smoothing - 1), weighted_N)

    def losses(self, log_sum: Tensor, picked: Tensor, weighted: Tensor | None, vocabulary: int) -> Tensor:
        """Loss of each row, [N], from the terms of its softmax."""
        losses_N = log_sum - picked * (1 - self.label_smoothing)
        return losses_N if weighted is None else losses_N - weighted * (self.label_smoothing / vocabulary)

    def reduced(self, losses_N: Tensor, counted_N: Tensor) -> Tensor:
        """Reduce the losses of the rows; ``counted_N`` marks the rows that count, the others have loss 0."""
        if self.reduction == "none":
            return losses_N
        total = losses_N.sum()
        return total if self.reduction == "sum" else total / counted_N.sum()


def cross_entropy(logits_NV: Tensor, target_N: Tensor, form: CrossEntropy, kernels: Kernels) -> Tensor:
    """Cross-entropy in the dtype of the logits: [], or [N] without a reduction. Target int64. Differentiable.

    Raises:
        EngineError: a target is outside the vocabulary. Checked on CPU only: on a GPU the check would synchronize.
    """
    if has_torch_function((logits_NV, target_N)):
        return handle_torch_function(cross_entropy, (logits_NV, target_N), logits_NV, target_N, form, kernels)
    check_target(target_N, logits_NV.shape[-1], form.ignore_index)
    if not fits_softmax_kernels(logits_NV) or not uses_triton("cross_entropy", logits_NV, logits_NV.shape[-1], kernels):
        return cross_entropy_reference(logits_NV, target_N, form)
    losses_N, _, _ = _cross_entropy(logits_NV, target_N, form.ignore_index, form.label_smoothing)
    return form.reduced(losses_N, target_N != form.ignore_index).to(logits_NV.dtype)


def cross_entropy_reference(logits_NV: Tensor, target_N: Tensor, form: CrossEntropy) -> Tensor:
    """PyTorch reference of :func:`cross_entropy`."""
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    found = functional.cross_entropy(
        wide,
        target_N,
        ignore_index=form.ignore_index,
        reduction=form.reduction,
        label_smoothing=form.label_smoothing,
    )
    return found.to(logits_NV.dtype)


def check_target(target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse class indices outside the vocabulary.

    Raises:
        EngineError: a target is outside the vocabulary; on CPU only.
    """
    if not is_host(target.device):
        return
    if bool((((target < 0) | (target >= vocabulary)) & (target != ignore_index)).any()):
        raise EngineError(
            f"a label is outside the vocabulary of {vocabulary} rows; labels count from 0, and {ignore_index} marks "
            "those to ignore."
        )


@fused_operator("trine::cross_entropy")
def _cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    form, question = CrossEntropy(ignore_index, label_smoothing), Question(target, even=label_smoothing > 0)
    width = logits.shape[-1]
    (largest, log_sum), picked, weighted = join_softmax_terms(
        find_statistics(logits, question, True), question, width, None
    )
    assert picked is not None
    losses = form.losses(log_sum, picked, weighted, width)
    return losses.masked_fill_(target == ignore_index, 0), largest, log_sum


@fused_operator("trine::cross_entropy_backward")
def _cross_entropy_backward(
    slope: Tensor, logits: Tensor, target: Tensor, largest: Tensor, log_sum: Tensor, ignore_index: int,
    label_smoothing: float,
) -> Tensor:  # fmt: skip
    form, question = CrossEntropy(ignore_index, label_smoothing), Question(target, even=label_smoothing > 0)
    slopes = form.slopes(slope.masked_fill(target == ignore_index, 0), logits.shape[-1])
    return find_gradient(logits, question, Softmax(largest, log_sum), slopes, triton=True)


@_cross_entropy.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(3))
    return first, second, third


@_cross_entropy_backward.register_fake
def _(
    slope: Tensor, logits: Tensor, target: Tensor, largest: Tensor, log_sum: Tensor, ignore_index: int,
    label_smoothing: float,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.save_for_backward(logits, target, *output[1:])


def _gradients(ctx: Any, slope: Tensor, *_: Any) -> tuple[Any, ...]:
    grad = _cross_entropy_backward(slope, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing)
    return grad, None, None, None


_cross_entropy.register_autograd(_gradients, setup_context=_keep)
