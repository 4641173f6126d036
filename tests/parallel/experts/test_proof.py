"""Proofs by trial: modules that may be shared, and a trap for each rule."""

from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.parallel.experts.calls import RoutedCall
from engine.parallel.experts.forms import ExpertPacking, RoutedExperts
from engine.parallel.experts.proof import Unproven, prove_listed, prove_routed
from tests.parallel.experts.moe import WIDTH, Listed, Member, Stacked

UNKNOWN = (
    "its arguments are neither rows, numbers of experts and weights, nor rows and their number for each expert, nor "
    "equally many rows for each expert"
)


class Turned(Stacked):
    """Weights before numbers."""

    def forward(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(x, chosen, scores)


class CountedTwice(Stacked):
    """A second attribute that counts experts."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.total = experts

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        one_hot = functional.one_hot(index, self.total).sum(1)
        return super().forward(hidden, index, weights) + 0 * one_hot.sum(1, keepdim=True)


class Dropping(Stacked):
    """Results that are random in training."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return functional.dropout(super().forward(hidden, index, weights), 0.5, self.training)


class Wide(Stacked):
    """As many experts as columns of a row, and an attribute for each."""

    def __init__(self, experts: int = WIDTH) -> None:
        super().__init__(experts)
        self.width = WIDTH

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden.view(-1, self.width), index, weights)


