"""DeepSpeed's five schedules, update for update, and their shapes; schedules of torch by name."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import load_config
from engine.config.torch_schedules import TORCH_SCHEDULERS
from engine.errors import ConfigError
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


def test_lists_give_each_group_its_rates() -> None:
    params = {
        "warmup_num_steps": 2,
        "warmup_type": "linear",
        "warmup_min_lr": [0.01, 0.02],
        "warmup_max_lr": [0.1, 0.2],
    }
    section = {"scheduler": {"type": "WarmupLR", "params": params}}
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0} for _ in range(2)]
    made = make_learning_rate(FlatAdam(groups), load_config(section).scheduler, None)
    for update, expected in ((0, [0.01, 0.02]), (2, [0.055, 0.11]), (9, [0.1, 0.2])):
        made.prepare(update)
        assert [group["lr"] for group in made.optimizer.param_groups] == pytest.approx(expected)


def test_lists_give_each_group_its_momentum() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2, "cycle_min_mom": [0.5, 0.6]}
    section = {"scheduler": {"type": "OneCycle", "params": params | {"cycle_max_mom": [0.7, 0.9]}}}
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0} for _ in range(2)]
    made = make_learning_rate(FlatAdam(groups), load_config(section).scheduler, None)
    for update, expected in ((0, [0.5, 0.6]), (1, [0.6, 0.75]), (2, [0.5, 0.6]), (4, [0.7, 0.9])):
        made.prepare(update)
        assert [group["betas"][0] for group in made.optimizer.param_groups] == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"is above cycle_max_mom, .*, in parameter group 1; give at most 0.55"):
        load_config({"scheduler": {"type": "OneCycle", "params": params | {"cycle_max_mom": [0.5, 0.55]}}})


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="warmup_max_lr is a list of 2 numbers, but the optimizer has 1 parameter group;"
    ):
        rate("WarmupLR", warmup_max_lr=[0.1, 0.2])


TORCH: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 3}, "LinearLR": {"total_iters": 4}, "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 6, "power": 2}, "StepLR": {"step_size": 2}, "MultiStepLR": {"milestones": [2, 5]},
    "CosineAnnealingLR": {"T_max": 5, "eta_min": 0.01}, "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 8},
}  # fmt: skip


@pytest.mark.parametrize("kind", TORCH_SCHEDULERS)
def test_schedules_of_torch_are_torchs(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    theirs, ours = getattr(torch.optim.lr_scheduler, kind)(optimizer, **TORCH[kind]), rate(kind, **TORCH[kind])
    for update in range(8):
        ours.prepare(update)
        given, expected = ours.optimizer.param_groups[0], optimizer.param_groups[0]
        assert (given["lr"], given["betas"]) == (expected["lr"], expected["betas"])
        for optimizer_, done in ((optimizer, theirs.step), (ours.optimizer, ours.done)):
            optimizer_.step()
            if update < 7:
                done()


def test_constant_without_a_schedule() -> None:
    made = make_learning_rate(FlatAdam([torch.nn.Parameter(torch.zeros(1))], lr=0.3), None, None)
    made.prepare(7)
    assert made.at(7) == 0.3


@given(warm=st.integers(0, 50), total=st.integers(1, 100), update=st.integers(0, 200))
def test_warmups_stay_between_zero_and_their_maximum(warm: int, total: int, update: int) -> None:
    for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        params: dict[str, Any] = {"warmup_num_steps": warm}
        if kind != "WarmupLR":
            params["total_num_steps"] = max(total, warm, 1)
        if kind != "WarmupCosineLR":
            params["warmup_max_lr"] = 0.1
        assert 0.0 <= rate(kind, **params).at(update) <= 0.1 + 1e-12


@pytest.mark.parametrize("given_in_code", [False, True])
def test_a_schedule_that_is_shorter_than_the_run_keeps_its_last_rate_and_says_so(
    given_in_code: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cycle: dict[str, Any] = {"max_lr": 0.1, "total_steps": 4}
    made = rate("OneCycleLR", **cycle)
    if given_in_code:
        made = make_learning_rate(
            made.optimizer, None, lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, **cycle)
        )
    plain = torch.optim.lr_scheduler.OneCycleLR(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), **cycle)
    found, expected = [], []
    with caplog.at_level("WARNING", "trine"):
        for update in range(7):
            assert bool(caplog.records) == (update > 4)
            made.prepare(update)
            found.append(made.at(update))
            made.optimizer.step()
            made.done()
            expected.append(plain.get_last_lr()[0])
            if update < 4:
                plain.optimizer.step()
                plain.step()
    assert found == pytest.approx(expected) and found[4:] == [found[4]] * 3
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("the OneCycleLR has ended: update 4 and all later ones use its last rate, ")


def test_chained_schedules_of_torch_are_stepped_too() -> None:
    schedulers = torch.optim.lr_scheduler
    adam = FlatAdam([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    chained = schedulers.ChainedScheduler([schedulers.ExponentialLR(adam, 0.5), schedulers.StepLR(adam, 1, 0.5)])
    made = make_learning_rate(adam, None, chained)
    found = []
    for update in range(3):
        made.prepare(update)
        found.append(made.at(update))
        adam.step()
        made.done()
    assert found == pytest.approx([0.4, 0.1, 0.025])
