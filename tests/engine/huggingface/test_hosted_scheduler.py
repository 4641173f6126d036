"""A schedule of accelerate's counts a step for each data rank; from a save on other ranks it goes on with its rate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from engine.huggingface.accelerator import HostedScheduler
from tests.engine.huggingface.loop_runs import LoopCase, run_loop

UPDATES = 12


def falls_over_all_steps(optimizer: Any, ranks: int) -> LRScheduler:
    """As scripts write it: the run's updates times the number of processes."""
    return LambdaLR(optimizer, lambda step: 1 - step / (UPDATES * ranks))


def falls_over_steps_of_rows(optimizer: Any, ranks: int) -> LRScheduler:
    """A length in microbatches of one rank, whatever the number of ranks is."""
    return LambdaLR(optimizer, lambda step: 1 - step / 96)


def one_cycle(optimizer: Any, ranks: int) -> LRScheduler:
    return OneCycleLR(optimizer, 0.5, total_steps=UPDATES * ranks)


def stairs(optimizer: Any, ranks: int) -> LRScheduler:
    return StepLR(optimizer, 6 * ranks, gamma=0.5)


def stairs_of_steps(optimizer: Any, ranks: int) -> LRScheduler:
    return StepLR(optimizer, 7, gamma=0.5)


def hosted(make: Callable[[Any, int], LRScheduler], ranks: int) -> tuple[Any, HostedScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9)
    return optimizer, HostedScheduler(make(optimizer, ranks), [], True, False, ranks)


def update(optimizer: Any, schedule: HostedScheduler) -> float:
    rate = float(optimizer.param_groups[0]["lr"])
    optimizer.step()
    schedule.step()
    return rate


@pytest.mark.parametrize(
    ("make", "per_update"),
    [
        (falls_over_all_steps, True), (one_cycle, True), (stairs, True), (falls_over_steps_of_rows, False),
        (stairs_of_steps, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("then", [1, 4])
def test_the_rate_goes_on_on_another_number_of_data_ranks(
    make: Callable[[Any, int], LRScheduler], per_update: bool, then: int
) -> None:
    optimizer, saved = hosted(make, 2)
    for _ in range(5):
        update(optimizer, saved)
    state, rate = saved.state_dict(), saved.get_last_lr()
    other, schedule = hosted(make, then)
    schedule.load_state_dict(state)
    schedule.move_from(2)
    near = 0.1 if make is one_cycle else 1e-9  # torch ends its phases a step before their length
    assert schedule.get_last_lr() == pytest.approx(rate, rel=near)
    assert schedule.scheduler.last_epoch == (5 * then if per_update else 10)
    assert other.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    if not per_update:
        return
    expected = [update(optimizer, saved) for _ in range(5)]
    assert [update(other, schedule) for _ in range(5)] == pytest.approx(expected, abs=near)


@pytest.mark.long
@pytest.mark.parametrize("grid", ["alone", "tp2", "dp4"])
def test_a_loop_goes_on_from_two_data_ranks_with_its_rates(grid: str, tmp_path: Path) -> None:
    def case(name: str, config: Any, ranks: int, resume: str | None = None) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        return run_loop(
            LoopCase(folder=str(folder), config=config, resume=resume, rows=8 // config["parallel"]["data"],
                     falls_over=16), ranks,
        )  # fmt: skip

    sizes = {"alone": (1, 1), "tp2": (1, 2), "dp4": (4, 4)}
    data, ranks = sizes[grid]
    whole = case("two", {"parallel": {"data": 2}}, 2)
    config = {"parallel": {"data": data, "tensor": ranks // data}}
    resumed = case("other", config, ranks, str(tmp_path / "two" / "epoch-0"))
    assert resumed.rates == pytest.approx(whole.rates[len(whole.rates) // 2 :])
