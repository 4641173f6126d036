"""Carry a tensor plan out on a model, and put the parts of a parameter together again.

Parameters that a module's code sees as views: with the whole shape, while this rank holds a part.

The parameter stays where it is registered, so that optimizers, hooks and checkpoints find it. What the code reads
as ``self.weight`` is made anew at each reading, since ZeRO-3 swaps the memory of a parameter between uses.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.placeholders import placeholder
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, show_parameter
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.layers.linear import (
    ColumnLayer,
    ColumnLinear,
    ExpertsLayer,
    GatheredColumnLayer,
    GatheredColumnLinear,
    RowLayer,
    RowLinear,
    local_rows,
    prepare_column,
    prepare_experts,
    prepare_gathered,
    prepare_row,
)
from engine.parallel.tensor.layers.parallel_region import Region
from engine.parallel.tensor.layers.vocab_parallel import (
    EmbeddingLayer,
    HeadLayer,
    VocabularyEmbedding,
    VocabularyHead,
    prepare_embedding,
    prepare_head,
)
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.plan.tensor_plan import AttributeChange, LayerCut, LayerKind, ParameterCut, TensorPlan
from engine.parallel.tensor.tp_axis import TensorAxis

_CONFIG = "config."


def local_shard(full: Tensor, cut: ParameterCut, index: int) -> Tensor:
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


def apply_plan(
    model: nn.Module, plan: TensorPlan, axis: TensorAxis, patches: ForwardPatches, already_cut: Collection[str] = ()
) -> GlobalTensorContext:
    """Cut ``model`` in place to what this rank holds of it. Nothing is communicated.

    Parameter objects stay and get new, smaller data, so that ties, optimizers and hooks hold; state-dict names
    stay too. Works on the meta device. ``already_cut``: parameters that hold their part.
    """
    parameters = dict(model.named_parameters())
    installer = _Installer(model, plan, axis, patches)
    for name, cut in plan.parameters.items():
        if name not in already_cut:
            parameters[name].data = local_shard(parameters[name].data, cut, axis.index)
    return installer.install(parameters)


def apply_shapes(model: nn.Module, plan: TensorPlan, axis: TensorAxis, patches: ForwardPatches) -> GlobalTensorContext:
    """The same without content, for a run on shapes: no memory is taken, and ``patches`` put the weights back too."""

    def blank(name: str, full: Tensor, cut: ParameterCut) -> Tensor:
        shape = list(full.shape)
        shape[cut.dim] = cut.widths(axis.size)[axis.index]
        return placeholder(shape, full.dtype, full.device)

    parameters = dict(model.named_parameters())
    installer = _Installer(model, plan, axis, patches)
    for name, cut in plan.parameters.items():
        parameter, full = parameters[name], parameters[name].data
        patches.own(model, PatchLayer.TENSOR, partial(setattr, parameter, "data", full), f"holds a shard of {name}")
        parameter.data = blank(name, full, cut)
    return installer.install(parameters)


def _whole_shape(parameter: Tensor, cut: ParameterCut) -> tuple[int, ...]:
    """Also of one that holds its part already."""
    shape = list(parameter.shape)
    shape[cut.dim] = max(piece.stop for piece in cut.ranges)
    return tuple(shape)


class _Installer:
    def __init__(self, model: nn.Module, plan: TensorPlan, axis: TensorAxis, patches: ForwardPatches) -> None:
        self.plan, self.axis, self.patches = plan, axis, patches
        self.context = global_context(axis, plan.sequence, plan.regather)
        self.modules = dict(model.named_modules())
        self.first = {id(p): name for name, p in model.named_parameters()}
        self.regions: dict[str, Region] = {}
        self.classes: dict[tuple[LayerKind, type], type] = {}
        self.own_configs: set[str] = set()

    def install(self, parameters: Mapping[str, nn.Parameter]) -> GlobalTensorContext:
        """Everything but the content of parameters, which are full or hold their shard."""
        self.context.equal.update(parameters[name] for name in self.plan.equal)
        self.show(parameters)
        for change in self.plan.attributes:
            self.change(change)
        self.wrap_layers()
        return self.context

    def change(self, change: AttributeChange) -> None:
        module, attribute = self.modules[change.module], change.attribute
        note = f"computes with {attribute} {change.value} on each tensor rank"
        with self.patches.changing(module, PatchLayer.TENSOR, note):
            owner: Any = module
            if attribute.startswith(_CONFIG):
                if change.module not in self.own_configs:
                    self.own_configs.add(change.module)
                    module.config = copy(module.config)
                owner, attribute = module.config, attribute.removeprefix(_CONFIG)
            setattr(owner, attribute, change.value)

    def show(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let code see the parameters that a plan shows as views."""
        wholes = {id(parameters[name]): name for name in self.plan.shown}
        parents: dict[int, nn.Module] = {}
        for path, module in self.modules.items():
            cuts = {
                local: (cut, _whole_shape(p, cut))
                for local, p in module.named_parameters(recurse=False)
                if id(p) in wholes
                for cut in [self.plan.parameters[wholes[id(p)]]]
            }
            if cuts:
                note = f"reads {', '.join(cuts)} as global tensors, of which each tensor rank holds a shard"
                with self.patches.changing(module, PatchLayer.TENSOR, note):
                    module.__class__ = shown_class(type(module), cuts, self.context)
                parent = self.modules[path.rpartition(".")[0]]
                parents[id(parent)] = parent
        for parent in parents.values():
            handle = parent.register_forward_hook(lambda *_: self.context.clear())
            self.patches.hook(parent, PatchLayer.TENSOR, handle, "forgets its global tensors at the end of its forward")

    def wrap_layers(self) -> None:
        for name, cut in self.plan.layers.items():
            module = self.modules[name]
            with self.patches.changing(module, PatchLayer.TENSOR, f"is sharded over axis tp: {cut.kind}"):
                self._swap(module, cut.kind)
                self._prepare(module, cut)

    def _prepare(self, module: nn.Module, cut: LayerCut) -> None:
        if cut.kind == "column":
            prepare_column(module, self._region(cut))
        elif cut.kind == "row":
            prepare_row(module, self._region(cut))
        elif cut.kind == "experts":
            prepare_experts(module, Region(self.axis, self.context))
        else:
            weight: Any = module.weight
            widths = self.plan.parameters[self.first[id(weight)]].widths(self.axis.size)
            if cut.kind == "column+gather":
                prepare_column(module, Region(self.axis, self.context))
                prepare_gathered(module, widths)
                return
            vocabulary = Vocabulary(self.axis, widths)
            if cut.kind == "embedding":
                prepare_embedding(module, vocabulary, self.context)
            else:
                prepare_head(module, vocabulary)

    def _region(self, cut: LayerCut) -> Region:
        return self.regions.setdefault(cut.region, Region(self.axis, self.context))

    def _swap(self, module: nn.Module, kind: LayerKind) -> None:
        """Make the module's class one of ours and its own. A plain library layer becomes our public class."""
        own = type(module)
        layer, public, library = _CLASSES[kind]
        if (kind, own) not in self.classes:
            made = public if own is library else type(f"{layer.__name__}{own.__name__}", (layer, own), {})
            self.classes[kind, own] = made
        module.__class__ = self.classes[kind, own]


