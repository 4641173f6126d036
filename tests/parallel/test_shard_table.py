"""The shard table: one row per logical parameter, whatever shares, freezes or cuts it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.parallel.experts.forms import expert_bounds, expert_cut, owner_cut
from engine.parallel.grid import ShardHolder as At
from engine.parallel.shard_table import Division, Range, ShardRow, ShardTable, build_table


class Odd(nn.Module):
    """A tied pair, a frozen parameter, a scalar, an empty and a half-precision parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.head
        self.norm.bias.requires_grad_(False)


@pytest.fixture
def table() -> ShardTable:
    return build_table(Odd(), {"embed.weight": 2, "scale": 1})


def row(table: ShardTable, name: str) -> ShardRow:
    return next(row for row in table if row.name == name)


def test_rows_are_the_parameters_in_model_order(table: ShardTable) -> None:
    assert [row.name for row in table] == [name for name, _ in Odd().named_parameters()]
    assert [row.name for row in table] == ["scale", "empty", "embed.weight", "norm.weight", "norm.bias"]


def test_a_tied_parameter_is_one_row_with_all_its_other_names(table: ShardTable) -> None:
    assert row(table, "embed.weight").aliases == ("head.weight", "again.weight")
    assert row(table, "norm.weight").aliases == ()
    assert table.elements == 1 + 21 + 3 + 3 + 0


def test_a_row_tells_shape_dtype_group_and_whether_it_is_trained(table: ShardTable) -> None:
    assert row(table, "embed.weight").shape == (7, 3) and row(table, "embed.weight").group == 2
    assert row(table, "scale").shape == () and row(table, "scale").group == 1
    assert row(table, "empty").elements == 0 and row(table, "scale").elements == 1
    assert row(table, "norm.weight").dtype == torch.bfloat16 and row(table, "norm.weight").group == 0
    assert [row.name for row in table if not row.trainable] == ["norm.bias"]


def test_the_meta_device_gives_the_same_table(table: ShardTable) -> None:
    with torch.device("meta"):
        assert build_table(Odd(), {"embed.weight": 2, "scale": 1}) == table


@pytest.mark.parametrize("tp", [1, 3])
def test_an_uncut_row_is_one_range_that_every_tensor_rank_holds(tp: int) -> None:
    table = build_table(Odd(), {}, Division(tp))
    holders = tuple(range(tp))
    assert row(table, "embed.weight").ranges == (Range(0, 7, holders),)
    assert row(table, "scale").ranges == (Range(0, 1, holders),)
    assert row(table, "empty").ranges == (Range(0, 0, holders),)
    assert all(row.local_shape(At(0, rank)) == row.shape for row in table for rank in range(tp))


def test_rows_of_a_stage_are_those_it_owns_and_a_tie_is_on_several(table: ShardTable) -> None:
    assert table.held_by(At(0)) == table.rows and table.held_by(At(1)) == ()
    first, tied, last = cut("a", (0,)), cut("b", (0, 2)), cut("c", (2,))
    staged = ShardTable((first, tied, last))
    assert staged.held_by(At(0)) == (first, tied)
    assert staged.held_by(At(1)) == ()
    assert staged.held_by(At(2)) == (tied, last)
    assert staged.elements == 3 * 8 * 6


def cut(name: str, owners: tuple[int, ...], dim: int | None = 0, *ranges: Range) -> ShardRow:
    """A row of shape (8, 6) that the tensor axis cuts along ``dim``."""
    held = ranges or (Range(0, 8, (0,)),)
    shared = any(len(part.holders) > 1 for part in held)
    return ShardRow(name, (), (8, 6), torch.float32, owners, dim, held, shared, False, True, 0)


def test_a_cut_row_has_its_part_on_each_rank() -> None:
    by_rows = cut("w", (0,), 0, Range(0, 4, (0,)), Range(4, 8, (1,)))
    assert [by_rows.local_shape(At(0, tp)) for tp in (0, 1)] == [(4, 6), (4, 6)]
    by_columns = cut("w", (0,), 1, Range(0, 1, (0,)), Range(1, 6, (1,)))
    assert [by_columns.local_shape(At(0, tp)) for tp in (0, 1)] == [(8, 1), (8, 5)]


def test_a_shared_kv_head_is_whole_on_each_of_its_holders() -> None:
    shared = cut("k", (0,), 0, Range(0, 4, (0, 1)), Range(4, 8, (2, 3)))
    assert [shared.local_shape(At(0, tp)) for tp in range(4)] == [(4, 6)] * 4
    held = sum(len(part.holders) * (part.stop - part.start) for part in shared.ranges)
    assert held == 2 * 8 and shared.elements == 48


def test_a_fused_projection_is_several_ranges_of_one_rank() -> None:
    fused = cut("qkv", (0,), 0, *(Range(2 * i, 2 * i + 2, (i % 2,)) for i in range(4)))
    assert [fused.local_shape(At(0, tp)) for tp in (0, 1)] == [(4, 6), (4, 6)]


def test_a_rank_without_a_part_holds_nothing() -> None:
    assert cut("w", (0,), 0, Range(0, 8, (0,))).local_shape(At(0, 1)) == (0, 6)


