"""Adapters beside the layers of a block are shared with them. One process."""

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.tensor.auto.search import Decided, Search
from tests.parallel.tensor.auto.blocks import LENGTH, WIDTH, Gated, Grouped, groups_of, truth_of

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


def test_a_pair_beside_a_layer_that_stays_whole_stays_whole() -> None:
    torch.manual_seed(0)
    assert groups_of(LowRankBeside(nn.Linear(WIDTH, WIDTH))) == ()


def test_a_dropout_before_a_whole_product_keeps_a_group_whole() -> None:
    """Each rank would draw a mask of its own there; PEFT's dropouts are known and draw alike."""
    assert groups_of(beside_all(Grouped(kv=2), dropout=0.1)) == ()
    assert len(groups_of(beside_all(Grouped(kv=2), "q", "k", "v", dropout=0.1))) == 1, "its input is a shard"
