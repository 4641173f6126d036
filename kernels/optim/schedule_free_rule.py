"""Schedule-free AdamW (Defazio et al. 2024, https://arxiv.org/abs/2405.15682): an average replaces a schedule.

    z   the iterate that makes AdamW's steps
    x   the average of all z, newer ones with more weight: the model to evaluate
    y   = (1 - beta) z + beta x, where gradients are taken: the weights while training

Only y and z are kept, since x = (y - (1 - beta) z) / beta. Everything is elementwise. The rates, weights and order of
operations are those of the authors' code for y and z.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScheduleFreeRule:
    """Hyperparameters of one update."""

    lr: float
    """Rate, warmup included."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    newest: float
    """Weight of the newest z in x."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "ScheduleFreeRule":
        """The rule of a group that :func:`count` has counted."""
        lr, newest = group["scheduled_lr"], group["newest"]
        return cls(lr, tuple(group["betas"]), group["eps"], group["weight_decay"], newest)


def count(group: dict[str, Any]) -> None:
    """Count an update of a group: its rate, and the weight of its z among those of all updates."""
    step = group["step"] = group.get("step", 0) + 1
    warmup = group["warmup_steps"]
    lr = float(group["lr"]) * min(1.0, step / warmup if warmup else 1.0)
    largest = max(lr, group.get("lr_max", -1.0))
    weight = step ** group["weight_step_power"] * largest ** group["weight_lr_power"]
    total = group.get("weight_sum", 0.0) + weight
    group.update(scheduled_lr=lr, lr_max=largest, weight_sum=total, newest=weight / total if total else 0.0)


def schedule_free_(
    weights: Tensor, grads: Tensor, iterate: Tensor, squares: Tensor, step: int, rule: ScheduleFreeRule
) -> None:
    """Make update number ``step`` (from 1) in place; ``weights`` is y, ``iterate`` is z, all of one shape."""
    beta1, beta2 = rule.betas
    squares.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    step_by = grads / (squares / (1 - beta2**step)).sqrt_().add_(rule.eps)
    if rule.weight_decay:
        step_by.add_(weights, alpha=rule.weight_decay)
    weights.lerp_(iterate, rule.newest).add_(step_by, alpha=rule.lr * (beta1 * (1 - rule.newest) - 1))
    iterate.sub_(step_by, alpha=rule.lr)


def averaged(weights: Tensor, iterate: Tensor, betas: tuple[float, float]) -> Tensor:
    """x, from y and z."""
    return weights.lerp(iterate, 1 - 1 / betas[0])
