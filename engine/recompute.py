"""Full activation checkpointing (Chen et al. 2016): a block keeps its input and runs again in backward.

The random state at the block's entry is put back for the second run, so that dropout draws the same masks. A
model whose own switch is on (Hugging Face's ``gradient_checkpointing_enable``) is left to itself.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.parallel.pipeline.units import find_units


def recomputed_blocks(model: nn.Module, mode: str) -> Mapping[str, nn.Module]:
    """The modules whose activations are recomputed under ``activation_checkpointing.mode``, by name."""
    if mode != "full" and not _switched_on(model):
        return MappingProxyType({})
    units = find_units(model)
    return MappingProxyType({name: units.modules[name] for name in units.blocks})


class Recomputation:
    """Makes the forward of every block one that is recomputed; ``remove`` puts the user's back."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        blocks = {} if _switched_on(model) else recomputed_blocks(model, mode)
        self._blocks = [(block, vars(block).get("forward")) for block in blocks.values()]
        for block, _ in self._blocks:
            object.__setattr__(block, "forward", _recomputed(block))

    def remove(self) -> None:
        """Undo."""
        for block, before in self._blocks:
            if before is None:
                del vars(block)["forward"]
            else:
                object.__setattr__(block, "forward", before)
        self._blocks = []


def _switched_on(model: nn.Module) -> bool:
    """Hugging Face's own switch, under its new or its old name."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(type(model), name)), False))


def _recomputed(block: nn.Module) -> Any:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return forward
