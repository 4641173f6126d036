"""What is cut with what: the rows of every rank, for each layout. One process."""

from collections.abc import Sequence

import pytest
from torch import Tensor, nn
from torch.nn import functional

from engine.parallel.shard_table import Range
from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters, NeededRows, SharedInput
from engine.parallel.tensor.auto.equivalence import exactly
from engine.parallel.tensor.plan.ranges import cut_parts, rows_of_rank
from tests.parallel.tensor.auto.blocks import (
    HEAD,
    HEADS,
    WIDTH,
    Experts,
    Gated,
    Grouped,
    Interleaved,
    LowRank,
    Perceptron,
    Residuals,
    Thirds,
    Torch,
    groups_of,
    patterns_of,
)


def rows(group: CoupledParameters, name: str, tp: int = 2) -> list[list[int]]:
    """By rank the rows of a parameter."""
    return [rows_of_rank(group.cuts[name].ranges, rank) for rank in range(tp)]


def only(block: nn.Module, tp: int = 2) -> CoupledParameters:
    (group,) = groups_of(block, tp)
    return group


@pytest.mark.parametrize("tp", [2, 4])
def test_fused_thirds(tp: int) -> None:
    group = only(Thirds(), tp)
    assert (group.row, group.columns, group.partial) == ("out.weight", ("qkv.weight",), ())
    assert group.cuts["qkv.weight"].ranges == cut_parts(3 * WIDTH, tp, 3) and group.cuts["qkv.weight"].dim == 0
    assert group.cuts["out.weight"].dim == 1 and group.cuts["out.weight"].ranges == cut_parts(WIDTH, tp)
    assert group.cuts["qkv.bias"].ranges == group.cuts["qkv.weight"].ranges and "out.bias" not in group.cuts


def test_interleaved_heads_are_one_run_of_rows() -> None:
    group = only(Interleaved())
    assert rows(group, "qkv.weight") == [list(range(24)), list(range(24, 48))]


def test_in_proj_of_torch_is_thirds() -> None:
    group = only(Torch())
    assert group.row == "attention.out_proj.weight" and group.columns == ("attention.in_proj_weight",)
    assert group.cuts["attention.in_proj_weight"].ranges == cut_parts(3 * WIDTH, 2, 3)
    assert group.cuts["attention.in_proj_bias"].ranges == cut_parts(3 * WIDTH, 2, 3)


def test_gate_and_up_are_halves_and_a_dead_unit_is_needed() -> None:
    group = only(Gated())
    assert group.cuts["gate_up.weight"].ranges == cut_parts(48, 2, 2)


def test_a_key_head_is_held_by_all_ranks_that_have_its_queries() -> None:
    group = only(Grouped(kv=2), 4)
    assert group.cuts["k.weight"].ranges == (Range(0, HEAD, (0, 1)), Range(HEAD, 2 * HEAD, (2, 3)))
    assert group.cuts["q.weight"].ranges == cut_parts(WIDTH, 4)
    assert group.cuts["k.bias"].ranges == group.cuts["k.weight"].ranges  # though its gradient is zero


def test_a_single_key_head_is_whole_on_every_rank_but_one_of_the_columns() -> None:
    group = only(Grouped(kv=1))
    assert sorted(group.columns) == ["k.weight", "q.weight", "v.weight"]
    assert group.cuts["v.weight"].ranges == (Range(0, HEAD, (0, 1)),)


def test_a_norm_for_every_head_is_partial() -> None:
    assert only(Grouped(kv=2, norm=True)).partial == ("norm.weight", "norm.bias")


def test_a_bias_by_heads_is_cut_along_its_heads() -> None:
    group = only(Grouped(kv=4, relative=True))
    assert rows(group, "bias") == [[0, 1], [2, 3]] and "bias" not in group.columns


def test_experts_are_cut_along_their_hidden_width() -> None:
    group = only(Experts())
    assert group.cuts["up"].dim == 2 and group.cuts["down"].dim == 1
    assert rows(group, "up") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_wide_side_of_a_low_rank_is_cut() -> None:
    """q_a -> q_b would do as well, but not beside q_b, kv_b -> out, which is more."""
    group = only(LowRank())
    assert (group.row, group.columns) == ("out.weight", ("q_b.weight", "kv_b.weight"))


def test_what_also_leaves_the_block_is_no_column() -> None:
    assert groups_of(Residuals()) == ()


def test_an_output_that_somebody_reads_keeps_its_layer_whole() -> None:
    assert [group.row for group in groups_of(Perceptron(), used=[0])] == ["down.weight"]
    assert groups_of(Perceptron(), used=[0, 1]) == ()
    assert groups_of(Perceptron()) == ()


def test_widths_that_the_ranks_do_not_divide_are_in_no_group() -> None:
    assert groups_of(Perceptron(), 5, used=[0]) == () and patterns_of(Perceptron()).width("down.weight") == 24
    assert groups_of(Thirds(), 3) == ()


def test_parameters_that_are_cut_otherwise_are_left_alone() -> None:
    assert groups_of(Perceptron(), used=[0], others=["down.weight"]) == ()
    assert groups_of(Perceptron(), used=[0], others=["up.weight"]) == ()


def test_more_ranks_than_heads_share_queries_and_keys() -> None:
    group = only(Thirds(), 2 * HEADS)
    assert rows(group, "qkv.weight", 8)[1] == [*range(4), *range(16, 20), 34, 35]


class NormedKeys(nn.Module):
    """A norm of keys has a bias, whose gradient is zero but for rounding: softmax ignores it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.perceptron = nn.LayerNorm(HEAD), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        heads = functional.scaled_dot_product_attention(q, self.norm(k), v)
        out: Tensor = self.perceptron(x + self.out(heads.transpose(1, 2).flatten(2)))
        return out


def test_a_rounding_error_that_is_exactly_zero_is_no_pattern() -> None:
    for seed in range(10):
        found = groups_of(NormedKeys(), 2, seed=seed)
        assert found and all("norm.bias" not in group.cuts and "norm.weight" not in group.cuts for group in found)


class Routed(nn.Module):
    """A router and a layer on views of one normed stream, and a layer on another order of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router, self.up, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        rows = h.view(-1, WIDTH)
        out: Tensor = h * self.router(rows).sigmoid().view_as(h) + self.up(h) + self.other(h.flip(0))
        return out


def test_views_of_one_input_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns, tried = patterns_of(Routed()), list[int]()
    draw = NeededRows._draw

    def noted(self: NeededRows, inputs: Sequence[SharedInput], rank: int, tp: int) -> dict[str, tuple[Tensor, ...]]:
        tried.append(rank)
        return draw(self, inputs, rank, tp)

    monkeypatch.setattr(NeededRows, "_draw", noted)
    with exactly():
        patterns.groups(4)
    assert tried == 3 * [*range(4)]  # of the first layer, of the router and the layer beside it, of the flipped one
