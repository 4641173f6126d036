"""Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019) on flat runs of weights, with a decision on the
device.

    g = gradient factor                                    factor: clipping over the loss scale and the weight
    g = g + wd w  (Adam)     or     w = w - lr wd w  (AdamW)
    m = m + (1 - beta1) (g - m)      v = v + (1 - beta2) (g^2 - v)
    w = w - lr / (1 - beta1^t)  m / (sqrt(v / (1 - beta2^t)) + eps)

All arithmetic is in fp32 (fp64 for fp64), rounded once at the end. A scalar on the device skips or makes the update, so
that the host never waits. If the weights are masters, the same pass writes the narrow weights, a slice of the buffer
for the next gather; values that a user has written there since the last update are copied to the master first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels
from engine.kernels.optim.eight_bit_codes import BlockCodes, adam_8bit_
from engine.kernels.optim.stochastic_rounding import StochasticRounding
from engine.kernels.optim.update_rules import AdamRule


@dataclass(frozen=True, slots=True)
class DeviceDecision:
    """Decision on an update, as two fp64 scalars on the device: gradient factor, and flag (0: skip the update)."""

    factor: Tensor
    """Factor applied to the gradients."""
    go: Tensor
    """0 skips the update; any other number applies it."""


@dataclass(frozen=True, slots=True)
class AdamRun:
    """Flat, contiguous tensors of an Adam update, of one size: weights, gradient and moments."""

    weights: Tensor
    """Weights to update: fp32 (fp64), or bf16 with stochastic rounding."""
    gradient: Tensor
    first: Tensor
    second: Tensor
    """Second moment. Both moments have the dtype of the weights; for bf16 weights they are fp32 or bf16."""
    narrow: Tensor | None = None
    """Weights in the compute dtype, if ``weights`` are their masters; otherwise None."""


def fits_adamw_kernel(weights: Tensor, kernels: Kernels) -> bool:
    """Returns True if an Adam update of ``weights`` runs in Triton."""
    fitting = weights.dtype in (torch.float32, torch.bfloat16) and kernels.replaces(weights.device)
    return fitting and weights.numel() > 0 and kernels.triton("adamw", weights, _width(weights))


def adamw_(
    run: AdamRun,
    rule: AdamRule,
    step: int,
    decision: DeviceDecision,
    kernels: Kernels,
    rounding: StochasticRounding | None = None,
) -> None:
    """Applies update number ``step`` (from 1) of Adam or AdamW to ``run`` in place, unless ``decision.go`` is 0.

    ``rounding``: stochastic rounding of bf16 weights; None: round to nearest.
    """
    if not fits_adamw_kernel(run.weights, kernels):
        adamw_reference_(run, rule, step, decision, rounding)
        return
    from engine.kernels.gpu.adamw import adamw

    updated = run.weights, run.first, run.second, run.narrow
    adamw(updated, run.gradient, (decision.factor, decision.go), rule, rule.age(step), rounding)


def adamw_reference_(
    run: AdamRun, rule: AdamRule, step: int, decision: DeviceDecision, rounding: StochasticRounding | None = None
) -> None:
    """Applies update number ``step`` (from 1) of Adam or AdamW to ``run`` in place, unless ``decision.go`` is 0.

    It uses only PyTorch operators. ``rounding``: stochastic rounding of bf16 weights; None: round to nearest.
    """
    step = rule.age(step)
    wide = torch.promote_types(run.weights.dtype, torch.float32)
    (beta1, beta2), w = rule.betas, run.weights.to(wide)
    if run.narrow is not None:
        w = torch.where(run.narrow != w.to(run.narrow.dtype), run.narrow.to(wide), w)
    g = run.gradient.to(wide) * decision.factor.to(wide)
    if rule.weight_decay and rule.decoupled:
        w = w - rule.lr * rule.weight_decay * w
    elif rule.weight_decay:
        g = g + rule.weight_decay * w
    m, v = run.first.to(wide), run.second.to(wide)
    m, v = m + (1 - beta1) * (g - m), v + (1 - beta2) * (g * g - v)
    w = w - rule.lr / (1 - beta1**step) * m / (v.sqrt() * (1 - beta2**step) ** -0.5 + rule.eps)
    go = decision.go != 0
    for kind, (target, values) in enumerate(((run.weights, w), (run.first, m), (run.second, v))):
        if rounding is not None and target.dtype == torch.bfloat16:
            values = rounding.round(values, kind)
        target.copy_(torch.where(go, values.to(target.dtype), target))
    if run.narrow is not None:
        run.narrow.copy_(torch.where(go, w.to(run.narrow.dtype), run.narrow))


def adamw_8bit_(
    run: AdamRun, scales: tuple[Tensor, Tensor], rule: AdamRule, step: int, block: int, kernels: Kernels
) -> None:
    """Applies update number ``step`` (from 1) of Adam or AdamW to ``run`` in place; the moments are 8-bit codes.

    ``scales``: fp32 scales of the first and of the second moment, one per ``block`` elements.
    """
    moments = BlockCodes(run.first, scales[0]), BlockCodes(run.second, scales[1])
    fits = run.weights.dtype == torch.float32 and rule.decoupled and kernels.replaces(run.weights.device)
    if not (fits and run.weights.numel() and kernels.triton("adamw_8bit", run.weights, _width(run.weights))):
        adam_8bit_(run.weights, run.gradient, moments, step, rule, block)
        return
    from engine.kernels.gpu.adamw import adamw_8bit

    adamw_8bit(run.weights, run.gradient, moments, rule, rule.age(step), block)


def _width(weights: Tensor) -> int:
    """Returns the size rounded down to a power of two, so that runs of nearly equal size share one dispatch choice."""
    return 1 << (weights.numel().bit_length() - 1)
