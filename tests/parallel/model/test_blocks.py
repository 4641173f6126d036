"""Which modules are units and blocks."""

from typing import Any

from torch import nn

from engine.parallel.model.blocks import find_units, open_around, open_units
from tests.parallel.pipeline.zoo import Block, Hybrid, HybridExperts, HybridSequential, MixerBlock, Own, albert, t5
from tests.parallel.pipeline.zoo_wide import WIDE


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def test_outermost_modules_and_the_elements_of_chains() -> None:
    units = find_units(Own(layers=2))
    assert list(units.modules) == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert units.blocks == ("blocks.0", "blocks.1")


def test_a_sequential_of_different_classes_is_one_unit() -> None:
    model = nn.ModuleDict(
        {"mixed": nn.Sequential(linear(), nn.LayerNorm(2)), "chain": nn.Sequential(linear(), linear())}
    )
    units = find_units(model)
    assert list(units.modules) == ["mixed", "chain.0", "chain.1"]
    assert units.blocks == ("chain.0", "chain.1")


def test_a_list_of_blocks_of_several_classes_is_a_chain() -> None:
    for model in (Hybrid(layers=4), HybridExperts(layers=4)):
        units = find_units(model)
        assert list(units.modules) == ["embed", *(f"blocks.{index}" for index in range(4)), "norm", "head"]
        assert units.blocks == tuple(f"blocks.{index}" for index in range(4))


def test_single_layers_beside_blocks_are_units_but_no_blocks() -> None:
    units = find_units(HybridSequential())
    assert list(units.modules) == [f"inner.{index}" for index in range(7)]
    assert units.blocks == ("inner.1", "inner.2", "inner.3", "inner.4")


def test_what_holds_the_blocks_is_no_block_beside_others() -> None:
    model = nn.Sequential(Block(), Own(layers=2), Block())
    assert find_units(model).blocks == ("1.blocks.0", "1.blocks.1")
    stages = nn.Sequential(Block(), nn.Sequential(MixerBlock(), MixerBlock()), nn.Sequential(Block(), Block()))
    assert find_units(stages).blocks == ("1.0", "1.1", "2.0", "2.1")


def test_modules_without_parameters_are_glue() -> None:
    chain = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU())
    assert list(find_units(nn.ModuleDict({"chain": chain})).modules) == ["chain.0", "chain.2"]


def test_one_element_may_be_called_many_times() -> None:
    assert find_units(albert()).blocks == ("albert.encoder.albert_layer_groups.0",)


def test_two_chains_join() -> None:
    blocks = find_units(t5()).blocks
    assert [name.split(".")[0] for name in blocks] == ["encoder"] * 4 + ["decoder"] * 4


def test_a_module_that_is_reached_twice_is_one_unit() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = linear()
            self.again = self.first
            shared = linear()
            self.chain = nn.ModuleList([shared, shared, linear()])

    units = find_units(Twice())
    assert list(units.modules) == ["first", "chain.0", "chain.2"]


def test_deep_looks_for_chains_inside_chains() -> None:
    swin: Any = WIDE["swin"].build()
    assert [name for name in find_units(swin).blocks if "blocks" in name] == []
    assert [name for name in find_units(swin, deep=True).blocks if "blocks" in name] == [
        f"swin.encoder.layers.{layer}.blocks.{block}" for layer in range(2) for block in range(2)
    ]


def test_mixed_takes_every_list_for_a_chain() -> None:
    layers = nn.ModuleDict({"list": nn.ModuleList([linear(), nn.LayerNorm(2)])})
    assert find_units(layers).blocks == () and find_units(layers, mixed=True).blocks == ("list.0", "list.1")

    model = nn.ModuleDict(
        {"mixed": nn.Sequential(linear(), nn.ReLU(), nn.LayerNorm(2)), "one": nn.Sequential(linear())}
    )
    assert list(find_units(model, deep=True).modules) == ["mixed", "one"]
    units = find_units(model, deep=True, mixed=True)
    assert list(units.modules) == ["mixed.0", "mixed.2", "one"] and units.blocks == ("mixed.0", "mixed.2")


def test_opening_puts_the_children_in_place() -> None:
    units = open_units(find_units(Own(layers=2)), ["blocks.0"])
    assert list(units.modules) == ["embed", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.1", "norm", "head"]
    assert units.blocks == ("blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.1")


def test_units_are_opened_around_a_module() -> None:
    model = nn.ModuleDict({"inner": nn.ModuleDict({"own": Own(layers=2), "norm": nn.LayerNorm(2)})})
    units = open_around(find_units(model), ["inner.own.blocks.0.down", "inner.own.blocks.9", "other", "inner.norm.x"])
    inside = [f"inner.own.blocks.0.{part}" for part in ("norm", "up", "down")]
    rest = ["inner.own.blocks.1", "inner.own.norm", "inner.own.head", "inner.norm"]
    assert list(units.modules) == ["inner.own.embed", *inside, *rest]
    assert units.whole_blocks == ("inner.own.blocks.0", "inner.own.blocks.1")
    alone = nn.ModuleDict({"wrapped": nn.ModuleDict({"one": nn.Sequential(linear(), nn.LayerNorm(2))})})
    assert list(open_around(find_units(alone), ["wrapped.one.1"]).modules) == ["wrapped.one.0", "wrapped.one.1"]
