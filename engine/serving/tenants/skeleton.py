"""Skeleton of the base model, and what the base's engine lends to the engines of tenants.

base       parameters on the ranks, frozen; process groups
skeleton   the same modules with parameters on the meta device, made before the base is sharded
tenant     a copy of the skeleton with adapters; its frozen parameters are the base's tensors on each rank
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.config import Config
from engine.engine import Engine
from engine.parallel.comm.world import Lender
from engine.parallel.model.adapters import base_name
from engine.parallel.tensor.plan.low_rank_pairs import BASE
from engine.parallel.tensor.plan.sharding_rules import head_width, match_styles
from engine.parallel.tensor.plan.styles import Style
from engine.serving.tenants.adapters import adapted_name


def without_memory(model: nn.Module) -> nn.Module:
    """Returns a copy of ``model``, in which all parameters are frozen and on the meta device.

    Tied parameters stay tied.
    """
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def lender_of(base: Engine, model: nn.Module) -> Lender:
    """Returns process groups and frozen tensors of ``base``, to construct an engine of the adapted ``model`` with them.

    The tensors are shared without copies. Their keys are the parameter names in ``model``, not in ``base``.
    """
    runtime = base._runtime
    placed, here = dict(base.module.named_parameters()), runtime.plan.table.held_by(runtime.comm.grid.holder())
    names = {base_name(name): name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    inside = {slot.name for flat in runtime.inventory.frozen for slot in flat.bucket.slots}
    tensors: Mapping[str, Tensor] = {
        names[row.name]: placed[row.name].data for row in here if row.name in names and row.name not in inside
    }
    shards = {tuple(names[slot.name] for slot in flat.bucket.slots): flat.kept for flat in runtime.inventory.frozen}
    return Lender(runtime.comm, tensors, shards)


def adapted_styles(model: nn.Module, skeleton: nn.Module, styles: Mapping[str, Style]) -> dict[str, str]:
    """Returns the tensor-parallel style of each module of the adapted ``model``, such as "column" or "row".

    ``styles`` are the styles of the base model ``skeleton``. The styles of a LoRA pair, A [rank, inputs] and B
    [outputs, rank], follow from its layer:

        style of the layer    styles of the pair
        column, vocabulary    A replicated, B sharded as the layer
        row                   A sharded as the layer, B replicated
    """
    wrapped = {base_name(name): name for name, _ in model.named_modules() if name.endswith(BASE)}
    parameters = {base_name(name): name for name, _ in model.named_parameters() if ".lora_" not in name}
    plan: dict[str, str] = {}
    for name, style in styles.items():
        layer = wrapped.get(name)
        plan[layer or parameters.get(name) or adapted_name(name)] = _with_children(name, style, wrapped)
        if layer is not None and style.text != "replicate":
            half = "lora_A" if style.text.startswith("row") else "lora_B"
            plan[layer] = plan[f"{layer.removesuffix('base_layer')}{half}.default"] = _with_heads(skeleton, name, style)
    return plan


def _with_children(name: str, style: Style, wrapped: Mapping[str, str]) -> str:
    """Returns a style with its references to column layers that are wrapped now."""
    return re.sub(r"(?<=[=/])[\w.]+", lambda child: child[0] + BASE * (f"{name}.{child[0]}" in wrapped), style.text)


def _with_heads(skeleton: nn.Module, name: str, style: Style) -> str:
    """Returns the style of a layer with the width of its heads, which rules else read from the module around it."""
    width = head_width(skeleton.get_submodule(name.rpartition(".")[0]))
    whole = width is None or style.head or style.rows or style.kind not in ("column", "column+gather", "row")
    return style.text if whole else f"{style.text} head:{width}"


def tenant_config(config: Config, base: Engine, skeleton: nn.Module, model: nn.Module) -> Config:
    """Returns a copy of ``config`` for an engine of the adapted ``model``.

    With it, the engine divides ``model`` into pipeline stages, shards it over tp and quantizes its frozen weights as
    ``base`` does. The returned config has names of modules and parameters in ``model``. ``skeleton``: copy of the base
    model.
    """
    plan = base.plan
    frozen = {base_name(name): name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if plan.partition is not None:
        units = tuple(f"{adapted_name(unit)}:{before}" for unit, before in plan.partition.boundaries)
        config = replace(config, parallel=replace(config.parallel, split=units))
    if plan.tensor is not None:
        styles = adapted_styles(model, skeleton, match_styles(skeleton, plan.tensor.patterns))
        config = replace(config, parallel=replace(config.parallel, tensor_plan=styles, prove_plan=False))
    if config.quantize_frozen is not None:
        kept = tuple(frozen[row.name] for row in plan.table if row.quantized is None and row.name in frozen)
        config = replace(config, quantize_frozen=replace(config.quantize_frozen, skip=kept))
    return config
