"""Models that PEFT has wrapped with adapters: names of the base's parameters, and initial values of pairs (LoRA).

base_model.model.layers.0.q_proj.base_layer.weight          q_proj.weight of the base
base_model.model.layers.0.q_proj.lora_A.default.weight      adapter
base_model.model.lm_head.modules_to_save.default.weight     trained copy of lm_head.weight of the base
"""

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from engine.errors import PlanError

PREFIX = "base_model.model."
"""Prefix of the base's names in a wrapped model."""
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_ENCODER = "prompt_encoder."


def is_peft_model(model: nn.Module) -> bool:
    """Returns True if PEFT has wrapped this model with adapters."""
    return any((base.__module__, base.__name__) == ("peft.peft_model", "PeftModel") for base in type(model).__mro__)


def base_name(name: str) -> str:
    """Converts ``name``, the name of a parameter or module in a PEFT model, to its name in the base model."""
    return _WRAPPED.sub("", name.removeprefix(PREFIX))


def adapter_names(model: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Returns the entries of ``names`` that are parameters of PEFT adapters."""
    if not is_peft_model(model):
        return frozenset()
    part: str | None = getattr(getattr(model, "base_model", None), "prefix", None)
    found = (name for name in names if name.startswith(_ENCODER) or (part and f".{part}" in name))
    return frozenset(found)


def check_drawn(model: nn.Module, names: Collection[str]) -> None:
    """Checks that the engine can initialize the adapter parameters among ``names`` as PEFT does.

    Raises:
        PlanError: an adapter is not LoRA, or its initial value depends on the base model's weights.
    """
    settings: Any = getattr(model, "peft_config", {})
    for name in sorted(adapter_names(model, names)):
        about = next((one for key, one in settings.items() if f".{key}." in f"{name}."), None)
        start = getattr(about, "init_lora_weights", None)
        if ".lora_" not in name or not (start in (True, False) or str(start).lower() == "gaussian"):
            raise PlanError(
                f"adapter parameter {name!r} is on the meta device, where the initial value that PEFT gives it is "
                "lost; call get_peft_model on a model in memory, or use LoRA with init_lora_weights True, False or "
                "'gaussian'."
            )


def reset_pairs(model: nn.Module, module: nn.Module) -> None:
    """Sets the LoRA matrices A and B of ``module``, a part of the PEFT model ``model``, to their initial values.

    A module without LoRA does not change.
    """
    layer: Any = module
    if not hasattr(layer, "reset_lora_parameters") or not is_peft_model(model):
        return
    settings: Any = model.peft_config
    for name, about in settings.items():
        halves = [pairs[name] for pairs in (layer.lora_A, layer.lora_B) if name in pairs]
        for half in halves if about.init_lora_weights is False else ():
            half.reset_parameters()
        layer.reset_lora_parameters(name, about.init_lora_weights)
