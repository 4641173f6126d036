"""Losses of torch as ``loss_fn``: they get the targets where the batch tells them, else one sentence tells how."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engine
from tests.engine.every_grid import every_grid

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "adamw", "params": {"lr": 1e-2, "eps": 1e-5}}}
X, Y = torch.arange(24.0).reshape(4, 6) / 24, torch.tensor([0, 2, 1, 2])


def losses(loss_fn: Any, batch: Any, **options: Any) -> list[float]:
    """Three steps."""
    torch.manual_seed(0)
    with engine.initialize(nn.Linear(6, 3), CONFIG, loss_fn, **options) as eng:
        return [eng.train_batch(batch).loss for _ in range(3)]


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), functional.cross_entropy, partial(functional.cross_entropy, reduction="mean")]
)
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ((X, Y), {}),
        ({"input": X, "labels": Y}, {}),
        ([{"input": X}, Y], {}),
        ((Y, X), {"inputs": 1}),
        ({"labels": Y, "input": X}, {"inputs": ["input"]}),
    ],
)
def test_it_gets_the_part_that_forward_is_not_given(loss_fn: Any, batch: Any, options: dict[str, Any]) -> None:
    own = losses(lambda output, batch: functional.cross_entropy(output, Y), (X, Y))
    assert losses(loss_fn, batch, **options) == pytest.approx(own, rel=1e-6)


def output_of(parts: Any) -> Tensor:
    """The part that a function of ``inputs`` takes."""
    return parts[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("batch", "options", "found"),
    [
        (X, {}, "no part"),
        ((X, Y, Y), {}, "2 parts"),
        ((X, {"y": Y}), {}, "1 part, which is no tensor"),
        ((X, Y), {"inputs": output_of}, "no part"),
    ],
)
def test_what_the_batch_does_not_tell_is_refused(batch: Any, options: dict[str, Any], found: str) -> None:
    with pytest.raises(engine.EngineError) as caught:
        losses(nn.CrossEntropyLoss(), batch, **options)
    began = "loss_fn=CrossEntropyLoss of torch compares an output with targets, and the batch has "
    assert str(caught.value).startswith(f"{began}{found} that forward is not given; pass a function of (output, batch)")
    assert "loss_fn=lambda output, batch: CrossEntropyLoss(output, batch[1])" in str(caught.value)


def on_grid(parallel: dict[str, int], stage: int, loss_fn: Any) -> list[tuple[float, float]]:
    """Losses and norms of three steps of a classifier, two microbatches each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    config = {
        "parallel": parallel,
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // parallel["data"],
        "gradient_clipping": 0.1,
        "optimizer": CONFIG["optimizer"],
    }
    rows, targets = torch.arange(48.0).reshape(8, 6).sin(), torch.arange(8) % 4
    with engine.initialize(model, config, loss_fn, example_batch=(rows[:2], targets[:2])) as eng:
        share = slice(None) if parallel["data"] == 1 else slice(eng.grid.coord().dp * 4, eng.grid.coord().dp * 4 + 4)
        reports = [eng.train_batch((rows[share], targets[share])) for _ in range(3)]
    return [(report.loss, report.grad_norm or 0.0) for report in reports]


@pytest.mark.parametrize(("parallel", "stage"), every_grid("tp2"))
def test_it_equals_one_process_on_every_grid(
    run_ranks: Callable[..., Any], parallel: dict[str, int], stage: int
) -> None:
    one = on_grid({"data": 1}, 0, lambda output, batch: functional.cross_entropy(output, batch[1]))
    for found in run_ranks(on_grid, prod(parallel.values()), parallel, stage, nn.CrossEntropyLoss()):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in one], rel=1e-6)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in one], rel=1e-5)
