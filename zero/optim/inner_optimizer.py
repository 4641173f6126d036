"""Creation of the torch optimizer inside the engine: its groups, its need of whole parameters, and a guard of
``step``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.errors import ConfigError, EngineError
from engine.zero.optim.flat_optimizers import FlatOptimizer

# Optimizers of torch whose update of an element depends on that element's own history alone, so that updating a shard
# equals updating the full tensor.
_ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a parameter group that replace the defaults of the optimizer. None: the default is used."""

    lr: float | None = None
    weight_decay: float | None = None
    others: tuple[tuple[str, Any], ...] = ()
    """Other options of a group in the user's optimizer."""
    entry: int | None = None
    """Number of the optimizer in a list of several; None: there is one."""

    def as_kwargs(self) -> dict[str, Any]:
        """Returns the options that are set, by their key in a torch parameter group."""
        values = {"lr": self.lr, "weight_decay": self.weight_decay, "entry": self.entry}
        return {name: value for name, value in values.items() if value is not None} | dict(self.others)


def make_inner(
    factory: OptimizerFactory, groups: Sequence[GroupOptions], members: Mapping[int, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Makes the torch optimizer of this rank's tensors, by a call of ``factory``. Parameter group number i has the
    tensors ``members[i]`` and the options ``groups[i]``.
    """
    return factory([{"params": members[index], **group.as_kwargs()} for index, group in enumerate(groups)])


def built_in(inner: torch.optim.Optimizer, key: str, ability: str) -> FlatOptimizer:
    """Returns ``inner`` if it is a built-in optimizer. ``key`` and ``ability`` are for the error message: configuration
    key that requires a built-in optimizer, and verb phrase such as "update bucket by bucket".

    Raises:
        ConfigError: ``inner`` is the user's own optimizer.
    """
    if not isinstance(inner, FlatOptimizer):
        raise ConfigError(
            f"{key} was given optimizer {type(inner).__name__}, but only the built-in optimizers {ability}; choose "
            f"AdamW, Adam, SGD or Lion in the config, or leave {key} out."
        )
    return inner


def own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a torch parameter group, without the key "params"."""
    return {name: value for name, value in group.items() if name != "params"}


def refuse_own_step(*_: object) -> None:
    """Refuses a call of ``step`` on the engine's optimizer by user code, because gradients are not reduced yet.

    Raises:
        EngineError: always.
    """
    raise EngineError(
        "step() was called on the engine's optimizer, which would update from gradients that are not reduced and "
        "leave the parameters as they are; call eng.step() after eng.backward(loss), or eng.train_batch(batch)."
    )


def check_elementwise(optimizer: torch.optim.Optimizer, by: str) -> None:
    """Checks that ``optimizer`` updates each element independently of other elements, so that it can update shards of
    parameters. ``by``: name of the setting that shards the parameters, for the message.

    Raises:
        ConfigError: the class is no element-wise optimizer of torch, and does not set ``elementwise = True``.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE
    if not known and not getattr(kind, "elementwise", False):
        raise ConfigError(
            f"optimizer {kind.__name__} is given shards of parameters by {by}, which needs an optimizer that updates "
            "element by element; choose such an optimizer, set `elementwise = True` on its class if it does, or "
            "`whole_parameters = True` if it updates each parameter as a whole."
        )
