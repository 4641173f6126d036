"""``deepspeed.runtime.lr_schedules``: its five schedules as torch schedulers, which also run without an engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from engine.optim.lr_schedules import lr_range_test, one_cycle, params_by_group, warmup, warmup_cosine, warmup_decay

Rates = float | Sequence[float]
"""Rate of all groups, or of each."""
_Rule = Callable[[int, float, Mapping[str, Any]], float]


class _Scheduled(LRScheduler):
    """Sets the rate that DeepSpeed's optimizer sees in each update."""

    def __init__(self, optimizer: torch.optim.Optimizer, rule: _Rule, params: dict[str, Any], last: int) -> None:
        self._rule, self._params = rule, params_by_group(params, len(optimizer.param_groups))
        super().__init__(optimizer, last)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups in the next update."""
        rule, update = self._rule, self.last_epoch
        return [rule(update, float(base), own) for base, own in zip(self.base_lrs, self._params, strict=True)]


class LRRangeTest(_Scheduled):
    """A rising rate, for finding the largest stable one."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr_range_test_min_lr: Rates = 1e-3, lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, lr_range_test, {
            "lr_range_test_min_lr": lr_range_test_min_lr, "lr_range_test_step_size": lr_range_test_step_size,
            "lr_range_test_step_rate": lr_range_test_step_rate, "lr_range_test_staircase": lr_range_test_staircase,
        }, last_batch_iteration)  # fmt: skip


class OneCycle(_Scheduled):
    """Up and down once, then a decay; of the rate alone."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: Rates, cycle_max_lr: Rates, decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None, decay_step_size: int = 0, cycle_momentum: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        if cycle_momentum:
            raise ValueError("OneCycle in code changes rates alone; name it in the config for cycle_momentum.")
        super().__init__(optimizer, one_cycle, {
            "cycle_min_lr": cycle_min_lr, "cycle_max_lr": cycle_max_lr, "decay_lr_rate": decay_lr_rate,
            "cycle_first_step_size": cycle_first_step_size, "cycle_second_step_size": cycle_second_step_size,
            "cycle_first_stair_count": cycle_first_stair_count, "cycle_second_stair_count": cycle_second_stair_count,
            "decay_step_size": decay_step_size,
        }, last_batch_iteration)  # fmt: skip


class WarmupLR(_Scheduled):
    """Up to ``warmup_max_lr``, then constant."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: Rates = 0.0, warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, warmup, {
            "warmup_min_lr": warmup_min_lr, "warmup_max_lr": warmup_max_lr, "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }, last_batch_iteration)  # fmt: skip


class WarmupDecayLR(_Scheduled):
    """Up to ``warmup_max_lr``, then linearly down at ``total_num_steps``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001, warmup_num_steps: int = 1000, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, warmup_decay, {
            "total_num_steps": total_num_steps, "warmup_min_lr": warmup_min_lr, "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps, "warmup_type": warmup_type,
        }, last_batch_iteration)  # fmt: skip


class WarmupCosineLR(_Scheduled):
    """Up to the optimizer's rate, then half a cosine down."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, warmup_cosine, {
            "total_num_steps": total_num_steps, "warmup_min_ratio": warmup_min_ratio, "cos_min_ratio": cos_min_ratio,
            "warmup_num_steps": warmup_num_steps, "warmup_type": warmup_type,
        }, last_batch_iteration)  # fmt: skip
