"""Optimizer updates on flat local tensors, in place. They are elementwise: updating a shard equals updating the whole.

Adam, AdamW and SGD run torch's fused kernels (one pass over memory, on CPU and GPU). Step counts are Python ints, and
the moments are the only tensors in the caller's state. Large updates on the host have a kernel of our own, with the
same bits (``host_update``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

_UNBIASED = 10**9  # beta ** this is 0 for every beta that fp32 tells from 1


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Hyperparameters of one Adam update (Kingma and Ba 2015; decoupled: Loshchilov and Hutter 2019)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """True for AdamW: decay the weights directly, instead of adding the decay to the gradient."""
    bias_correction: bool = True
    """False: the averages are taken as they are, though they start at zero."""

    def age(self, step: int) -> int:
        """The update number whose bias correction is made at update number ``step``: without one, a very late one."""
        return step if self.bias_correction else _UNBIASED


def adam_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    step: int,
    rule: AdamRule,
) -> None:
    """Make update number ``step`` (from 1) of Adam or AdamW on lists of tensors of equal shape and dtype."""
    # torch increments the counter that it is given, so each tensor gets a throw-away copy of one per device
    counters = {w.device: torch.full((), float(rule.age(step) - 1), device=w.device) for w in weights}
    adam(
        list(weights),
        list(grads),
        list(first_moments),
        list(second_moments),
        [],
        [counters[w.device].clone() for w in weights],
        fused=True,
        decoupled_weight_decay=rule.decoupled,
        amsgrad=False,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
    )


@dataclass(frozen=True, slots=True)
class SGDRule:
    """Hyperparameters of one SGD update with momentum, as ``torch.optim.SGD`` defines them."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def sgd_(
    weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor | None], rule: SGDRule
) -> list[Tensor | None]:
    """Make one SGD update and return the momentum buffers, which the first update creates."""
    buffers = list(momenta)
    sgd(
        list(weights),
        list(grads),
        buffers,
        foreach=False,
        fused=True,
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
        lr=rule.lr,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        maximize=False,
    )
    return buffers


@dataclass(frozen=True, slots=True)
class LionRule:
    """Hyperparameters of one Lion update (Chen et al. 2023, algorithm 2)."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float


def lion_(weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], rule: LionRule) -> None:
    """Make one Lion update: the sign of an interpolated momentum, and decoupled decay."""
    for weight, grad, momentum in zip(weights, grads, momenta, strict=True):
        direction = momentum.lerp(grad, 1 - rule.betas[0]).sign_()
        weight.mul_(1 - rule.lr * rule.weight_decay).add_(direction, alpha=-rule.lr)
        momentum.lerp_(grad, 1 - rule.betas[1])
