"""Several optimizers as one: each group of parameters is updated by the rule of its own optimizer.

The groups and the state belong to the parts, so that schedules, checkpoints and the sharded update see one optimizer
with groups that differ in more than their options.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.zero.optim.flat_optimizers import FlatOptimizer

ENTRY = "entry"
"""Key of a parameter group: number of the optimizer that updates it."""

Groups = list[dict[str, Any]]


class CompositeOptimizer(FlatOptimizer):
    """Several built-in optimizers that act as one. Optimizer number i updates the parameter groups with
    ``group["entry"]`` = i.

    Args:
        groups: torch parameter groups with this rank's parameters; a group may be empty.
        makers: for each number, a function that makes the optimizer from its groups.
        kind: name in checkpoints and messages.
    """

    def __init__(self, groups: Groups, makers: Sequence[Callable[[Groups], torch.optim.Optimizer]], kind: str) -> None:
        self.parts: dict[int, FlatOptimizer] = {}
        """Optimizer of each entry that has a group."""
        for entry, own in _by_entry(groups).items():
            made = makers[entry](own)
            assert isinstance(made, FlatOptimizer)
            self.parts[entry] = made
        super().__init__(groups, {})
        self.defaults = {name: value for part in self.parts.values() for name, value in part.defaults.items()}
        for part in self.parts.values():
            part.state = self.state
        self.encodes = any(part.encodes for part in self.parts.values())
        self.counted = tuple(dict.fromkeys(name for part in self.parts.values() for name in part.counted))
        self._kind = kind

    @property
    def kind(self) -> str:
        """Name in checkpoints and messages, made of the names of the configured optimizers."""
        return self._kind

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the moments, such as "exp_avg", that any of the combined optimizers has, sorted."""
        return tuple(sorted({name for part in self.parts.values() for name in part.moment_names}))

    def moment_dtype(self, weight: Tensor) -> torch.dtype:
        """Returns the dtype of the moments of ``weight``: the dtype of ``weight``, or the configured dtype for a bf16
        weight with stochastic rounding.
        """
        rounded = self.rounding is not None and weight.dtype == torch.bfloat16
        return self.rounding.moments if rounded and self.rounding is not None else weight.dtype

    def values(self, weight: Tensor, device: torch.device | None = None) -> dict[str, Tensor]:
        """Returns the moments of ``weight`` by name, such as "exp_avg", in the shape of ``weight``. Encoded moments are
        decoded to copies on ``device`` (default: the device of ``weight``); others are the live tensors.
        """
        return self._part_of(weight).values(weight, device)

    def encoded(self, weight: Tensor) -> bool:
        """Returns True if the optimizer that updates ``weight`` stores its moments encoded, such as in 8 bits."""
        return self._part_of(weight).encodes

    def keep(self, weight: Tensor, values: Mapping[str, Tensor]) -> None:
        """Replaces the moments of ``weight`` by ``values`` (moment name -> decoded tensor). Encodes them if the
        optimizer stores its moments encoded.
        """
        self._part_of(weight).keep(weight, values)

    def count(self, group: dict[str, Any]) -> None:
        """Increments the step count of the parameter group ``group`` in the optimizer that updates it."""
        self.parts[group[ENTRY]].count(group)

    def _part_of(self, weight: Tensor) -> FlatOptimizer:
        own = (group for group in self.param_groups if any(each is weight for each in group["params"]))
        return self.parts[next(own)[ENTRY]]

    def keeps(self, name: str, group: int) -> bool:
        """Returns True if the optimizer of parameter group number ``group`` has a moment called ``name``."""
        return name in self.parts[self.param_groups[group][ENTRY]].moment_names

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        part = self.parts[group[ENTRY]]
        part.pieces, part.rounding, part.kernels = self.pieces, self.rounding, self.kernels
        part._update_group(weights, group)


class PlainComposite(torch.optim.Optimizer):
    """Several torch optimizers that act as one, in a single process. Optimizer number i updates the parameter groups
    with ``group["entry"]`` = i.
    """

    def __init__(self, groups: Groups, makers: Sequence[Callable[[Groups], torch.optim.Optimizer]]) -> None:
        self.parts = [makers[entry](own) for entry, own in _by_entry(groups).items()]
        super().__init__(groups, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Runs one step of every combined optimizer. ``closure`` is ignored."""
        for part in self.parts:
            part.step()


def _by_entry(groups: Groups) -> dict[int, Groups]:
    found: dict[int, Groups] = {}
    for group in groups:
        found.setdefault(group[ENTRY], []).append(group)
    return found
