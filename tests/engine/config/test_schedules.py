"""Params of schedules that contradict each other or the optimizer are refused in a sentence, before anything starts."""

from typing import Any

import pytest

from engine.config import load_config
from engine.errors import ConfigError

TOTAL = {"total_num_steps": 100}


def refusal(kind: str, params: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "scheduler": {"type": kind, "params": params}} | sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("WarmupDecayLR", TOTAL | {"warmup_num_steps": 101},
         "scheduler.params.warmup_num_steps: 101 is above total_num_steps, 100; give at most 100, or raise that."),
        ("WarmupCosineLR", TOTAL,
         "scheduler.params.warmup_num_steps: 1000 is above total_num_steps, 100; give at most 100, or raise that."),
        ("WarmupCosineLR", TOTAL | {"warmup_num_steps": 1, "warmup_min_ratio": 1.5},
         "scheduler.params.warmup_min_ratio: 1.5 is above 1; give a number of at least 0 and of at most 1."),
        ("WarmupCosineLR", TOTAL | {"warmup_num_steps": 1, "cos_min_ratio": 2},
         "scheduler.params.cos_min_ratio: 2 is above 1; give a number of at least 0 and of at most 1."),
        ("WarmupLR", {"warmup_min_lr": 0.2, "warmup_max_lr": 0.1},
         "scheduler.params.warmup_min_lr: 0.2 is above warmup_max_lr, 0.1; give at most 0.1, or raise that."),
        ("WarmupLR", {"warmup_min_lr": [0.01, 0.2], "warmup_max_lr": 0.1},
         "scheduler.params.warmup_min_lr: 0.2 is above warmup_max_lr, 0.1; give at most 0.1, or raise that."),
        ("OneCycle", {"cycle_min_lr": 0.2, "cycle_max_lr": 0.1},
         "scheduler.params.cycle_min_lr: 0.2 is above cycle_max_lr, 0.1; give at most 0.1, or raise that."),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": 0.95},
         "scheduler.params.cycle_min_mom: 0.95 is above cycle_max_mom, 0.9; give at most 0.9, or raise that."),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "base_momentum": 0.99},
         "scheduler.params.base_momentum: 0.99 is above max_momentum, 0.95; give at most 0.95, or raise that."),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 0.7, "three_phase": True},
         "scheduler.params.pct_start: 0.7 with three_phase, whose first two phases are as long; give at most 0.5."),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 1},
         "scheduler.params.pct_start: 1 is not below 1; give a number of at least 0 and below 1."),
    ],
)  # fmt: skip
def test_params_that_contradict_each_other_are_refused(kind: str, params: dict[str, Any], said: str) -> None:
    assert refusal(kind, params) == said


def test_rates_of_the_optimizer_are_compared_where_it_is_configured() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    for kind, params, key in (
        ("CosineAnnealingLR", {"T_max": 5, "eta_min": 0.1}, "eta_min"),
        ("WarmupLR", {"warmup_min_lr": 0.1}, "warmup_min_lr"),
    ):
        assert refusal(kind, params, optimizer=optimizer) == (
            f"scheduler.params.{key}: 0.1 is above the optimizer's lr, 0.001; give at most 0.001, or raise that."
        )
        config = {"train_batch_size": 1, "scheduler": {"type": kind, "params": params}}
        assert load_config(config).scheduler is not None, "the optimizer may be one from code"
        assert load_config(load_config(config), 1).scheduler is not None


def test_a_momentum_is_moved_where_there_is_one() -> None:
    cycle = {"max_lr": 0.1, "total_steps": 9}
    assert refusal("OneCycleLR", cycle, optimizer={"type": "Adafactor"}) == (
        "scheduler.params.cycle_momentum: true moves the momentum, and Adafactor has neither betas nor momentum "
        "everywhere; give false."
    )
    for kind in ("SGD", "AdamW", "Lion"):
        load_config({
            "train_batch_size": 1, "optimizer": {"type": kind}, "scheduler": {"type": "OneCycleLR", "params": cycle},
        })  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupDecayLR", TOTAL | {"warmup_num_steps": 100}),
        ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.1}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False, "cycle_min_mom": 0.99}),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 0.5, "three_phase": True}),
    ],
)
def test_bounds_are_allowed(kind: str, params: dict[str, Any]) -> None:
    load_config({"train_batch_size": 1, "scheduler": {"type": kind, "params": params}})
