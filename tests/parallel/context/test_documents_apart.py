"""A token of one packed document changes no bit of the loss and the gradients of other documents."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import engine
from engine.parallel.comm.threads import run_thread_ranks
from tests.parallel.context.test_context_training import batches_of, llama
from tests.selection import wide

STARTS = (0, 7, 8, 21)
CHANGED = 2
"""Document with other tokens; its labels are ignored."""
PLACES = (8, 14, 20)
"""Positions of the changed tokens, the first and the last of the document among them."""


class Step(NamedTuple):
    """Loss, norm and weights of a step of plain gradient descent."""

    loss: float
    norm: float
    weights: dict[str, Tensor]


def batch_of(changed: bool, packed: bool) -> dict[str, Tensor]:
    """Rows of four documents, of which all but one count; unpacked: as one document."""
    batch = batches_of("packed")[0]
    batch["labels"][:, list(STARTS)] = -100
    batch["labels"][:, STARTS[CHANGED] : STARTS[CHANGED + 1]] = -100
    if changed:
        batch["input_ids"][:, list(PLACES)] = (batch["input_ids"][:, list(PLACES)] + 5) % 61
    if not packed:
        del batch["position_ids"]
    return batch


def step(attention: str, ranks: int, changed: bool, packed: bool = True) -> Step:
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "parallel": {"data": 1, "context": ranks},
    }

    def body(world: Any) -> Step:
        with engine.initialize(llama(attention), config, world=world) as eng:
            report = eng.train_batch(batch_of(changed, packed))
            return Step(report.loss, report.grad_norm, eng.full_state_dict())

    return run_thread_ranks(ranks, body)[0]


CASES = [wide(attention, ranks) for attention in ("sdpa", "eager") for ranks in (2, 3, 4)]


@pytest.mark.parametrize(("attention", "ranks"), CASES)
def test_a_token_moves_no_bit_of_other_documents(attention: str, ranks: int) -> None:
    first, second = (step(attention, ranks, changed) for changed in (False, True))
    assert (first.loss, first.norm) == (second.loss, second.norm)
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


@pytest.mark.parametrize(("attention", "ranks"), CASES[:1])
def test_a_token_moves_the_loss_of_a_row_that_is_one_document(attention: str, ranks: int) -> None:
    first, second = (step(attention, ranks, changed, packed=False) for changed in (False, True))
    assert first.loss != second.loss
