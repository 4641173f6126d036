"""A tensor plan as data: what is sharded, and which shard each tensor rank holds."""

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
    """How one parameter lies on the tensor ranks; a rank's shard is its ranges, concatenated in order."""

    dim: int
    ranges: tuple[Range, ...]
    """The ranges, which together cover the dim once. A range with several holders (a shared kv head) has a partial
    gradient on each of them."""

    def widths(self, tp: int) -> tuple[int, ...]:
        """The number of rows that each rank holds."""
        return tuple(held(self.ranges, index) for index in range(tp))


@dataclass(frozen=True, slots=True)
class LayerCut:
    """One sharded layer."""

    name: str
    kind: LayerKind
    region: str
    """The innermost module around its column layers and its row layer; empty for embeddings and heads."""


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """A whole number that a module computes with, and its value on every tensor rank."""

    module: str
    attribute: str
    """The attribute's name; the prefix "config." means the module's config, of which the module gets its own copy."""
    value: int


@dataclass(frozen=True, slots=True)
class Reason:
    """One line of a plan's table: what was decided for a group of layers, and why."""

    pattern: str
    style: str
    how: str
    """How the code runs on its shard: local, local+ (with changed attributes), view, or replicate."""
    why: str
    bytes: int = 0
    """Bytes of replicated parameters that could have been sharded, summed over all layers of the pattern."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The input of :func:`engine.parallel.tensor.layers.apply_plan.apply_plan`."""

    layers: Mapping[str, LayerCut]
    """Sharded layers by module name."""
    parameters: Mapping[str, ParameterCut]
    """Sharded parameters by their first name in ``model.named_parameters()``; all others are replicated."""
    attributes: tuple[AttributeChange, ...]
    partial: frozenset[str]
    """Replicated parameters with a partial gradient on each tensor rank: the gradient is the sum over "tp"."""
    source: str
    """Where the plan comes from: the search, a file, or the configuration."""
    shown: frozenset[str] = frozenset()
    """Parameters that code sees as global tensors, with the full shape."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """The styles that the plan is made from, as ``parallel.tensor_plan`` would contain them."""
    reasons: tuple[Reason, ...] = ()
    """The table of a plan that was found by search."""
    sequence: bool = False
    """Whether activations between regions are sharded along the sequence (sequence parallelism)."""
    regather: bool = False
    """Whether the gathered input of a region is gathered again in backward, and not kept."""
    equal: frozenset[str] = frozenset()
    """Replicated parameters that meet sharded and full activations: their gradient is summed at each sharded use."""

    beside: frozenset[str] = frozenset()
    """Those of ``partial`` that met sharded activations only; on full activations their gradient would be wrong."""
    notes: tuple[str, ...] = ()
    """One sentence for each thing that the search had to leave out."""

    def write(self, path: str | PathLike[str]) -> None:
        """Write the styles as a JSON file that ``parallel.tensor_plan`` can name, so that no search is needed."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dict(self.patterns), file, indent=2)
            file.write("\n")

    @property
    def follows_activations(self) -> bool:
        """Whether global tensors may pass between modules, so that only a trace says which parameters they meet."""
        return self.sequence or bool(self.shown)
