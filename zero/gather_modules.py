"""Calls of modules tell the gathering what is about to be used."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.parallel.pipeline.intercept import Interception
from engine.zero.gather import Gathering
from engine.zero.gather_groups import GatherGroups
from engine.zero.gather_order import GatherOrder


class GatheredModules:
    """Modules of a stage that gather their parameters; ``remove`` makes them what they were.

    To be installed around what recomputes activations, so that a block is gathered once for its backward.
    """

    def __init__(self, model: nn.Module, groups: GatherGroups, order: GatherOrder, gathering: Gathering) -> None:
        self._gathering = gathering
        present = sorted({turn.group for turn in order.turns})
        self._group = {module: group for group in present for module in groups.modules[group]}
        self._interceptions = [
            Interception(name, model.get_submodule(name), self._call, lambda _: False) for name in self._group
        ]

    def remove(self) -> None:
        """Undo."""
        for interception in reversed(self._interceptions):
            interception.remove()

    def _call(self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = self._group[unit]
        self._gathering.enter(group)
        out = forward(*args, **kwargs)
        tensors = list(_tensors(out))
        self._gathering.keep_views(tensors)
        if torch.is_grad_enabled():
            self._gathering.leave(group, [tensor for tensor in tensors if tensor.grad_fn is not None])
        return out


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of a module's output, also those inside an object, which a tensor may be too (cut logits)."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        if hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | nn.Parameter | type):
            yield from (inner for inner in tree_leaves(vars(leaf)) if isinstance(inner, Tensor))