_CLASSES: Mapping[LayerKind, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = MappingProxyType(
    {
        "column": (ColumnLayer, ColumnLinear, nn.Linear),
        "column+gather": (GatheredColumnLayer, GatheredColumnLinear, nn.Linear),
        "row": (RowLayer, RowLinear, nn.Linear),
        "embedding": (EmbeddingLayer, VocabularyEmbedding, nn.Embedding),
        "head": (HeadLayer, VocabularyHead, nn.Linear),
        "experts": (ExpertsLayer, ExpertsLayer, ExpertsLayer),
    }
)
"""(what is mixed in, the public class, the library class that it replaces)."""


def shown_class(
    own: type[nn.Module], cuts: Mapping[str, tuple[ParameterCut, tuple[int, ...]]], context: GlobalTensorContext
) -> type:
    """A subclass of ``own`` whose attributes named in ``cuts`` (with their whole shapes) are views."""
    properties = {name: _shown(name, cut, shape, context) for name, (cut, shape) in cuts.items()}
    return type(f"Shown{own.__name__}", (own,), properties)


def _shown(name: str, cut: ParameterCut, shape: tuple[int, ...], context: GlobalTensorContext) -> property:
    sets: list[Index | None] = [None] * len(shape)
    sets[cut.dim] = Index.of_ranges(cut.ranges, context.axis.size)

    def read(module: nn.Module) -> Tensor | GlobalTensor:
        parameter = module._parameters[name]
        assert parameter is not None
        return show_parameter(parameter, shape, tuple(sets), context)

    return property(read)
