"""Tensor plan as data: the sharded layers and parameters, and the shard of each tensor rank."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Literal

from engine.parallel.model.name_patterns import is_inside
from engine.parallel.shard_table import Range
from engine.parallel.tensor.plan.ranges import held

LayerKind = Literal["column", "column+gather", "row", "embedding", "head", "experts"]


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """Sharding of one parameter along ``dim`` over the tensor ranks. A rank's shard is the concatenation of the
    ``ranges`` assigned to this rank.
    """

    dim: int
    ranges: tuple[Range, ...]
    """Ranges that cover the dim once; a range on several ranks has a partial gradient on each of them."""

    def widths(self, tp: int) -> tuple[int, ...]:
        """Returns the number of rows along ``dim`` that each of ``tp`` ranks stores, in rank order."""
        return tuple(held(self.ranges, index) for index in range(tp))


@dataclass(frozen=True, slots=True)
class LayerCut:
    """Entry of a tensor plan for one sharded layer: its kind, and its parallel region (the innermost module around a
    group of column and row layers).
    """

    name: str
    kind: LayerKind
    region: str
    """Innermost module with the region's column layers and row layer; empty for embeddings and heads."""
    around: str = ""
    """PEFT layer around this one, whose low-rank pairs compute in the region; empty without."""


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """Integer attribute of a module, such as its number of heads, with the value to set on every tensor rank."""

    module: str
    attribute: str
    """Name of the attribute; the prefix "config." refers to the module's own copy of its config."""
    value: int


@dataclass(frozen=True, slots=True)
class Reason:
    """Row of a table about the automatic search for a tensor plan: the choice, to shard or to replicate, for all layers
    that match ``pattern``, and the reason for it.
    """

    pattern: str
    style: str
    how: str
    """Strategy: local, local+ (with changed attributes), view, or replicate."""
    why: str
    bytes: int = 0
    """Bytes of shardable parameters that stay replicated, summed over all layers of the pattern."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Plan that shards a model over the tensor ranks. ``layers.apply_plan.apply_plan`` applies it to a model."""

    layers: Mapping[str, LayerCut]
    """Sharded layers by module name."""
    parameters: Mapping[str, ParameterCut]
    """Sharding of each sharded parameter, by its first name in ``model.named_parameters()``; all others are
    replicated.
    """
    attributes: tuple[AttributeChange, ...]
    partial: frozenset[str]
    """Replicated parameters with a partial gradient on each tensor rank, which is summed over "tp"."""
    source: str
    """Source of the plan: the search, a file, or the configuration."""
    shown: frozenset[str] = frozenset()
    """Names of parameters that code reads as global tensors of the full shape."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """Styles of the plan by name pattern, as in ``parallel.tensor_plan``."""
    reasons: tuple[Reason, ...] = ()
    """Table of a plan that the search has found."""
    sequence: bool = False
    """True if activations between regions are sharded along the sequence (sequence parallelism)."""
    regather: bool = False
    """True if backward gathers the input of a region again, so that the gathered input is not stored."""
    equal: frozenset[str] = frozenset()
    """Replicated parameters used with both sharded and full activations; each sharded use all-reduces the gradient."""

    beside: frozenset[str] = frozenset()
    """Parameters of ``partial`` that met sharded activations only; use on full activations would make the gradient
    wrong.
    """
    notes: tuple[str, ...] = ()
    """One sentence for each limit of the search that applied."""

    def without(self, modules: Collection[str]) -> "TensorPlan":
        """Returns a copy of this plan in which ``modules`` and all of their submodules are replicated."""

        def outside(name: str) -> bool:
            return not any(is_inside(name, module) for module in modules)

        return replace(
            self,
            layers={name: cut for name, cut in self.layers.items() if outside(name)},
            parameters={name: cut for name, cut in self.parameters.items() if outside(name)},
            attributes=tuple(change for change in self.attributes if outside(change.module)),
            partial=frozenset(filter(outside, self.partial)),
            shown=frozenset(filter(outside, self.shown)),
            equal=frozenset(filter(outside, self.equal)),
            beside=frozenset(filter(outside, self.beside)),
        )

    def with_summed(self, modules: Collection[str]) -> "TensorPlan":
        """Returns a copy of this plan in which ``modules`` run unchanged on sharded parameters, and their outputs are
        summed over "tp" (style "experts").
        """
        plain = self.without(modules)
        return replace(
            plain,
            layers={**plain.layers, **{name: LayerCut(name, "experts", "") for name in modules}},
            parameters=self.parameters,
            attributes=self.attributes,
        )

    def write(self, path: str | PathLike[str]) -> None:
        """Writes the styles of this plan to the JSON file ``path``, a valid value of ``parallel.tensor_plan``."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dict(self.patterns), file, indent=2)
            file.write("\n")

    @property
    def communicating(self) -> tuple[str, ...]:
        """Names of the modules that run collectives in their forward."""
        return tuple(cut.around or name for name, cut in self.layers.items())

    @property
    def follows_activations(self) -> bool:
        """True if global (DTensor-like) tensors may pass between modules: with sequence parallelism, or if code reads
        sharded parameters as global tensors (style "view").
        """
        return self.sequence or bool(self.shown)
