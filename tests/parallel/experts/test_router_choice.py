"""Choices of routers: found by trial in any class, given from outside with the scores of the model's own formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.experts.router_choice import OtherChoice, RouterChoice, find_router_choice
from tests.parallel.experts.moe import WIDTH, Always, Listed, Stacked

EXPERTS, ROWS = 5, 7


class Block(nn.Module):
    """Block with a gate of its own and stacked experts; ``weigh`` returns (weights, numbers) of scores."""

    def __init__(self, weigh: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(2)
        self.gate, self.moe, self.weigh = nn.Linear(WIDTH, EXPERTS), Stacked(EXPERTS), weigh
        self.gate.weight.data = torch.randn(EXPERTS, WIDTH, generator=draw)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the rows plus the sums of their experts."""
        x = hidden.reshape(-1, WIDTH)
        weights, numbers = self.weigh(self.gate(x))
        out: Tensor = self.moe(x, numbers, weights)
        return hidden + out.view_as(hidden)


def softmax_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, numbers = scores.softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), numbers


def softmax_last(scores: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.topk(scores, k=2, dim=-1)
    return found.values.softmax(-1), found.indices


def sigmoid_and_bias(scores: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores.sigmoid()
    numbers = (scores + torch.arange(EXPERTS) / 4).topk(2, dim=-1, sorted=False)[1]
    weights = scores.gather(1, numbers)
    return weights / weights.sum(-1, keepdim=True) * 2.5, numbers


def one_of_all(scores: Tensor) -> tuple[Tensor, Tensor]:
    numbers = scores.argmax(-1, keepdim=True)
    return scores.sigmoid().gather(-1, numbers), numbers


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    found = scores.softmax(-1).max(-1)
    return found.values[:, None], found.indices[:, None]


def in_groups(scores: Tensor) -> tuple[Tensor, Tensor]:
    left = scores.softmax(-1)
    left = left * (left > left.mean(-1, keepdim=True))
    return left.topk(2)


def sorted_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, numbers = scores.softmax(-1).sort(-1, descending=True)
    return values[:, :2], numbers[:, :2]


REFERENCES: dict[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]] = {
    softmax_first: lambda scores, n: (w := scores.softmax(-1).gather(-1, n)) / w.sum(-1, keepdim=True),
    softmax_last: lambda scores, n: scores.gather(-1, n).softmax(-1),
    sigmoid_and_bias: lambda scores, n: (w := scores.sigmoid().gather(-1, n)) / w.sum(-1, keepdim=True) * 2.5,
    one_of_all: lambda scores, n: scores.sigmoid().gather(-1, n),
    largest: lambda scores, n: scores.softmax(-1).gather(-1, n),
}
"""The weights of given numbers of experts, for each way to choose them."""


def chosen(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(EXPERTS, generator=draw)[:count] for _ in range(ROWS)])


def found_in(block: nn.Module, child: str = "moe") -> RouterChoice:
    choice = find_router_choice(block, child, EXPERTS)
    assert isinstance(choice, RouterChoice), choice
    return choice


@pytest.mark.parametrize("weigh", REFERENCES)
def test_given_experts_have_the_weights_and_gradients_of_the_models_formula(
    weigh: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    block = Block(weigh)
    choice = found_in(block)
    given, x = chosen(choice.chosen), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6))
    with OtherChoice(choice, given, None):
        block(x).square().sum().backward()
    found = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
    block.zero_grad()
    block.weigh = lambda scores: (REFERENCES[weigh](scores, given), given)
    block(x).square().sum().backward()
    wanted = [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
    assert len(found) == len(wanted) == 4
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_without_an_entry_are_left_to_the_router() -> None:
    block, seen = Block(softmax_first), list[Tensor]()
    choice, x = found_in(block), torch.randn(ROWS, WIDTH)
    own = block.weigh(block.gate(x))[1]
    given = chosen(2)
    given[2] = given[5] = -1
    with torch.no_grad(), OtherChoice(choice, given, seen.append):
        block(x)
    wanted = given.clone()
    wanted[2], wanted[5] = own[2], own[5]
    assert torch.equal(seen[0], wanted)


@pytest.mark.parametrize(("kind", "size"), [(Listed, EXPERTS), (Always, EXPERTS - 1)])
def test_the_choice_of_a_list_is_found(kind: Callable[[int], nn.Module], size: int) -> None:
    assert found_in(kind(EXPERTS), "experts") == RouterChoice("", 0, size, 2)


@pytest.mark.parametrize(
    ("weigh", "reason"),
    [(in_groups, "have the weight 0"), (sorted_scores, "calls none of torch.topk, torch.argmax, torch.max")],
)
def test_a_choice_that_cannot_be_given_is_refused(
    weigh: Callable[[Tensor], tuple[Tensor, Tensor]], reason: str
) -> None:
    assert reason in str(find_router_choice(Block(weigh), "moe", EXPERTS))


def test_another_number_of_rows_is_refused() -> None:
    block = Block(softmax_first)
    with OtherChoice(found_in(block), chosen(2)[1:], None), pytest.raises(EngineError, match="for each of 7 rows"):
        block(torch.randn(ROWS, WIDTH))
