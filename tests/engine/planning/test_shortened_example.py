"""The example that a tensor plan is searched with: shorter than the user's, and whole where a model needs that."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config import load_config
from engine.planning.tensor_plan_search import SearchedProgram
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from tests.models import NanoBlock

LENGTH, WIDTH, VOCABULARY = 40, 16, 32


class Head(nn.Module):
    """As transformers writes a masked head: labels are viewed, not reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(NanoBlock(WIDTH, 2) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if mask is not None:
            x = x * mask[..., None]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), labels.view(-1))


class Windowed(Head):
    """Takes texts of one length."""

    def forward(self, input_ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        if input_ids.shape[1] != LENGTH:
            raise ValueError(f"{input_ids.shape[1]} tokens")
        return super().forward(input_ids, labels, mask)


def search(model: nn.Module, **more: Tensor) -> Any:
    """The plan for two ranks."""
    config = load_config({"train_batch_size": 2, "parallel": {"data": 1, "tensor": 2}, "optimizer": {"type": "SGD"}}, 2)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    example = {"input_ids": ids, "labels": ids.clone(), **more}
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    return SearchedProgram(program, example).find_styles(2).plan(model, 2)


@pytest.mark.parametrize("masked", [False, True])
def test_an_example_that_is_shortened_can_be_viewed(masked: bool) -> None:
    plan = search(Head(), **({"mask": torch.ones(2, LENGTH)} if masked else {}))
    assert {reason.how for reason in plan.reasons} <= {"local", "local+", "view"} and not plan.notes


def test_a_model_of_one_length_is_searched_with_that_length() -> None:
    plan = search(Windowed())
    assert plan.reasons and plan.notes == (
        "the tensor plan is searched with the full length of the example, because 16 tokens raise: 16 tokens",
        f"the tensor plan is proven for one length of text only, because the model does not run with {LENGTH // 2} "
        f"tokens: {LENGTH // 2} tokens",
    )
