"""Adam's updates of a rank's shards as kernels that read the decision on the device (``kernels/adamw.py``).

    control sums agreed -> factor, go: scalars on the device -> updates and gathers are launched -> the host reads

Where the host then finds that no update was made, it puts back what it has counted itself (``Bookkeeping``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.adamw import AdamRun, Decision, adamw_
from engine.kernels.choice import Kernels
from engine.kernels.optimizer_update import AdamRule
from engine.zero.rounding import RoundedUpdates

_COUNTED = ("step", "lr", "betas")
"""What an update, and the learning rate of an update, change in a group."""


@dataclass(frozen=True, slots=True)
class FusedAdam:
    """Launches the updates of one step."""

    kernels: Kernels
    decision: Decision
    narrow: Mapping[Tensor, Tensor | None]
    """Tensor of the optimizer -> where its values go in the dtype of the computation; None: it is that itself."""
    rounding: RoundedUpdates | None
    """Of bf16 weights that are their own master."""

    def moments(self, weights: Tensor) -> torch.dtype:
        """What the moments of these weights are kept in."""
        rounded = self.rounding is not None and weights.dtype == torch.bfloat16
        return self.rounding.moments if rounded and self.rounding is not None else weights.dtype

    def update(self, weights: Tensor, moments: tuple[Tensor, Tensor], step: int, rule: AdamRule) -> None:
        """Update number ``step`` of the gradients in ``weights.grad``: one launch, or one a parameter with rounding."""
        assert weights.grad is not None
        run = AdamRun(weights.detach(), weights.grad, *moments, self.narrow[weights])
        if self.rounding is None or weights.dtype != torch.bfloat16:
            adamw_(run, rule, step, self.decision, self.kernels)
            return
        for part, how in self.rounding.runs(weights, step):
            own = AdamRun(run.weights[part], run.gradient[part], run.first[part], run.second[part])
            adamw_(own, rule, step, self.decision, self.kernels, how)


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """What the host has counted before an update of which it does not know yet whether it is made."""

    groups: tuple[Mapping[str, Any], ...]
    states: frozenset[Tensor]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Bookkeeping":
        """As it is now."""
        groups = optimizer.param_groups
        return cls(
            tuple({key: group[key] for key in _COUNTED if key in group} for group in groups),
            frozenset(optimizer.state),
        )

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """The update was not made: the counts are as before, and moments that were made for it are gone."""
        for group, before in zip(optimizer.param_groups, self.groups, strict=True):
            for key in [key for key in _COUNTED if key in group and key not in before]:
                del group[key]
            group.update(before)
        for weights in [weights for weights in optimizer.state if weights not in self.states]:
            del optimizer.state[weights]
