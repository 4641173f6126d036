"""Schedule-free AdamW beside the three sequences of the paper."""

from typing import Any

import pytest
import torch

from engine.config.optim_sections import ScheduleFreeAdamWParams
from engine.config.reader import stored
from engine.kernels.optim.update_rules import ScheduleFreeRule, averaged, count, schedule_free_


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup_steps": 3, "weight_decay": 0.1, "weight_step_power": 1.0, "weight_lr_power": 1.0, "betas": (0.8, 0.9)},
    ],
)
def test_the_weights_are_the_point_between_iterate_and_average(options: dict[str, Any]) -> None:
    params: dict[str, Any] = dict(stored(ScheduleFreeAdamWParams())) | {"lr": 0.05} | options
    beta, beta2 = params["betas"]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    weights, iterate, squares = start.clone(), start.clone(), torch.zeros_like(start)
    x, z, y, v, total, largest = start, start, start, torch.zeros_like(start), 0.0, 0.0
    group = dict(params)
    for step in range(1, 8):
        grads = torch.randn(40, generator=generator, dtype=torch.float64)
        count(group)
        schedule_free_(weights, grads, iterate, squares, step, ScheduleFreeRule.of(group))
        lr = params["lr"] * min(1.0, step / max(1, params["warmup_steps"]))
        largest = max(largest, lr)
        total += (weight := step ** params["weight_step_power"] * largest ** params["weight_lr_power"])
        v = beta2 * v + (1 - beta2) * grads**2
        z = z - lr * (grads / ((v / (1 - beta2**step)).sqrt() + params["eps"]) + params["weight_decay"] * y)
        x = x + weight / total * (z - x)
        y = (1 - beta) * z + beta * x
        torch.testing.assert_close(weights, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(iterate, z, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(averaged(weights, iterate, params["betas"]), x, rtol=1e-12, atol=1e-11)


def test_a_rate_of_zero_averages_nothing() -> None:
    group: dict[str, Any] = dict(stored(ScheduleFreeAdamWParams())) | {"lr": 0.0}
    count(group)
    assert group["newest"] == 0.0 and group["step"] == 1
