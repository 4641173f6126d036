"""Sharded models against whole ones on real ranks: losses, logits, input gradients, every parameter gradient."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder, loss_sum
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits, gather_logits
from tests.parallel.tensor.models import MODELS, build, tokens
from tests.parallel.tensor.sharded import assert_close, full_gradients, shard
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def run(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, logits) with the model's own loss where it has one."""
    if isinstance(model, Decoder):
        logits = model(ids)
        total, weight = loss_sum(logits, {"labels": ids.roll(-1, 1).masked_fill(ids % 7 == 0, -100)})
        return total / weight, logits
    output = model(input_ids=ids, labels=ids.masked_fill(ids % 7 == 0, -100))
    return output.loss, output.logits


def floor_of(key: str, largest: float, dtype: torch.dtype) -> float:
    """The least size that a gradient's deviation is measured by: rounding is that of the large terms that cancel."""
    return largest if key.endswith(("key.bias", "k_proj.bias")) else largest * FLOORS[dtype]  # such a bias has none


def rounding(model: nn.Module, ids: Tensor) -> float:
    """The largest deviation of the whole model's gradients from those of fp64, which differs between processors."""
    found = [deepcopy(model), deepcopy(model).double()]
    for each in found:
        torch.autograd.backward(run(each, ids)[0])
    own, exact = ({key: p.grad.double() for key, p in each.named_parameters() if p.grad is not None} for each in found)
    largest = max(float(grad.abs().max()) for grad in exact.values())
    scales = {key: max(float(exact[key].abs().max()), floor_of(key, largest, torch.float32)) for key in exact}
    return max(float((own[key] - exact[key]).abs().max()) / scales[key] for key in exact)


def compare(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """The largest deviation of one model, relative to the largest entry of what deviates, and its bound.

    The bound is 1e-6, in fp32 three times the whole model's rounding where that is more.
    """
    model, ids = build(name).to(dtype), tokens()
    bound = max(1e-6, 3 * rounding(model, ids)) if dtype is torch.float32 else 1e-6
    sharded = shard(deepcopy(model))
    assert set(sharded.model.state_dict()) == set(model.state_dict())
    loss, logits = run(model, ids)
    ours, cut = run(sharded.model, ids)
    assert isinstance(cut, ShardedLogits) and cut.shape == logits.shape and not cut.vocabulary.gathers
    torch.autograd.backward(loss)
    torch.autograd.backward(ours)
    worst = [assert_close(ours.detach(), loss.detach(), "loss"), assert_close(gather_logits(cut), logits, "logits")]
    gradients = full_gradients(sharded)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        floor = floor_of(key, largest, dtype)
        worst.append(assert_close(gradients[key], parameter.grad, f"{name} {key}", bound, floor))
    sharded.comm.close()
    return max(worst), bound


FLOORS = {torch.float32: 0.2, torch.float64: 0.0}  # of the model's largest entry


def compare_all(names: list[str]) -> dict[str, tuple[float, float]]:
    """Body of a rank."""
    return {f"{name} {dtype}": compare(name, dtype) for name in names for dtype in FLOORS}


@pytest.mark.parametrize("tp", [2, wide(4)])
def test_sharded_models_have_the_gradients_of_whole_ones(run_ranks: RunRanks, tp: int) -> None:
    for deviations in run_ranks(compare_all, tp, list(MODELS)):
        print(f"tp{tp}:", {name: f"{value:.1e}" for name, (value, _) in deviations.items()})
        assert len(deviations) == 2 * len(MODELS)
        assert all(value <= bound < 5e-6 for value, bound in deviations.values())
