"""A user's optimizer that needs whole parameters: an owner rank updates each from its whole gradient and weights.

The class declares ``whole_parameters = True``. An update of a parameter may then read all of it, its gradient and its
state, and nothing of another parameter; what lasts is in ``self.state`` and in the groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.kernels.device import is_host
from engine.kernels.optim.matrix_rule import MatrixState
from engine.zero.optim.inner_optimizer import OptimizerFactory, own_options
from engine.zero.optim.matrix.matrix_optimizers import FlatMatrixOptimizer

Shape = tuple[int, ...]


def declares_whole(given: object) -> bool:
    """Returns True if the user's optimizer declares ``whole_parameters = True``. ``given``: the optimizer, its class,
    or a function that makes the optimizer.
    """
    if getattr(given, "whole_parameters", False):
        return True
    if isinstance(given, torch.optim.Optimizer) or not callable(given):
        return False
    try:
        made, failure = given([{"params": [nn.Parameter(torch.zeros(1, 1))]}]), None
    except Exception as error:  # it is raised when the optimizer is made of all groups
        made, failure = None, error
    return failure is None and bool(getattr(type(made), "whole_parameters", False))


@dataclass(frozen=True, slots=True)
class OwnWholeRule:
    """Update rule that runs one step of the user's own optimizer on one whole parameter. ``options``: options of its
    parameter group.
    """

    make: OptimizerFactory
    options: Mapping[str, Any] = field(default_factory=dict)
    known: dict[Shape, dict[str, Any]] = field(default_factory=dict)
    """State after an update by parameter shape and name: meta tensors and numbers."""

    def cost(self, shape: Shape) -> int:
        """Returns the estimated work of an update of a parameter of ``shape``: its number of elements."""
        return prod(shape)

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Returns state name -> shape of the state that the user's optimizer stores for a parameter of ``shape``. The
        shape of a number is ().
        """
        return {name: tuple(getattr(value, "shape", ())) for name, value in self._state(shape).items()}

    def update(self, direction_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Runs step number ``step`` (from 1) of the user's optimizer on one parameter and returns the new weights.
        ``direction_AB``: gradient and weights, stacked in this order to [2, *shape]. ``state``: name -> tensor, updated
        in place.
        """
        gradient, weights = direction_AB
        parameter = nn.Parameter(weights.clone())
        parameter.grad = gradient.clone()
        optimizer, like = self._over(parameter), self._state(tuple(weights.shape))
        if step > 1:
            optimizer.state[parameter] = {name: _as(like[name], kept, parameter) for name, kept in state.items()}
        optimizer.step()
        for name, kept in state.items():
            kept.copy_(torch.as_tensor(optimizer.state[parameter][name]))
        return parameter.detach()

    def apply_(self, weights: Tensor, update: Tensor, shape: Shape, step: int) -> None:
        """Copies ``update``, the new weights that ``update()`` has returned, into ``weights``."""
        weights.copy_(update.view(weights.shape))

    def _over(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return self.make([{**self.options, "params": [parameter]}])

    def _state(self, shape: Shape) -> dict[str, Any]:
        if shape not in self.known:
            self.known[shape] = self._tried(shape)
        return self.known[shape]

    def _tried(self, shape: Shape) -> dict[str, Any]:
        """Returns the state after an update of a parameter without data, or of zeros if the optimizer reads values."""
        try:
            found, failure = self._after_one(torch.zeros(shape, device="meta")), None
        except Exception as error:
            found, failure = None, error
        return found if failure is None and found is not None else self._after_one(torch.zeros(shape))

    def _after_one(self, weights: Tensor) -> dict[str, Any]:
        parameter = nn.Parameter(weights)
        parameter.grad = torch.zeros_like(weights)
        optimizer = self._over(parameter)
        kind, before = type(optimizer).__name__, _attributes(optimizer)
        optimizer.step()
        kept = optimizer.state.get(parameter, {})
        state = {str(name): value for name, value in kept.items() if value is not None}
        if changed := [name for name, value in _attributes(optimizer).items() if before.get(name) != value]:
            raise ConfigError(
                f"optimizer {kind} updates whole parameters and keeps self.{changed[0]} outside of self.state, so its "
                "value is lost after an update; store it in self.state[parameter]."
            )
        if others := [name for name, value in state.items() if not isinstance(value, Tensor | bool | int | float)]:
            raise ConfigError(
                f"optimizer {kind} with whole_parameters = True stores a {type(state[others[0]]).__name__} in "
                f"self.state[parameter][{others[0]!r}], but may store only tensors and numbers there; change {kind}."
            )
        return state


def _as(like: Any, kept: Tensor, parameter: nn.Parameter) -> Any:
    """Returns a value of state in the type that the optimizer has used."""
    if not isinstance(like, Tensor):
        return type(like)(kept.item())
    if not like.dim():  # torch keeps step counts on the host
        return kept.to(like.device if is_host(like.device) else parameter.device, like.dtype, copy=True)
    tried = torch.float32  # the dtype of the parameter with which it was tried
    return kept.to(parameter.device, parameter.dtype if like.dtype == tried else like.dtype, copy=True)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the comparable attributes of an instance except groups and state: numbers, and sizes of containers."""
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "defaults")}
    sizes = {name: len(value) for name, value in own.items() if isinstance(value, dict | list | set | tuple)}
    plain = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str)}
    return {name: value for name, value in (sizes | plain).items() if not name.startswith(("_opt", "_zero", "_step"))}


class FlatWhole(FlatMatrixOptimizer):
    """Optimizer over shards. It replaces a user's optimizer that can update only whole parameters. An update runs the
    user's optimizer on gathered parameters, with the same groups and options.
    """

    reads_weights = True

    def __init__(self, groups: Sequence[dict[str, Any]], make: OptimizerFactory, known: dict[Shape, Any]) -> None:
        like = make([{**group, "params": [nn.Parameter(torch.zeros(1, 1))]} for group in groups])
        self._make, self._known, self._kind = make, known, type(like).__name__
        self._options = frozenset(name for group in like.param_groups for name in own_options(group))
        given = zip(like.param_groups, groups, strict=True)
        super().__init__([{**own_options(full), **group} for full, group in given])
        self.defaults = dict(like.defaults)

    @property
    def kind(self) -> str:
        """Class name of the user's optimizer."""
        return self._kind

    @property
    def families(self) -> frozenset[str]:  # type: ignore[override]
        """Names of the state tensors that the user's optimizer stores for this run's parameters."""
        return frozenset(name for state in self._known.values() for name in state)

    def rule(self, group: Mapping[str, Any]) -> OwnWholeRule:
        """Returns the update rule that runs the user's optimizer with the options of a parameter group."""
        options = {name: value for name, value in group.items() if name in self._options}
        return OwnWholeRule(self._make, options, self._known)
