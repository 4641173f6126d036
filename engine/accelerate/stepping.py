"""The optimizer and the scheduler that ``Accelerator.prepare`` returns, whose steps are the engine's."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from engine.reporting.step_report import StepReport


class HostedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The user's optimizer: its groups are those of the engine's, and ``step`` is the engine's update."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, update: Callable[[], StepReport | None], drop: Callable[[], None]
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._update, self._drop = update, drop

    def step(self, closure: Any = None) -> None:
        """Update at the end of an accumulation, else nothing."""
        if self.gradient_state.sync_gradients and (report := self._update()) is not None:
            self._is_overflow = report.skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients since the last update, at the end of an accumulation."""
        if self.gradient_state.sync_gradients:
            self._drop()


class HostedScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """The user's scheduler: as many steps an update as there are data ranks, as Accelerate counts them."""

    def __init__(self, scheduler: Any, optimizers: Any, times: int) -> None:
        super().__init__(scheduler, optimizers, split_batches=True)
        self._times = times

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the rate after an update, else nothing."""
        for _ in range(self._times):
            super().step(*args, **kwargs)
