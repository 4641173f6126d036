"""A tensor plan as data: what is cut, and which part of it each tensor rank holds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal

from engine.parallel.shard_table import Range
from engine.parallel.tensor.plan.ranges import held

LayerKind = Literal["column", "column+gather", "row", "embedding", "head", "experts"]


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """How one parameter lies on the tensor ranks; a rank holds its ranges in their order, one behind the other."""

    dim: int
    ranges: tuple[Range, ...]
    """Together they cover the dim once. A range with several holders (a shared kv head) has a gradient that is a
    part on each of them."""

    def widths(self, tp: int) -> tuple[int, ...]:
        """Rows that each rank holds."""
        return tuple(held(self.ranges, index) for index in range(tp))


@dataclass(frozen=True, slots=True)
class LayerCut:
    """One layer that is cut."""

    name: str
    kind: LayerKind
    region: str
    """The module in which its column layers and its row layer lie; empty for embeddings and heads."""


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """A whole number that a module computes with, as every tensor rank has to see it."""

    module: str
    attribute: str
    """With the prefix "config." one of the module's config, which gets a copy of its own."""
    value: int


@dataclass(frozen=True, slots=True)
class Reason:
    """One line of the table of a plan."""

    pattern: str
    style: str
    how: str
    """How the code runs on its part: local, local+ (with changed attributes), view, replicate."""
    why: str
    bytes: int = 0
    """Of parameters that every rank holds and could have been cut, all layers of the pattern together."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Everything that :func:`engine.parallel.tensor.layers.apply_plan.apply_plan` does."""

    layers: Mapping[str, LayerCut]
    """By module name."""
    parameters: Mapping[str, ParameterCut]
    """By first name in ``model.named_parameters()``; what is not here is whole on every rank."""
    attributes: tuple[AttributeChange, ...]
    partial: frozenset[str]
    """Whole parameters whose gradient is a part on each tensor rank: their sum over "tp" is the gradient."""
    source: str
    """Where the plan comes from: found, a file, the configuration."""
    shown: frozenset[str] = frozenset()
    """Parameters that code sees as views, with the whole shape."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """The styles that it is made from: what ``parallel.tensor_plan`` would say."""
    reasons: tuple[Reason, ...] = ()
    """Of a plan that was found: what was decided, and why."""
    sequence: bool = False
    """Whether activations between regions are cut along the sequence."""
    regather: bool = False
    """Whether what a region gathers is gathered again in backward, and not kept."""
    equal: frozenset[str] = frozenset()
    """Whole parameters that meet cut and whole activations: their gradient is summed at each use of the former."""

    beside: frozenset[str] = frozenset()
    """Of ``partial``, those that were not seen to meet whole activations, where their gradient would be wrong."""
    notes: tuple[str, ...] = ()
    """What the search or the proof had to leave out, a sentence each."""

    def write(self, path: str | PathLike[str]) -> None:
        """Write the styles as JSON: ``parallel.tensor_plan`` takes the path, and no search is needed."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dict(self.patterns), file, indent=2)
            file.write("\n")

    @property
    def follows_activations(self) -> bool:
        """Whether views may come between modules, so that a look at the model has to say which parameters they meet."""
        return self.sequence or bool(self.shown)
