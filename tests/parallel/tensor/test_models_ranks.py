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

RunRanks = Callable[..., list[Any]]


def run(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, logits) with the model's own loss where it has one."""
    if isinstance(model, Decoder):
        logits = model(ids)
        total, weight = loss_sum(logits, {"labels": ids.roll(-1, 1).masked_fill(ids % 7 == 0, -100)})
        return total / weight, logits
    output = model(input_ids=ids, labels=ids.masked_fill(ids % 7 == 0, -100))
    return output.loss, output.logits


def compare(name: str, dtype: torch.dtype) -> float:
    """The largest deviation of one model, relative to the largest entry of what deviates."""
    model, ids = build(name).to(dtype), tokens()
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
        # Rounding is that of the large terms that cancel in a small gradient. A key bias has no gradient at all.
        floor = largest if key.endswith(("key.bias", "k_proj.bias")) else largest * FLOORS[dtype]
        worst.append(assert_close(gradients[key], parameter.grad, f"{name} {key}", floor=floor))
    sharded.comm.close()
    return max(worst)


FLOORS = {torch.float32: 0.2, torch.float64: 0.0}  # of the model's largest entry


def compare_all(names: list[str]) -> dict[str, float]:
    """Body of a rank."""
    return {f"{name} {dtype}": compare(name, dtype) for name in names for dtype in FLOORS}


@pytest.mark.parametrize("tp", [2, 4])
def test_sharded_models_have_the_gradients_of_whole_ones(run_ranks: RunRanks, tp: int) -> None:
    for deviations in run_ranks(compare_all, tp, list(MODELS)):
        print(f"tp{tp}:", {name: f"{value:.1e}" for name, value in deviations.items()})
        assert len(deviations) == 2 * len(MODELS) and max(deviations.values()) <= 1e-6
