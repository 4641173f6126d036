"""Forms of experts as data: modules found by their parameters, and the ranks of each expert."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.parallel.experts.calls import CountedCall, MajorCall, RoutedCall, possible_calls
from engine.parallel.experts.forms import (
    ExpertPacking,
    ListedExperts,
    RoutedExperts,
    expert_bounds,
    expert_cut,
    lists_of_equal_experts,
    module_kind,
    owner_cut,
    possible_counts,
    possible_widths,
    stacked_experts,
)
from engine.parallel.shard_table import Range
from engine.parallel.tensor.layers.linear import local_rows
from tests.parallel.experts.moe import Listed, Member, Stacked


@given(st.integers(1, 300), st.integers(1, 64))
def test_bounds_give_every_expert_to_one_rank_and_the_first_ranks_one_more(experts: int, ranks: int) -> None:
    bounds = expert_bounds(experts, ranks)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, experts, ranks)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    cut = expert_cut(experts, ranks)
    assert [(each.start, each.stop) for each in cut] == list(pairwise(bounds))
    assert [each.holders for each in cut] == [(rank,) for rank in range(ranks)]


@given(st.integers(2, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1), st.booleans())
def test_ranges_of_a_packing_are_the_experts_of_each_rank(
    experts: int, ranks: int, rows: int, dim: int, alternate: bool
) -> None:
    ranks, packing = min(ranks, experts), ExpertPacking(rows, dim, alternate)
    stack = torch.arange(3 * rows * experts).view(packing.shape((3, 3), experts))
    bounds, cut = expert_bounds(experts, ranks), expert_cut(experts, ranks, packing)
    assert [each.start for each in cut] == [0, *(each.stop for each in cut)][:-1]
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        own = local_rows(stack, dim, cut, rank)
        assert torch.equal(own, packing.chosen(stack, experts, range(start, stop)))
        assert torch.equal(packing.apart(own, stop - start), packing.apart(stack, experts)[start:stop])


def test_a_parameter_of_one_expert_is_whole_on_its_rank() -> None:
    assert owner_cut(7, 3) == (Range(0, 7, (3,)),)


class WithNorm(Stacked):
    """A vector for each expert among its matrices."""

    def __init__(self) -> None:
        super().__init__(4)
        self.scale = nn.Parameter(torch.ones(4))


class WithBias(Stacked):
    """A bias [experts, H] among matrices [experts, .., ..]."""

    def __init__(self) -> None:
        super().__init__(4)
        self.bias = nn.Parameter(torch.zeros(4, 6))


class WithLayer(Stacked):
    """Another module with parameters inside."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layer = nn.Linear(2, 2)


class Unequal(Stacked):
    """Matrices of different numbers of experts."""

    def __init__(self) -> None:
        super().__init__(4)
        self.more = nn.Parameter(torch.zeros(5, 2, 2))