def test_exactly_one_copy_of_every_element_is_counted() -> None:
    tied = cut("e", (0, 3), 0, Range(0, 4, (0,)), Range(4, 8, (1,)))
    assert [(stage, tp) for stage in (0, 3) for tp in (0, 1) if tied.counted(At(stage, tp))] == [
        (0, 0),
        (0, 1),
    ]
    shared = cut("k", (1,), 0, Range(0, 4, (0, 1)), Range(4, 8, (2, 3)))
    assert [tp for tp in range(4) if shared.counted(At(1, tp))] == [0, 2] and shared.partial


def test_shared_rows_beside_own_ones_are_counted_once() -> None:
    """Multi-query attention in one layer: queries cut, the key held by both."""
    mixed = Range(0, 2, (0,)), Range(2, 4, (1,)), Range(4, 8, (0, 1))
    by_rows, by_columns = cut("qkv", (0,), 0, *mixed), cut("qkv", (0,), 1, *mixed[:2], Range(4, 6, (0, 1)))
    assert [by_rows.counted(At(0, tp)) for tp in (0, 1)] == [True, True]
    assert by_rows.copies(At(0, 0)) == () and by_rows.copies(At(0, 1)) == ((2 * 6, 6 * 6),)
    assert by_columns.copies(At(0, 1)) == tuple((4 * row + 2, 4 * row + 4) for row in range(8))
    assert cut("k", (0,), 0, Range(0, 8, (0, 1))).copies(At(0, 1)) == ()  # not counted at all


def test_a_row_that_holds_no_copies_is_not_walked_through() -> None:
    by_columns = replace(cut("experts", (0,), 1, Range(0, 3, (0,)), Range(3, 6, (1,))), shape=(2**50, 6))
    assert by_columns.copies(At(0, 0)) == by_columns.copies(At(0, 1)) == ()


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (5, 2), (7, 3)])
@pytest.mark.parametrize("stacked", [True, False])
def test_each_expert_is_held_by_one_expert_rank_and_counted_once(experts: int, ranks: int, stacked: bool) -> None:
    """Over expert, tensor and pipeline ranks, stacked in one parameter or each in its own, sharded unevenly too."""
    model, sizes = nn.ParameterDict({"norm": nn.Parameter(torch.ones(3))}), expert_bounds(experts, ranks)
    if stacked:
        model["up"] = nn.Parameter(torch.ones(experts, 4, 3))
        cuts = {"up": expert_cut(experts, ranks)}
    else:
        model.update({f"up{number}": nn.Parameter(torch.ones(4, 3)) for number in range(experts)})
        owners = {number: rank for rank in range(ranks) for number in range(sizes[rank], sizes[rank + 1])}
        cuts = {f"up{number}": owner_cut(4, rank) for number, rank in owners.items()}
    table = build_table(model, {}, Division(2, experts=cuts, owners={name: (1,) for name in cuts}))
    holders = [At(pp, tp, ep) for pp in range(2) for tp in range(2) for ep in range(ranks)]
    for ep in range(ranks):
        here = At(1, 1, ep)
        held = [each for each in table.held_by(here) if each.name != "norm"]
        assert sum(each.local_elements(here) for each in held) == 12 * (sizes[ep + 1] - sizes[ep])
        assert not [each for each in table.held_by(At(0, 0, ep)) if each.name != "norm"], "another stage"
    for each in table:
        counting = [at for at in holders if each.held(at) and each.counted(at)]
        assert sum(each.local_elements(at) for at in counting if each.experts) in (0, each.elements)
        assert all(at.tp == 0 for at in counting) and each.equal_on_tensor_ranks
        assert bool(each.experts) == (each.name in cuts) and not each.partial


def test_gradients_of_stacked_experts_are_partial_where_tensor_ranks_divide_the_rows() -> None:
    model = nn.ParameterDict({"up": nn.Parameter(torch.ones(4, 2, 3))})
    (found,) = build_table(model, {}, Division(2, experts={"up": expert_cut(4, 2)}, partial={"up"}))
    assert found.partial and found.experts and not found.copies(At(0, 0)) and found.local_shape(At(ep=1)) == (2, 2, 3)


def test_the_grid_divides_what_it_names_and_nothing_else() -> None:
    half = cut("x", (0,), 0, Range(0, 4, (0,)), Range(4, 7, (1,)))
    division = Division(
        2, {"embed.weight": half}, partial={"norm.weight"}, owners={"embed.weight": (0, 1), "scale": (1,)},
        in_glue={"scale"},
    )  # fmt: skip
    table = build_table(Odd(), {}, division)
    embed, scale, norm = (row(table, name) for name in ("embed.weight", "scale", "norm.weight"))
    assert embed.owners == (0, 1) and embed.dim == 0 and embed.ranges == half.ranges and not embed.partial
    assert scale.owners == (1,) and scale.in_glue and scale.dim is None
    assert norm.owners == (0,) and norm.partial and not norm.counted(At(0, 1)) and norm.counted(At(0, 0))
    assert table.held_by(At(1)) == (scale, embed)
