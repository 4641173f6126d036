"""The cheapest way that is right, for each kind of code. One process."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.parallel.tensor.auto.equivalence import exactly
from engine.parallel.tensor.auto.search import Decided, Search
from engine.parallel.tensor.auto.strategies import divisible_attributes, local, view
from tests.models import NanoBlock
from tests.parallel.tensor.auto.blocks import (
    LENGTH,
    WIDTH,
    Experts,
    Gated,
    Grouped,
    Interleaved,
    LowRank,
    Perceptron,
    Thirds,
    Torch,
    groups_of,
    truth_of,
)


def decided(block: nn.Module, tp: int = 2, used: list[int] | None = None, sequence: bool = False) -> list[Decided]:
    """What is made of every group of a block, proven at two lengths."""
    groups = groups_of(block, tp, used=used)
    return Search(block, truth_of(block, LENGTH, LENGTH - 2, used=used), sequence).decide(groups, tp)


def only(block: nn.Module, tp: int = 2, used: list[int] | None = None) -> Decided:
    (found,) = decided(block, tp, used)
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_code_that_asks_tensors_for_their_sizes_runs_on_plain_ones(sequence: bool) -> None:
    (gated,) = decided(Gated(), sequence=sequence)
    assert (gated.way.how, gated.why) == ("local", "plain tensors")
    assert gated.way.styles == {"gate_up": "column fused:2", "down": "row"}
    (interleaved,) = decided(Interleaved(), sequence=sequence)
    assert interleaved.way.styles == {"qkv": "column", "out": "row"}


def test_numbers_of_the_code_are_divided_as_few_as_will_do() -> None:
    thirds = only(Thirds())
    assert thirds.way.how == "local+" and thirds.way.changes == ("heads", "width")
    assert thirds.way.styles == {"qkv": "column fused:3", "out": "row", "": "divide:heads divide:width"}
    grouped = only(Grouped(kv=1))
    assert grouped.way.changes == ("repeats",) and grouped.way.styles["k"] == "column rows:0-4/0-4"
    assert only(Grouped(kv=2)).way.how == "local"


def test_code_that_divides_what_it_reads_off_a_tensor_sees_whole_shapes() -> None:
    attention, perceptron = decided(NanoBlock(WIDTH, 4))
    assert attention.way.how == "view" and perceptron.way.how == "local"
    assert set(attention.way.styles) == {"c_attn.weight", "c_attn.bias", "c_proj.weight"}
    assert attention.way.styles["c_attn.weight"] == "cut:0 fused:3 view"
    reason = "plain shards do not fit its code (a trial with them ended in ValueError: not enough values to unpack"
    assert attention.why.startswith(f"global tensors: {reason}")


def test_weights_that_are_read_without_their_layer() -> None:
    assert only(Torch()).way.how == "view"
    experts = only(Experts())
    assert experts.way.how == "view" or experts.way.styles[""] == "experts"


def test_a_norm_for_every_head_and_a_bias_by_heads() -> None:
    styles = only(Grouped(kv=2, norm=True, relative=True)).way.styles
    assert (styles["norm.weight"], styles["norm.bias"], styles["bias"]) == ("partial", "partial", "cut:0")


def test_a_whole_value_that_meets_cut_ones_beside_what_columns_give() -> None:
    """kv_a reaches the heads twice: by kv_b, whose input gradient is summed, and by the shared key, which is not."""
    found = only(LowRank())
    assert found.way.how == "view" and "partial" not in found.way.styles.values()


class Spread(nn.Module):
    """The same numbers with an operation in between that runs over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(Doubled.apply(self.up(x)))  # type: ignore[no-untyped-call]
        return out


class Doubled(torch.autograd.Function):
    """Code that a view cannot follow, wrong for a part: it multiplies by the width that it sees."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * x.shape[-1]

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * gradient.shape[-1]


def test_what_no_way_can_run_is_replicated() -> None:
    found = only(Spread())
    assert found.way.how == "replicate" and found.way.styles == {}
    assert found.why.startswith("no strategy is right: plain tensors: output 0 on rank 0 is off by")


def test_one_group_is_replicated_beside_others_that_are_cut() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Spread(), Gated()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    assert [found.way.how for found in decided(Both())] == ["replicate", "local"]


def test_only_numbers_that_code_reads_and_ranks_share_are_tried() -> None:
    block = Thirds()
    block.odd, block.flag, block.ratio = 7, True, 0.5  # type: ignore[assignment]
    (group,) = groups_of(block, 2)
    assert [number.attribute for number in divisible_attributes(block, group, 2)] == ["heads", "width"]
    assert local(block, group, 2) is not None and view(block, group, 2).how == "view"


def test_nothing_of_the_block_or_the_process_is_changed() -> None:
    block = NanoBlock(WIDTH, 4)
    before = torch.get_rng_state()
    search = Search(block, truth_of(block))
    kept = {name: p.clone() for name, p in block.state_dict().items()}
    search.decide(groups_of(block), 2)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert all(torch.equal(kept[name], p) for name, p in block.state_dict().items()) and block.n_head == 4
    assert all(parameter.grad is None for parameter in block.parameters())
    with exactly():
        assert torch.zeros(1).float().dtype == torch.float64
        assert torch.equal(F.dropout(torch.ones(9), 0.5), torch.ones(9))


def test_dropout_does_not_disturb_a_proof() -> None:
    assert only(Perceptron(dropout=0.5), used=[0]).way.how == "local"
