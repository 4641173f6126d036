"""The part of a LightningModule that is on the grid, and what of Lightning's loop the engine takes or refuses.

A LightningModule is a training script around a model; the grid holds the model: the child that has the parameters.
Needs no Lightning, so that a mistake is found before anything of it runs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from engine.errors import ConfigError
from engine.huggingface.loop_settings import LoopSettings

_PRECISIONS: Mapping[str, str] = MappingProxyType({"32-true": "no", "bf16-mixed": "bf16"})
"""``precision`` of Lightning's Trainer -> that of the loop."""


def of_lightning(trainer: Any) -> LoopSettings:
    """What Lightning's Trainer says itself.

    Raises:
        ConfigError: it clips elements, has a precision that its plugins apply to the weights, or synchronizes batch
            norms.
    """
    precision, clipping = str(trainer.precision), trainer.gradient_clip_val
    if precision not in _PRECISIONS:
        raise ConfigError(
            f'precision is "{precision}" in Trainer, whose plugin would cast the weights or scale the loss; give '
            '"32-true" or "bf16-mixed", and bf16 or fp16 in engine_config.'
        )
    if clipping and str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) != "norm":
        raise ConfigError(
            'gradient_clip_algorithm is "value" in Trainer, and the engine clips by the norm; leave it out.'
        )
    return LoopSettings(
        owner="Trainer",
        accumulation=("accumulate_grad_batches", trainer.accumulate_grad_batches),
        clipping=("gradient_clip_val", float(clipping)) if clipping else None,
        precision=_PRECISIONS[precision],
    )


def trained_child(module: nn.Module, name: str | None) -> str:
    """Name of the child that is on the grid: ``name``, or the only one with parameters that are trained.

    Raises:
        ConfigError: there are several, or parameters beside it are trained.
    """
    kind = type(module).__name__
    if name is None:
        children = dict(module.named_children())
        trained = [each for each, child in children.items() if any(p.requires_grad for p in child.parameters())]
        found = trained or [each for each, child in children.items() if next(child.parameters(), None) is not None]
        if len(found) != 1:
            listed = ", ".join(found) or "no child"
            raise ConfigError(
                f"{kind} has parameters in {listed}, and the engine places one module; put them into one, as "
                "self.model, or name it in Strategy(module=...)."
            )
        (name,) = found
    elif name not in dict(module.named_modules()):
        raise ConfigError(f"Strategy was given module {name!r}, which {kind} does not have; name one of its modules.")
    beside = [each for each, p in module.named_parameters() if p.requires_grad and not each.startswith(f"{name}.")]
    if beside:
        raise ConfigError(
            f"{kind} trains {beside[0]!r} beside the module {name!r} that the engine places; move it into that module, "
            "or call requires_grad_(False)."
        )
    return name


def replace_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Put ``child`` at ``name``."""
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, child)


def move_others(module: nn.Module, name: str, device: torch.device) -> None:
    """Move the children of ``module`` that are not on the grid."""
    top = name.partition(".")[0]
    for each, child in module.named_children():
        if each != top:
            child.to(device)