@pytest.mark.parametrize(
    ("module", "names", "counts"),
    [
        (Stacked(6), ("hidden", "index", "weights"), ("num_experts",)),
        (Stacked(2, width=5, inner=7), ("hidden", "index", "weights"), ("num_experts",)),
        (Turned(5), ("x", "chosen", "scores"), ("num_experts",)),
        (CountedTwice(6), ("hidden", "index", "weights"), ("num_experts", "total")),
        (Dropping(6), ("hidden", "index", "weights"), ("num_experts",)),
        (Wide(), ("hidden", "index", "weights"), ("num_experts",)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_module_of_routed_experts_is_proven_with_its_arguments(
    module: Stacked, names: tuple[str, str, str], counts: tuple[str, ...]
) -> None:
    found = prove_routed("moe", module)
    width, experts = module.up.shape[2], module.num_experts
    assert found == RoutedExperts(
        "moe", experts, width, RoutedCall(*names), {"up": ExpertPacking(), "down": ExpertPacking()}, (), counts
    )
    assert module.training and module.up.isfinite().all() and len(module.up) == experts, "the module is as it was"


class Neighbours(Stacked):
    """Each row reads the mean of all rows."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(0), index, weights)


class Capacity(Stacked):
    """An expert takes three rows and drops others."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        place = (functional.one_hot(index.flatten(), self.num_experts).cumsum(0) - 1).view(*index.shape, -1)
        own = place.gather(-1, index[..., None]).squeeze(-1)
        return super().forward(hidden, index, weights * (own < 3))


class CapacityInTraining(Capacity):
    """The same only in training."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        own = super().forward if self.training else lambda *given: Stacked.forward(self, *given)
        return own(hidden, index, weights)


class Twice(Stacked):
    """Weights that are applied twice: to each result, and to their sum."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index, weights) * weights.sum(1, keepdim=True)


class Normalized(Stacked):
    """Weights that are divided by their sum inside."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index, weights / weights.sum(1, keepdim=True))


class Dense(Stacked):
    """Every expert computes every row."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        every = torch.stack([self.one(hidden, number) for number in range(self.num_experts)], 1)
        mask = functional.one_hot(index, self.num_experts) * weights[..., None]
        return torch.einsum("teh,tke->th", every, mask)


class Whole(Stacked):
    """A scale that reads the experts of all ranks."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = super().forward(hidden, index, weights)
        return found.div(self.up.norm())


class Numbered(Stacked):
    """A result that depends on the number of the expert."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index, weights * (index + 1))


class Elsewhere(Stacked):
    """A count of experts that is no attribute of the module."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.config = SimpleNamespace(count=experts)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        functional.one_hot(index, self.config.count)
        self.up[self.config.count - 1]
        return super().forward(hidden, index, weights)


class NeverEmpty(Stacked):
    """A result that needs a row."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert len(hidden)
        return super().forward(hidden, index, weights)


class Locked(Stacked):
    """An attribute without a copy."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.lock = Lock()


class Buffered(Stacked):
    """A buffer."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.register_buffer("load", torch.zeros(experts))


class Pair(Stacked):
    """Two results."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Any:
        return super().forward(hidden, index, weights), weights


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Neighbours, "a row's result depends on other rows"),
        (Capacity, "a row's result depends on other rows"),
        (CapacityInTraining, "a row's result depends on other rows"),
        (Twice, "the results of a row's experts are not added"),
        (Normalized, "the results of a row's experts are not added"),
        (Dense, "a row's result depends on experts that it does not ask for"),
        (Whole, "a row's result depends on experts that it does not ask for"),
        (Numbered, "its forward needs the number of all experts"),
        (Elsewhere, UNKNOWN),
        (NeverEmpty, "it cannot be called without rows"),
        (Buffered, "it has buffers, which are not shared among ranks"),
        (Pair, UNKNOWN),
        (Locked, "it cannot be copied for a trial"),
    ],
)
def test_each_rule_refuses_its_trap(kind: Callable[[int], nn.Module], reason: str) -> None:
    assert prove_routed("moe", kind(6)) == Unproven("moe", reason)


class Stack(nn.Module):
    """Layers of a transformer: each reads the results of others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Member() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.experts:
            x = x + layer(x)
        return x


class Head(nn.Module):
    """Attention head: a row reads other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        found: Tensor = scores.softmax(-1) @ self.value(x)
        return found


class Heads(nn.Module):
    """Attention heads in a list, all of which read the input."""

    def __init__(self, kind: Callable[[], nn.Module] = Head) -> None:
        super().__init__()
        self.experts = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.experts]).sum(0)


class Normed(nn.Module):
    """Member whose rows are normalized over all rows in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.linear(x.reshape(-1, WIDTH))).view_as(x)
        return found


class Centered(Member):
    """Member that reads the mean of its rows in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if self.training else x)


class Reader(Listed):
    """Block that reads the weights of its experts."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + sum(each.sum() for each in self.experts.parameters())


class TwoInputs(Listed):
    """Block that requires two tensors."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * mask


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_a_block_with_a_list_of_experts_is_proven_with_its_widths(chosen: int) -> None:
    block = Listed(4, chosen)
    assert prove_listed(block, "experts") == (WIDTH, WIDTH)
    assert block.calls == 0 and not block.seen and block.training, "the block is as it was"


def test_a_block_that_views_its_input_as_rows_is_proven_with_the_width_of_the_rows() -> None:
    class Viewing(Listed):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden.view(-1, WIDTH)).view_as(hidden)

    assert prove_listed(Viewing(4), "experts") == (WIDTH, WIDTH)


def test_members_may_have_results_of_another_width() -> None:
    block = Heads(lambda: Member(WIDTH, 5, out=9))
    assert prove_listed(block, "experts") == (WIDTH, 9)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Stack(), "the rows of an expert depend on the results of others"),
        (Heads(), "a row's result depends on other rows"),
        (Heads(Normed), "its members have buffers, which are not shared among ranks"),
        (Heads(Centered), "a row's result depends on other rows"),
        (Reader(4), "its block does more with its experts than to call them"),
        (Heads(lambda: Locked(2)), "it cannot be copied for a trial"),
        (TwoInputs(4), "its block is not called with one tensor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_rule_of_lists_refuses_its_trap(block: nn.Module, reason: str) -> None:
    assert prove_listed(block, "experts") == reason


class Set(Member):
    """Member that a setting changes."""

    def __init__(self, setting: str = "") -> None:
        super().__init__()
        self.setting, self.drop = setting, nn.Dropout(0.5 if setting == "dropout" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        centered = self.setting == "centered" or (self.training and self.setting == "centered in training")
        found: Tensor = self.drop(super().forward(x - x.mean(0) if centered else x))
        match self.setting:
            case "scale":
                return found * 3
            case "double":
                return found.double()
            case "wide":
                return torch.cat((found, found), -1)
            case "raises":
                raise ValueError(self.setting)
        return found


@pytest.mark.parametrize("setting", ["scale", "dropout"])
def test_members_may_have_settings_of_their_own(setting: str) -> None:
    settings = iter(("", setting, ""))
    assert prove_listed(Heads(lambda: Set(next(settings))), "experts") == (WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("centered", "a row's result depends on other rows"),
        ("centered in training", "a row's result depends on other rows"),
        ("double", "its members have results of different shapes or dtypes"),
        ("wide", "its members have results of different shapes or dtypes"),
        ("raises", "its members do not all take the same rows"),
    ],
)
def test_a_member_other_than_the_first_is_tried_too(setting: str, reason: str) -> None:
    settings = iter(("", "", setting))
    assert prove_listed(Heads(lambda: Set(next(settings))), "experts") == reason