@pytest.mark.parametrize(
    ("module", "experts"),
    [
        (Stacked(4), 4), (WithBias(), 4), (WithNorm(), 4), (WithLayer(), 0), (Unequal(), 0), (Stacked(1), 0),
        (nn.Linear(4, 4), 0), (nn.Bilinear(2, 3, 4), 0), (nn.Identity(), 0), (Member(), 0),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_stacked_experts_are_found_by_their_parameters(module: nn.Module, experts: int) -> None:
    assert stacked_experts(module) == experts


def test_widths_are_sizes_of_matrices_the_most_frequent_first() -> None:
    module = Stacked(3, width=6, inner=5)
    module.gate = nn.Parameter(torch.zeros(3, 7, 6))
    assert possible_widths(module) == [6, 5, 7]


class Four(nn.Module):
    """Four required arguments."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return a


class Two(nn.Module):
    """Two required arguments."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a


class More(nn.Module):
    """Three required arguments, and others with defaults."""

    def forward(self, x: Tensor, weights: Tensor, numbers: Tensor, scale: float = 1.0, **kwargs: Any) -> Tensor:
        return x


class Keyword(nn.Module):
    """A required argument that is passed by name."""

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor, *, mask: Tensor) -> Tensor:
        return x


def test_calls_are_those_that_a_signature_allows_and_arguments_come_in_any_order() -> None:
    found = list(possible_calls(Stacked(2)))
    assert found[0] == RoutedCall("hidden", "index", "weights") and len(set(found)) == 12
    assert RoutedCall(rows="x", numbers="numbers", weights="weights") in list(possible_calls(More()))
    assert list(possible_calls(Four())) == list(possible_calls(Keyword())) == []
    assert {type(each) for each in possible_calls(Two())} == {CountedCall}
    assert {type(each) for each in possible_calls(Member())} == {MajorCall}


def test_counts_of_experts_are_found_by_value_and_a_flag_is_none() -> None:
    module = Stacked(2)
    module.total, module.flag, module.other = 2, True, 3  # type: ignore[assignment]
    assert list(possible_counts(module, 2)) == [("num_experts", "total"), ("num_experts",), ("total",), ()]
    module.a, module.b = 2, 2  # type: ignore[assignment]
    assert list(possible_counts(module, 2)) == [("num_experts", "total", "a", "b")]


def test_modules_of_one_kind_have_equal_code_shapes_and_settings() -> None:
    first, second = Stacked(4), Stacked(4)
    assert module_kind(first) == module_kind(second.eval()) and module_kind(first) != module_kind(Stacked(5))
    second.top = 2  # type: ignore[assignment]
    assert module_kind(first) != module_kind(second)


def test_private_settings_buffers_and_inner_settings_tell_modules_apart() -> None:
    kinds = set()
    for name, value in (("none", None), ("_sorted", True), ("limits", [3, 4]), ("norm", 0.5), ("scale", 2.0)):
        module = Stacked(4)
        module.gate = nn.Dropout(value if name == "norm" else 0.1)  # type: ignore[arg-type]
        module.register_buffer("factor", torch.tensor(value if name == "scale" else 1.0))
        setattr(module, name if name in ("_sorted", "limits") else "same", value if name[0] in "_l" else None)
        kinds.add(module_kind(module))
    assert len(kinds) == 5


class Layers(nn.Module):
    """Lists that are none of experts: of unequal members, of one, of a shared one; and a dict that is one."""

    def __init__(self) -> None:
        super().__init__()
        member = Member()
        self.unequal = nn.ModuleList([Member(), Member(inner=7)])
        self.one = nn.ModuleList([Member()])
        self.tied = nn.ModuleList([member, member])
        self.empty = nn.ModuleList([nn.ReLU(), nn.ReLU()])
        self.named = nn.ModuleDict({"a": Member(), "b": Member()})


def test_lists_of_equal_members_are_found_with_their_blocks() -> None:
    model = nn.ModuleDict({"moe": Listed(3), "layers": Layers()})
    assert list(lists_of_equal_experts(model)) == [
        ("moe", "experts", ("moe.experts.0", "moe.experts.1", "moe.experts.2")),
        ("layers", "named", ("layers.named.a", "layers.named.b")),
    ]
    assert [name for name, _, _ in lists_of_equal_experts(Listed(2))] == [""]


def test_names_of_parameters_follow_the_module() -> None:
    stacked = RoutedExperts(
        "a", 4, 6, RoutedCall("x", "n", "w"), {"up": ExpertPacking(), "down": ExpertPacking()}
    ).named("b.c")
    assert stacked.parameters == {"b.c.up": ExpertPacking(), "b.c.down": ExpertPacking()}
    listed = ListedExperts("a", ("a.e.0", "a.e.1"), 6, 6, ("w",)).named("b", ("b.e.0", "b.e.1", "b.e.2"))
    assert (listed.block, listed.experts) == ("b", 3)
