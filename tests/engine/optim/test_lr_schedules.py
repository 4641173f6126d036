"""DeepSpeed's five schedules, update for update, and their shapes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import load_config
from engine.optim.lr_schedules import LearningRate, make_learning_rate
from engine.zero.optim.flat_optimizers import FlatAdam


def rate(kind: str, lr: float = 0.1, **params: Any) -> LearningRate:
    config = load_config({"train_batch_size": 1, "scheduler": {"type": kind, "params": params}})
    optimizer = FlatAdam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return make_learning_rate(optimizer, config.scheduler, None)


def rates(made: LearningRate, updates: int) -> list[float]:
    return [made.at(update) for update in range(updates)]


def test_linear_warmup_then_constant() -> None:
    made = rate("WarmupLR", warmup_num_steps=4, warmup_type="linear")
    assert rates(made, 7) == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1, 0.1])


def test_log_warmup_reaches_the_optimizers_own_lr() -> None:
    made = rate("WarmupLR", warmup_num_steps=10)
    expected = [0.0] + [0.1 * math.log(k) / math.log(10) for k in range(1, 11)] + [0.1]
    assert rates(made, 12) == pytest.approx(expected)


def test_decay_ends_at_the_minimum() -> None:
    made = rate("WarmupDecayLR", warmup_num_steps=2, total_num_steps=6, warmup_max_lr=0.1, warmup_type="linear")
    assert rates(made, 9) == pytest.approx([0, 0, 0.05, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0])


def test_cosine_ends_at_its_ratio_and_stays() -> None:
    made = rate("WarmupCosineLR", warmup_num_steps=2, total_num_steps=10, cos_min_ratio=0.1)
    values = rates(made, 14)
    assert values[2] == pytest.approx(0.1) and values[10:] == pytest.approx([0.01] * 4)
    assert values[2:11] == sorted(values[2:11], reverse=True)


def test_range_test_rises_continuously_or_in_stairs() -> None:
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
    assert rates(rate("LRRangeTest", **params), 5) == pytest.approx([0.01, 0.015, 0.02, 0.025, 0.03])
    stairs = rate("LRRangeTest", lr_range_test_staircase=True, **params)
    assert rates(stairs, 5) == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.03])


def test_one_cycle_rises_falls_and_decays_with_momentum_against_it() -> None:
    made = rate(
        "OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4, decay_step_size=1, decay_lr_rate=1.0
    )
    values = rates(made, 11)
    assert values[:9] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert values[9:] == pytest.approx([0.1 / 2, 0.1 / 3])
    made.prepare(4)
    assert made.optimizer.param_groups[0]["betas"] == (pytest.approx(0.8), 0.99)
    made.prepare(8)
    assert made.optimizer.param_groups[0]["betas"][0] == pytest.approx(0.9)


def test_groups_keep_their_own_base() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
    config = load_config({"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}})
    made = make_learning_rate(FlatAdam(groups), config.scheduler, None)
    made.prepare(5)
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.1, 0.01]


def test_constant_without_a_schedule() -> None:
    made = make_learning_rate(FlatAdam([torch.nn.Parameter(torch.zeros(1))], lr=0.3), None, None)
    made.prepare(7)
    assert made.at(7) == 0.3


@given(warm=st.integers(0, 50), total=st.integers(1, 100), update=st.integers(0, 200))
def test_warmups_stay_between_zero_and_their_maximum(warm: int, total: int, update: int) -> None:
    for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        params: dict[str, Any] = {"warmup_num_steps": warm}
        if kind != "WarmupLR":
            params["total_num_steps"] = total
        if kind != "WarmupCosineLR":
            params["warmup_max_lr"] = 0.1
        assert 0.0 <= rate(kind, **params).at(update) <= 0.1 + 1e-12
