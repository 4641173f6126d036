"""Values of tokens from logits of which a rank has some columns: those of the whole logits, without gathering them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.parallel.tensor.logits.token_values import token_values
from engine.parallel.tensor.plan.ranges import cut_unevenly
from engine.parallel.tensor.thread_ranks import run_tensor_ranks

NAMES = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def given(size: int) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V], of which one row has two largest, and labels."""
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(2, 4, size, generator=generator)
    logits[0, 0] = 0.0
    return logits, torch.randint(0, size, (2, 4), generator=generator)


def written_out(logits: Tensor, labels: Tensor, temperature: float) -> dict[str, Tensor]:
    """The same values, as their definitions have them."""
    scaled = logits / temperature
    shares = scaled.softmax(-1)
    return {
        "log_probs": shares.log().gather(-1, labels[..., None]).squeeze(-1),
        "entropy": -(shares * shares.log()).sum(-1),
        "log_sum_sq_probs": shares.square().sum(-1).log(),
        "mean_logits": scaled.mean(-1),
        "is_top1": scaled.argmax(-1) == labels,
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_of_whole_logits(temperature: float) -> None:
    logits, labels = given(11)
    found = token_values(logits, labels, NAMES, temperature)
    for name, expected in written_out(logits, labels, temperature).items():
        assert torch.allclose(found[name].double(), expected.double(), atol=1e-5), name
    assert token_values(logits, labels, ()).keys() == {"log_probs"}


@pytest.mark.parametrize(("tp", "size"), [(2, 11), (3, 3), (4, 61)])
def test_of_a_part_of_the_vocabulary(tp: int, size: int) -> None:
    logits, labels = given(size)
    logits.requires_grad_()
    expected = token_values(logits, labels, NAMES, 0.7)
    torch.autograd.backward(expected["log_probs"].sum() * 2 + expected["entropy"].square().sum())

    def body(axis: Any) -> tuple[dict[str, Tensor], Tensor, list[str]]:
        vocabulary = Vocabulary(axis, tuple(r.stop - r.start for r in cut_unevenly(size, axis.size)))
        local = logits.detach().narrow(-1, vocabulary.start, vocabulary.width).clone().requires_grad_()
        found = token_values(ShardedLogits.wrap(local * 1, vocabulary), labels, NAMES, 0.7)
        torch.autograd.backward(found["log_probs"].sum() * 2 + found["entropy"].square().sum())
        assert local.grad is not None and logits.grad is not None
        mine = logits.grad.narrow(-1, vocabulary.start, vocabulary.width)
        assert torch.allclose(local.grad, mine, atol=1e-5)
        return {name: value.detach() for name, value in found.items()}, local.grad, vocabulary.gathers

    for found, _, gathers in run_tensor_ranks(tp, body):
        assert not gathers
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name].double(), value.double(), atol=1e-5), name
