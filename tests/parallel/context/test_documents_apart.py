"""A token of one packed document changes no bit of the loss and the gradients of other documents."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.context.choose import Method
from tests.parallel.context.recurrent_models import FAMILIES, OWN, VOCABULARY, Sequences
from tests.parallel.context.test_context_training import batches_of, llama
from tests.selection import wide

STARTS = (0, 7, 8, 21)
CHANGED = 2
"""Document with other tokens; its labels are ignored."""
PLACES = (8, 14, 20)
"""Positions of the changed tokens, the first and the last of the document among them."""
RANKS = (2, 3, 4)
METHODS: tuple[Method, ...] = get_args(Method)


class Step(NamedTuple):
    """Loss, norm and weights of a step of plain gradient descent."""

    loss: float
    norm: float
    weights: dict[str, Tensor]


def batch_of(changed: bool, packed: bool = True, later: bool = True) -> dict[str, Tensor]:
    """Rows of four documents, of which all but one count; unpacked: as one document.

    ``later``: documents after the changed one count too.
    """
    batch = batches_of("packed")[0]
    batch["labels"][:, list(STARTS)] = -100
    batch["labels"][:, STARTS[CHANGED] : STARTS[CHANGED + 1] if later else None] = -100
    if changed:
        batch["input_ids"][:, list(PLACES)] = (batch["input_ids"][:, list(PLACES)] + 5) % VOCABULARY
    if not packed:
        del batch["position_ids"]
    return batch


def step(build: Callable[[], nn.Module], batch: dict[str, Tensor], ranks: int, method: str = "auto") -> Step:
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "parallel": {"data": 1, "context": {"size": ranks, "method": method}},
    }

    def body(world: Any) -> Step:
        with engine.initialize(build(), config, world=world) as eng:
            report = eng.train_batch(batch)
            return Step(report.loss, report.grad_norm, eng.full_state_dict())

    return run_thread_ranks(ranks, body)[0]


def check_equal(first: Step, second: Step) -> None:
    assert (first.loss, first.norm) == (second.loss, second.norm)
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


@pytest.mark.parametrize(
    ("attention", "method", "ranks"),
    [
        wide(attention, method, ranks)
        for attention, methods in (("sdpa", METHODS), ("eager", ("auto",)))
        for method in methods
        for ranks in RANKS
    ],
)
def test_a_token_moves_no_bit_of_other_documents(attention: str, method: str, ranks: int) -> None:
    build = partial(llama, attention)
    check_equal(*(step(build, batch_of(changed), ranks, method) for changed in (False, True)))


@pytest.mark.parametrize("method", [wide(method) for method in METHODS])
def test_a_token_moves_the_loss_of_a_row_that_is_one_document(method: str) -> None:
    first, second = (step(llama, batch_of(changed, packed=False), 2, method) for changed in (False, True))
    assert first.loss != second.loss


def _conv_of_documents(model: Any, x: Any, positions: Tensor) -> Any:
    """Returns a convolution with taps that do not reach into the document before."""
    taps = (x, *(nn.functional.pad(x, (0, 0, back, -back)) * (positions >= back)[..., None] for back in (1, 2, 3)))
    return sum(tap * model.conv.weight[:, 0, 3 - back] for back, tap in enumerate(taps))


APART: dict[str, Callable[[], nn.Module]] = {
    "conv of documents": partial(Sequences, _conv_of_documents),
    "reset loop": OWN["reset loop"],
}
"""Layers that begin anew with each document."""


def _batch(changed: bool, later: bool) -> dict[str, Tensor]:
    """Returns a batch for models that compute the loss of each position from the label at the same position."""
    batch = batch_of(changed, later=later)
    return batch | {"labels": torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


@pytest.mark.parametrize("ranks", [wide(ranks) for ranks in RANKS])
@pytest.mark.parametrize("layer", APART)
def test_a_token_moves_no_bit_of_documents_that_a_layer_separates(layer: str, ranks: int) -> None:
    check_equal(*(step(APART[layer], _batch(changed, later=True), ranks) for changed in (False, True)))


CAUSAL = (
    "causal conv", "shift by pad", "linear attention", "cumsum", "stacked loop", "written loop", "reset in place",
    "GRU", "LSTM", "scan",
)  # fmt: skip


@pytest.mark.parametrize("ranks", [wide(ranks) for ranks in RANKS])
@pytest.mark.parametrize("layer", CAUSAL)
def test_a_token_moves_no_bit_of_earlier_documents(layer: str, ranks: int) -> None:
    check_equal(*(step(OWN[layer], _batch(changed, later=False), ranks) for changed in (False, True)))


@pytest.mark.parametrize("layer", [wide(layer) for layer in CAUSAL])
def test_a_token_moves_the_loss_of_later_documents_of_one_state(layer: str) -> None:
    first, second = (step(OWN[layer], _batch(changed, later=True), 2) for changed in (False, True))
    assert first.loss != second.loss


HYBRIDS = ("Qwen3Next", "RecurrentGemma", "Lfm2")
"""Families with attention in some layers."""


@pytest.mark.parametrize(
    ("family", "method", "ranks"),
    [
        wide(family, method, ranks)
        for family in ("Mamba", "Mamba2", *HYBRIDS)
        for method in (METHODS if family in HYBRIDS else ("auto",))
        for ranks in (2, 4)
    ],
)
def test_a_token_moves_no_bit_of_earlier_documents_in_a_family(family: str, method: str, ranks: int) -> None:
    # without experts: in one process too, their products round otherwise if other tokens choose them
    build = partial(FAMILIES[family], num_experts=0) if family == "Qwen3Next" else FAMILIES[family]
    check_equal(*(step(build, batch_of(changed, later=False), ranks, method) for changed in (False, True)))
