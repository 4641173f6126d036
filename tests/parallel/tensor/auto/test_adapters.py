"""Adapters beside the layers of a block are shared with them. One process."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from engine.parallel.tensor.auto.search import Decided, Search
from tests.parallel.tensor.auto.blocks import LENGTH, WIDTH, Experts, Gated, Grouped, groups_of, truth_of

RANK = 2


class LowRankBeside(nn.Module):
    """A layer and a thin pair beside it, as PEFT has them."""

    def __init__(self, layer: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer, self.dropout = layer, nn.Dropout(dropout)
        self.first = nn.Linear(layer.in_features, RANK, bias=False)
        self.second = nn.Linear(RANK, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + 2.0 * self.second(self.first(self.dropout(x)))
        return out


def beside_all(block: nn.Module, *but: str, dropout: float = 0.0) -> nn.Module:
    """The block with a pair beside each linear layer."""
    for name, layer in list(block.named_modules()):
        if isinstance(layer, nn.Linear) and name not in but:
            block.set_submodule(name, LowRankBeside(layer, dropout))
    return block


class Sum(nn.Module):
    """A stack of matrices and the product of a thin pair for each, in one operation or in two."""

    def __init__(self, first: Tensor, second: Tensor, at_once: bool) -> None:
        super().__init__()
        self.given, self.at_once = (first, second), at_once

    def forward(self, stack: Tensor) -> Tensor:
        first, second = self.given
        return torch.baddbmm(stack, first, second, alpha=2.0) if self.at_once else stack + first @ second


class Written(nn.Module):
    """Experts with pairs that are written into their matrices for the length of a call, as PEFT does."""

    def __init__(self, names: tuple[str, ...] = ("up", "down"), at_once: bool = True) -> None:
        super().__init__()
        self.base_layer, self.names, self.at_once = Experts(), names, at_once
        for name in names:
            experts, inputs, outputs = self.base_layer.get_parameter(name).shape
            self.register_parameter(f"{name}_first", nn.Parameter(torch.zeros(inputs, experts * RANK)))
            self.register_parameter(f"{name}_second", nn.Parameter(torch.zeros(experts * RANK, outputs)))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        for name in self.names:
            first, second = self.get_parameter(f"{name}_first"), self.get_parameter(f"{name}_second")
            pair = first.view(-1, RANK, 3).permute(2, 0, 1), second.view(3, RANK, -1)
            parametrize.register_parametrization(self.base_layer, name, Sum(*pair, self.at_once))
        try:
            out: Tensor = self.base_layer(x, weights)
            return out
        finally:
            for name in self.names:
                parametrize.remove_parametrizations(self.base_layer, name, leave_parametrized=False)


def decided(block: nn.Module, sequence: bool = False) -> Decided:
    (group,) = groups_of(block)
    (found,) = Search(block, truth_of(block, LENGTH, LENGTH - 2), sequence).decide([group], 2)
    return found


COLUMN = {"base_layer": "column", "second": "column"}
ROW = {"base_layer": "row", "first": "row"}


def under(**layers: dict[str, str]) -> dict[str, str]:
    return {f"{layer}.{name}": style for layer, styles in layers.items() for name, style in styles.items()}


@pytest.mark.parametrize("sequence", [False, True])
def test_a_pair_is_shared_with_its_layer(sequence: bool) -> None:
    found = decided(beside_all(Grouped(kv=2)), sequence)
    assert (found.way.how, found.why) == ("local", "plain tensors")
    assert found.way.styles == under(q=COLUMN, k=COLUMN, v=COLUMN, out=ROW)


def test_a_fused_layer_gives_its_parts_to_its_pair() -> None:
    fused = {name: f"{style} fused:2" for name, style in COLUMN.items()}
    assert decided(beside_all(Gated())).way.styles == under(gate_up=fused, down=ROW)


def test_pairs_beside_some_of_the_layers() -> None:
    assert decided(beside_all(Grouped(kv=2), "k", "out")).way.styles == under(q=COLUMN, v=COLUMN) | {
        "k": "column", "out": "row",
    }  # fmt: skip


def test_the_pair_of_a_single_key_head_is_whole_and_its_gradients_are_summed() -> None:
    found = decided(beside_all(Grouped(kv=1)))
    assert found.way.how == "local+" and found.way.changes == ("repeats",)
    whole = {"base_layer": "column rows:0-4/0-4", "first": f"column rows:0-{RANK}/0-{RANK}", "second.weight": "partial"}
    assert found.way.styles == under(q=COLUMN, k=whole, v=whole, out=ROW) | {"": "divide:repeats"}


@pytest.mark.parametrize("at_once", [True, False])
def test_pairs_written_into_experts_are_cut_with_them(at_once: bool) -> None:
    found = decided(Written(at_once=at_once))
    assert (found.way.how, found.why) == ("local", "plain tensors")
    assert set(found.group.factors) == {"up_second", "down_first"}
    assert found.way.styles == {
        "base_layer": "experts", "base_layer.up": "cut:2", "base_layer.down": "cut:1",
        "up_first": "partial", "up_second": "cut:1", "down_first": "cut:0", "down_second": "partial",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "first", "second"), [("up", "partial", "cut:1"), ("down", "cut:0", "partial")])
def test_a_pair_written_into_one_matrix_of_experts(name: str, first: str, second: str) -> None:
    way = decided(Written((name,))).way
    assert way.how == "local" and {key: style for key, style in way.styles.items() if "." not in key} == {
        "base_layer": "experts", f"{name}_first": first, f"{name}_second": second,
    }  # fmt: skip


def test_a_pair_beside_a_layer_that_stays_whole_stays_whole() -> None:
    torch.manual_seed(0)
    assert groups_of(LowRankBeside(nn.Linear(WIDTH, WIDTH))) == ()


def test_a_dropout_before_a_whole_product_keeps_a_group_whole() -> None:
    """Each rank would draw a mask of its own there; PEFT's dropouts are known and draw alike."""
    assert groups_of(beside_all(Grouped(kv=2), dropout=0.1)) == ()
    assert len(groups_of(beside_all(Grouped(kv=2), "q", "k", "v", dropout=0.1))) == 1, "its input is a shard"
