"""Rules between the settings of a learning rate schedule, and between them and the optimizer's."""

from collections.abc import Mapping
from typing import Any

from engine.config.optim_sections import OptimizerConfig, SchedulerConfig
from engine.config.rules import Problems

_ORDERED = (
    ("warmup_num_steps", "total_num_steps"), ("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"), ("base_momentum", "max_momentum"), ("eta_min", "lr"),
)  # fmt: skip
"""Pairs of params of which the first may not be above the second; a second that is absent or null is the optimizer's
rate."""


def check_schedule(scheduler: SchedulerConfig | None, optimizer: OptimizerConfig | None, problems: Problems) -> None:
    """Note params that contradict each other."""
    if scheduler is None:
        return
    params, at = scheduler.params, "scheduler.params"
    for low, high in _ORDERED:
        if low in params:
            _check_order(low, high, params, optimizer, problems)
    if params.get("three_phase") and params["pct_start"] > 0.5:
        problems.add(
            f"{at}.pct_start",
            f"{params['pct_start']} with three_phase, whose first two phases are as long; give at most 0.5.",
        )
    if scheduler.type == "OneCycleLR" and params["cycle_momentum"] and optimizer is not None:
        for key in ("betas", "momentum"):
            if all(key in entry.params for entry in optimizer.entries):
                return
        problems.add(
            f"{at}.cycle_momentum",
            f"true moves the momentum, and {optimizer.kind} has neither betas nor momentum everywhere; give false.",
        )


def _check_order(
    low: str, high: str, params: Mapping[str, Any], optimizer: OptimizerConfig | None, problems: Problems
) -> None:
    """Note the first group for which ``low`` is above ``high``."""
    if low.endswith("_mom") and not params["cycle_momentum"]:
        return
    top, name = params.get(high), high
    if top is None:
        if high == "total_num_steps" or optimizer is None:
            return
        top, name = optimizer.params["lr"], "the optimizer's lr"
    lows, tops = (value if isinstance(value, tuple) else (value,) for value in (params[low], top))
    for index in range(max(len(lows), len(tops))):
        one, other = (values[min(index, len(values) - 1)] for values in (lows, tops))
        if one > other:
            problems.add(
                f"scheduler.params.{low}", f"{one:g} is above {name}, {other:g}; give at most {other:g}, or raise that."
            )
            return
