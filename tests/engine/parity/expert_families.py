"""Every mixture of experts of the installed transformers that builds small from its configuration class.

A family is a model type with a key for a number of experts. It is tried if its small model stacks the matrices of
experts in a parameter, or lists equal modules: types and modules are enumerated, and none is named here.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from engine.errors import first_line
from tests.engine.parity.transformers_types import LAYERS, ModelType, build, model_types, text

MOST_PARAMETERS = 8_000_000
"""Towers of pictures have convolutions of one size."""
_EXPERTS = r"(num|n|moe_num)_(local_|routed_)?experts"
_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_sparse_(en|de)coder_layers|(en|de)coder_sparse_step", 1),
    (r"num_experts_per_token|moe_top_?k|top_k_experts", 2),
    (r"zero_expert_num|num_expert_group|indexer_kv_heads", 1),
    (r"swa_num_key_value_heads|indexer_n_heads|indexer_compress_ratio", 2),
    (r"indexer_budget|indexer_head_dim", 8),
    (r"(projector|vision)_(in|out)put_dim", 32),
)
_DENSE = r"first_k_dense_replace|num_dense_layers"
"""Number of layers without experts before the others."""
_ABSENT: Mapping[str, int] = MappingProxyType(
    {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    }
)
"""Sizes that a configuration may leave open."""
_SWITCHES = r"is_moe|enable_moe\w*"


def has_experts(kind: ModelType) -> bool:
    """Returns True if the configuration class of a type has a key for a number of experts."""
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[kind.name]()
    except Exception:  # configurations that are not ours
        return False
    return any(re.fullmatch(_EXPERTS, name) for part in _parts(config) for name in vars(part))


def small_mixture(kind: ModelType, implementation: str | None = None) -> nn.Module:
    """The small model of a type with experts in its last layer at least.

    Args:
        implementation: transformers' implementation of experts; None: that of the configuration.
    """
    return build(kind, partial(_adjust, implementation), MOST_PARAMETERS)


def _adjust(implementation: str | None, config: Any) -> None:
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
            if isinstance(value, bool):
                setattr(part, name, value or bool(re.fullmatch(_SWITCHES, name)))
            elif name == "mlp_only_layers":
                setattr(part, name, [layer for layer in value if layer < LAYERS - 1])
            elif value is None and name in _ABSENT:
                setattr(part, name, _ABSENT[name])
            elif isinstance(value, int) and re.fullmatch(_DENSE, name):
                setattr(part, name, min(value, 1))
            elif size is not None and (value is None or isinstance(value, int)):
                setattr(part, name, size)
        if not hasattr(part, "rope_theta") and not hasattr(part, "rope_parameters"):
            part.rope_theta = 10000.0  # some code reads it, and its configuration has none
            if getattr(part, "clip_qkv", 0) is None:
                part.clip_qkv = 8
        if {"qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"} <= set(vars(part)):
            part.qk_head_dim = part.qk_nope_head_dim + part.qk_rope_head_dim
            rope = getattr(part, "rope_parameters", None) or {}
            part.head_dim = part.qk_head_dim if "partial_rotary_factor" in rope else part.head_dim
        _adjust_positions(part)
        for name, layer in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
            if getattr(part, name, ()) is None:
                setattr(part, name, [layer] * LAYERS)
        if implementation is not None:
            part._experts_implementation = implementation


def _adjust_positions(part: Any) -> None:
    """Sets sections of a rotary embedding of pictures to a small head, and a window where code reads one."""
    rope = getattr(part, "rope_parameters", None)
    if rope and "mrope_section" in (getattr(part, "ignore_keys_at_rope_validation", None) or ()):
        size = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
        pairs = int(size * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [max(pairs // 3, 1)] * 2 + [pairs - 2 * max(pairs // 3, 1)]
    if hasattr(part, "num_sliding_attention_heads") and part.sliding_window is None:
        part.sliding_window = 8


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield part


def expert_modules(model: nn.Module) -> list[str]:
    """Returns the modules that own matrices [experts, ..] or [experts * rows, ..], and the lists called experts."""
    config: Any = model.config
    counts = {getattr(part, name) for part in _parts(config) for name in vars(part) if re.fullmatch(_EXPERTS, name)}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            kinds = [tuple(p.shape for p in each.parameters()) for each in module.children()]
            kinds = [kind for kind in kinds if kind]
            if len(kinds) > 1 and len(set(kinds)) == 1 and "expert" in (name + type(module).__name__).lower():
                found.append(name)
        elif not type(module).__module__.startswith("torch.nn."):
            own = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] in counts]
            inside = [p for p in module.parameters() if p.dim() > 1]
            flat = {tuple(p.shape) for p in module.parameters(recurse=False)}
            joined = len(inside) > 1 and len(flat) == 1 and any(min(flat)[0] % count == 0 for count in counts)
            if (own and len(own) * 2 >= len(inside)) or joined:
                found.append(name)
    return found


def families() -> Iterator[ModelType]:
    """Yields the types with a key for a number of experts, models of pictures and text included."""
    from transformers.models.auto import modeling_auto

    heads = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    pictures = (ModelType(name, "pictures", head) for name, head in heads if isinstance(head, str))
    kinds = (kind for kind in (*model_types(), *pictures) if has_experts(kind))
    return iter({kind.head: kind for kind in kinds}.values())


def reason_not_to_try(kind: ModelType) -> str:
    """Returns the reason for which a family cannot be tried; empty if it can."""
    try:
        model = small_mixture(kind)
        loss = model(**text(2, 1)[0]).loss
    except Exception as error:  # configurations and models that are not ours
        return f"{type(error).__name__}: {first_line(error)}"
    if not expert_modules(model):
        return "it stacks no matrices of experts"
    return "" if loss is not None and bool(torch.isfinite(loss)) else "its loss is absent or not finite"
