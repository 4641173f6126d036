"""Which modules are units and blocks."""

from typing import Any

from torch import nn

from engine.parallel.model.blocks import find_units, open_units
from tests.parallel.pipeline.zoo import Own, albert, t5
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


def test_mixed_takes_every_sequential_for_a_chain() -> None:
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
