"""LARS (You et al. 2017, https://arxiv.org/abs/1708.03888, algorithm 1) and LAMB (You et al. 2019,
https://arxiv.org/abs/1904.00962, algorithm 2): the step of a parameter is as long as its norm asks.

    LARS   ratio = trust |w| / (|g| + decay |w| + eps)      v = momentum v + lr ratio (g + decay w)     w = w - v
    LAMB   u = m / (sqrt(v) + eps) + decay w, of averages with bias correction      w = w - lr clamp(|w| / |u|) u

The norms are those of whole parameters, which the caller finds: a rule sees parts. With a norm of zero the ratio is 1.
The bounds of LAMB's ratio, ``eps_inside_sqrt`` and ``bias_correction`` false are those of DeepSpeed's FusedLamb.

Shape suffix: n elements of a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Moments = Sequence[Tensor]
"""What is kept of the elements of a part, in the order of ``moment_names``; a rule writes it in place."""


class LayerRule(Protocol):
    """The rule of a group of parameters, whose steps depend on norms of a whole parameter."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of what is kept of every element."""

    def take_in(self, grads_n: Tensor, moments: Moments) -> None:
        """Take the gradients of an update into the moments."""

    def measured(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int) -> Tensor:
        """The elements [n] whose norm is set against that of the weights. ``step``: the update's number, from 1."""

    def apply_(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int, norms: Tensor) -> None:
        """Make the step of these elements; ``norms`` [2], fp64: of the whole weights, and of what is measured."""


@dataclass(frozen=True, slots=True)
class LambRule:
    """Hyperparameters of one update of LAMB."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    eps_inside_sqrt: bool
    bounds: tuple[float, float]
    """Least and largest ratio of the norms."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "LambRule":
        """The rule of a group of the optimizer."""
        return cls(
            float(group["lr"]),
            tuple(group["betas"]),
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            group["eps_inside_sqrt"],
            (group["min_coeff"], group["max_coeff"]),
        )

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Both averages."""
        return ("exp_avg", "exp_avg_sq")

    def take_in(self, grads_n: Tensor, moments: Moments) -> None:
        """Take the gradients of an update into both averages."""
        first, second = moments
        first.lerp_(grads_n, 1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(grads_n, grads_n, value=1 - self.betas[1])

    def measured(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int) -> Tensor:
        """The update before its length is set."""
        (first, second), (beta1, beta2) = moments, self.betas
        lacks = (1 - beta1**step, 1 - beta2**step) if self.bias_correction else (1.0, 1.0)
        mean_square = second / lacks[1]
        root = mean_square.add_(self.eps).sqrt_() if self.eps_inside_sqrt else mean_square.sqrt_().add_(self.eps)
        update = first / root.mul_(lacks[0])
        return update.add_(weights_n, alpha=self.weight_decay) if self.weight_decay else update

    def apply_(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int, norms: Tensor) -> None:
        """Step along the update, as long as the weights times the rate, within the bounds."""
        ratio = _ratio(norms, norms[0] / norms[1], self.bounds)
        update = self.measured(weights_n, grads_n, moments, step)
        weights_n.sub_(update.mul_((ratio * self.lr).to(update.dtype)))


@dataclass(frozen=True, slots=True)
class LarsRule:
    """Hyperparameters of one update of LARS."""

    lr: float
    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "LarsRule":
        """The rule of a group of the optimizer."""
        own = (group["momentum"], group["weight_decay"], group["trust_coefficient"], group["eps"])
        return cls(float(group["lr"]), *own)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The momentum, if there is one."""
        return ("momentum_buffer",) if self.momentum else ()

    def take_in(self, grads_n: Tensor, moments: Moments) -> None:
        """Nothing: the momentum is one of steps."""

    def measured(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int) -> Tensor:
        """The gradient."""
        return grads_n

    def apply_(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int, norms: Tensor) -> None:
        """Step along gradient and decay, or along the momentum of such steps."""
        denominator = norms[1] + self.weight_decay * norms[0] + self.eps
        ratio = _ratio(norms, self.trust_coefficient * norms[0] / denominator, None)
        made = grads_n.add(weights_n, alpha=self.weight_decay).mul_((ratio * self.lr).to(grads_n.dtype))
        for momentum in moments:
            made = momentum.mul_(self.momentum).add_(made)
        weights_n.sub_(made)


def _ratio(norms: Tensor, ratio: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """The ratio, 0-dim on the device; 1 where a norm is zero."""
    bounded = ratio if bounds is None else ratio.clamp(*bounds)
    return torch.where((norms > 0).all(), bounded, torch.ones_like(ratio))
