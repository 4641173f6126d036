"""Carry a tensor plan out on a model, and put the parts of a parameter together again."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.cuts import Kind, LayerCut, ParameterCut, TensorPlan
from engine.parallel.tensor.layers import (
    ColumnLayer,
    ColumnLinear,
    RowLayer,
    RowLinear,
    local_rows,
    prepare_column,
    prepare_row,
)
from engine.parallel.tensor.logit_slice import Vocabulary
from engine.parallel.tensor.region import Region
from engine.parallel.tensor.vocabulary import (
    EmbeddingLayer,
    HeadLayer,
    VocabularyEmbedding,
    VocabularyHead,
    prepare_embedding,
    prepare_head,
)


def local_part(full: Tensor, cut: ParameterCut, index: int) -> Tensor:
    """What tensor rank ``index`` holds of ``full``: a new contiguous tensor. Inverse: :func:`assemble`."""
    return local_rows(full, cut.dim, cut.ranges, index)


def assemble(parts: Sequence[Tensor], cut: ParameterCut) -> Tensor:
    """The full tensor from every rank's part, in rank order; of a shared range the first holder's is taken."""
    taken = [0] * len(parts)
    pieces: dict[int, Tensor] = {}
    for piece in cut.ranges:
        rows = piece.stop - piece.start
        for holder in piece.holders:
            if holder == piece.holders[0]:
                pieces[piece.start] = parts[holder].narrow(cut.dim, taken[holder], rows)
            taken[holder] += rows
    return torch.cat([pieces[start] for start in sorted(pieces)], cut.dim)


def install(model: nn.Module, plan: TensorPlan, axis: TensorAxis, already_cut: Collection[str] = ()) -> None:
    """Cut ``model`` in place to what this rank holds of it. Nothing is communicated.

    Parameter objects stay and get new, smaller data, so that ties, optimizers and hooks hold; state-dict names
    stay too. Works on the meta device. ``already_cut``: parameters that hold their part.
    """
    parameters = dict(model.named_parameters())
    for name, cut in plan.parameters.items():
        if name not in already_cut:
            parameters[name].data = local_part(parameters[name].data, cut, axis.index)
    modules = dict(model.named_modules())
    for change in plan.attributes:
        setattr(modules[change.module], change.attribute, change.value)
    _Installer(model, plan, axis).layers(modules)


class _Installer:
    def __init__(self, model: nn.Module, plan: TensorPlan, axis: TensorAxis) -> None:
        self.plan, self.axis = plan, axis
        self.first = {id(p): name for name, p in model.named_parameters()}
        self.regions: dict[str, Region] = {}
        self.classes: dict[tuple[Kind, type], type] = {}

    def layers(self, modules: dict[str, nn.Module]) -> None:
        for name, cut in self.plan.layers.items():
            self._swap(modules[name], cut.kind)
            self._prepare(modules[name], cut)

    def _prepare(self, module: nn.Module, cut: LayerCut) -> None:
        if cut.kind == "column":
            prepare_column(module, self._region(cut))
        elif cut.kind == "row":
            prepare_row(module, self._region(cut))
        else:
            weight: Any = module.weight
            widths = self.plan.parameters[self.first[id(weight)]].widths(self.axis.size)
            vocabulary = Vocabulary(self.axis, widths)
            prepare: Callable[..., None] = prepare_embedding if cut.kind == "embedding" else prepare_head
            prepare(module, vocabulary)

    def _region(self, cut: LayerCut) -> Region:
        return self.regions.setdefault(cut.region, Region(self.axis))

    def _swap(self, module: nn.Module, kind: Kind) -> None:
        """Make the module's class one of ours and its own. A plain library layer becomes our public class."""
        own = type(module)
        layer, public, library = _CLASSES[kind]
        if (kind, own) not in self.classes:
            made = public if own is library else type(f"{layer.__name__}{own.__name__}", (layer, own), {})
            self.classes[kind, own] = made
        module.__class__ = self.classes[kind, own]


_CLASSES: Mapping[Kind, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = MappingProxyType(
    {
        "column": (ColumnLayer, ColumnLinear, nn.Linear),
        "row": (RowLayer, RowLinear, nn.Linear),
        "embedding": (EmbeddingLayer, VocabularyEmbedding, nn.Embedding),
        "head": (HeadLayer, VocabularyHead, nn.Linear),
    }
)
"""(what is mixed in, the public class, the library class that it replaces)."""
