"""Installation of a tensor plan on a model in place, and assembly of full parameters from shards.

    parameters    get the data of this rank's shard; the objects, their names and ties stay
    layers        change their class to a sharded one (``layers.linear``, ``layers.vocab_parallel``)
    shown         the style "view": code that reads ``self.weight`` gets a global tensor with the full shape

A shown parameter stays registered where it is, so that optimizers, hooks and checkpoints find it. The global tensor is
made at each read, because ZeRO-3 swaps the memory of a parameter between uses.
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
from engine.parallel.tensor.layers.adapter_layers import join_adapter, place_dropouts
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
from engine.parallel.tensor.layers.position_layer import PositionLayer
from engine.parallel.tensor.layers.vocab_parallel import (
    EmbeddingLayer,
    HeadLayer,
    VocabularyEmbedding,
    VocabularyHead,
    prepare_embedding,
    prepare_head,
)
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.plan.low_rank_pairs import BASE
from engine.parallel.tensor.plan.tensor_plan import AttributeChange, LayerCut, LayerKind, ParameterCut, TensorPlan
from engine.parallel.tensor.tp_axis import TensorAxis

_CONFIG = "config."


def local_shard(full: Tensor, cut: ParameterCut, index: int) -> Tensor:
    """Returns the shard of ``full`` on tensor rank ``index`` under the sharding ``cut``, contiguous and new."""
    return local_rows(full, cut.dim, cut.ranges, index)


def assemble(parts: Sequence[Tensor], cut: ParameterCut) -> Tensor:
    """Joins ``parts``, the shards of all tensor ranks in rank order, to the full tensor under the sharding ``cut``."""
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
    """Shards ``model`` in place for this tensor rank by ``plan``. Returns the context of its global tensors.

    Parameter objects and state-dict names do not change. The model may be on the meta device. ``already_cut``: names of
    parameters that already contain this rank's shard. ``patches`` records the changes to modules. Communicates nothing.
    """
    parameters = dict(model.named_parameters())
    installer = _Installer(model, plan, axis, patches)
    for name, cut in plan.parameters.items():
        if name not in already_cut:
            parameters[name].data = local_shard(parameters[name].data, cut, axis.index)
    return installer.install(parameters)


def apply_shapes(model: nn.Module, plan: TensorPlan, axis: TensorAxis, patches: ForwardPatches) -> GlobalTensorContext:
    """Replaces the data of the parameters of ``model`` by placeholders with the shapes of this rank's shards.

    Returns the context of the model's global tensors. Removal of ``patches`` restores the full weights.
    """

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
    """Returns the full shape of a parameter, no matter if its data is full or a shard."""
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
        """Installs views, attributes and layer classes; ``parameters`` have their shards (or shapes) already."""
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
        """Replaces the attributes of parameters with the style "view" by properties that read global tensors."""
        wholes = {id(parameters[name]): name for name in self.plan.shown}
        parents: dict[int, nn.Module] = {}
        for path, module in self.modules.items():
            cuts = {
                local: (cut, _whole_shape(getattr(module, local), cut))
                for local, p in module.named_parameters(recurse=False)
                if id(p) in wholes
                for cut in [self.plan.parameters[wholes[id(p)]]]
            }
            if cuts:
                note = f"reads {', '.join(cuts)} as global tensors, sharded over the tensor ranks"
                with self.patches.changing(module, PatchLayer.TENSOR, note):
                    module.__class__ = shown_class(type(module), cuts, self.context)
                parent = self.modules[path.rpartition(".")[0]]
                parents[id(parent)] = parent
        for parent in parents.values():
            # always_call: the second run of a recomputed block may stop inside; its tensors would keep the graph alive
            handle = parent.register_forward_hook(lambda *_: self.context.clear(), always_call=True)
            self.patches.hook(parent, PatchLayer.TENSOR, handle, "drops its global tensors at the end of its forward")

    def wrap_layers(self) -> None:
        for number, (name, cut) in enumerate(self.plan.layers.items()):
            module = self.modules[name]
            with self.patches.changing(module, PatchLayer.TENSOR, f"is sharded over axis tp: {cut.kind}"):
                self._swap(module, cut.kind)
                self._prepare(module, cut)
            if name.endswith(BASE) and cut.kind in ("column", "column+gather", "row"):
                stream = None if cut.kind == "row" else number
                place_dropouts(self.modules[name.removesuffix(BASE)], module, stream, self.patches)
            if cut.around:
                join_adapter(self.modules[cut.around], module, self.axis, self.patches)

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
        """Changes the module's class to a sharded subclass of it; plain library layers become our public classes."""
        own = type(module)
        layer, public, library = _CLASSES[kind]
        if (kind, own) not in self.classes:
            made = public if own is library else type(f"{layer.__name__}{own.__name__}", (layer, own), {})
            if self.axis.nested:
                made = type(made.__name__, (PositionLayer, made), {})
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
"""For each kind (the mixin, our public class, the library class that the public class replaces)."""


def shown_class(
    own: type[nn.Module], cuts: Mapping[str, tuple[ParameterCut, tuple[int, ...]]], context: GlobalTensorContext
) -> type:
    """Returns a subclass of the module class ``own`` that reads each parameter in ``cuts`` as a full global tensor.

    ``cuts``: (sharding, full shape) by parameter name.
    """
    properties = {name: _shown(own, name, (cut, shape), context) for name, (cut, shape) in cuts.items()}
    return type(f"Shown{own.__name__}", (own,), properties)


def _shown(
    own: type[nn.Module], name: str, held: tuple[ParameterCut, tuple[int, ...]], context: GlobalTensorContext
) -> property:
    (cut, shape), inner = held, getattr(own, name, None)  # a property where the parameter holds codes
    sets: list[Index | None] = [None] * len(shape)
    sets[cut.dim] = Index.of_ranges(cut.ranges, context.axis.size)

    def read(module: nn.Module) -> Tensor | GlobalTensor:
        parameter: Any = inner.__get__(module) if isinstance(inner, property) else module._parameters[name]
        assert parameter is not None
        return show_parameter(parameter, shape, tuple(sets), context)

    return property(read)
