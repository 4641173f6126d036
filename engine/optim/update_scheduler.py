"""A torch scheduler whose rates follow from the number of updates alone, so it can be placed at any of them.

torch's own schedulers compute a rate from the one before; their state has to be loaded, and fits the same groups only.
This one takes its place from a count: of its state, or of the updates that a checkpoint has made.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class UpdateScheduler(LRScheduler):
    """Rates of the next update, shown in the optimizer's groups from the construction on.

    Args:
        optimizer: its groups get the rates.
        last_batch_iteration: number of the last update that was made, from 0. Above -1, the groups keep their rates
            until the next ``step``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        # LRScheduler's constructor is left out: it refuses a position above -1 for an optimizer that it has not seen
        self.optimizer = optimizer
        self.base_lrs = [float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.last_epoch = last_batch_iteration + 1
        if last_batch_iteration == -1:
            self._show()

    @abstractmethod
    def rates(self, update: int) -> list[float]:
        """Rate of each group in update number ``update``, from 0."""

    @property
    def last_batch_iteration(self) -> int:
        """Number of the last update, from 0; -1 before the first."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rate of each group in the next update."""
        return list(self.rates(self.last_epoch))

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Rates that were set last; the next update uses them."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates that follow the next update, or update number ``last_batch_iteration``."""
        self._place(1 + (self.last_epoch if last_batch_iteration is None else last_batch_iteration))

    def state_dict(self) -> dict[str, Any]:
        """The position alone; rates are those of this object's options."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position, which torch's schedulers call ``last_epoch``."""
        # an engine that makes the steps itself has put another step in place
        self._place(state_dict.get("last_epoch", state_dict.get("last_batch_iteration", -1) + 1))

    def _place(self, update: int) -> None:
        self.last_epoch = update
        self._show()

    def _show(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates(self.last_epoch), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
