"""Losses of torch as ``loss_fn``: they get the targets where the batch tells them, else one sentence tells how."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engine

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
