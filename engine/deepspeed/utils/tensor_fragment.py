"""``deepspeed.utils``: gradient, weight and optimizer state of one parameter, and an endless loader."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from glob import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.errors import EngineError

_ENGINE = "_deepspeed_engine"
_Read = Callable[[Engine, str, bool], AbstractContextManager[dict[str, Tensor]]]


class Owner(NamedTuple):
    """Pair: the engine that trains a parameter, and the parameter's name in the model."""

    engine: Engine
    name: str

    @property
    def pattern(self) -> str:
        """Glob pattern that matches only this parameter's name."""
        return escape(self.name)


def tell_engine(engine: Engine) -> None:
    """Stores a weak reference to ``engine`` on each parameter of its model."""
    for parameter in engine.module.parameters():
        setattr(parameter, _ENGINE, weakref.ref(engine))


def engine_of(parameter: nn.Parameter) -> Owner | None:
    """Returns the engine that trains ``parameter``, with the parameter's name; None if no engine trains it."""
    engine = getattr(parameter, _ENGINE, lambda: None)()
    if engine is None:
        return None
    named = engine.module.named_parameters()
    return next((Owner(engine, name) for name, each in named if each is parameter), None)


def _owner(parameter: nn.Parameter, call: str) -> Owner:
    found = engine_of(parameter)
    if found is None:
        raise EngineError(f"{call} was given a tensor that no engine trains; pass a parameter of engine.module.")
    return found


def _tensor(parameter: nn.Parameter, call: str, read: _Read, local: bool, value: Tensor | None = None) -> Tensor | None:
    """Returns a copy of the parameter's tensor in ``read``, after setting it to ``value``; None for a frozen one."""
    engine, _ = found = _owner(parameter, call)
    if not _is_trained(found, call, value):
        return None
    with read(engine, found.pattern, local) as tensors:
        return _through(tensors[found.name], value)


def _is_trained(owner: Owner, call: str, value: Tensor | None) -> bool:
    trained = any(row.name == owner.name and row.trainable for row in owner.engine.plan.table)
    if not trained and value is not None:
        raise EngineError(
            f"{call} was given the frozen parameter {owner.name!r}, but only trained parameters have fp32 weights, "
            "gradients and optimizer state; write to param.data inside `with "
            "deepspeed.zero.GatheredParameters(param):`."
        )
    return trained


def _state(parameter: nn.Parameter, call: str, key: str, local: bool, value: Tensor | None = None) -> Tensor | None:
    engine, _ = found = _owner(parameter, call)
    if not _is_trained(found, call, value):
        return None
    with engine.optimizer_state(found.pattern, local) as states:
        state = states[found.name]
        if key not in state:
            kept = ", ".join(sorted(state)) or "nothing before the first step"
            raise EngineError(f"{call}: the optimizer has no state {key!r}; it has {kept}.")
        return _through(state[key], value)


@torch.no_grad()
def _through(tensor: Tensor, value: Tensor | None) -> Tensor:
    if value is not None:
        tensor.copy_(value.view(tensor.shape))
    return tensor.clone()


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns a copy of the full fp32 weight of ``param``; None if ``param`` is frozen. Collective.

    Raises:
        EngineError: no engine trains ``param``.
    """
    return _tensor(param, "safe_get_full_fp32_param", Engine.masters, False)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the full fp32 weight of ``param`` to ``value``, which must be equal on all ranks. Collective.

    Raises:
        EngineError: ``param`` is frozen, or no engine trains it.
    """
    _tensor(param, "safe_set_full_fp32_param", Engine.masters, False, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Returns a copy of the full gradient of ``param``; None if ``param`` is frozen. Collective.

    Call it after ``backward`` and before ``step``.
    """
    return _tensor(param, "safe_get_full_grad", Engine.gradients, False)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets the full gradient of ``param`` to ``value``, which must be equal on all ranks. Collective.

    Call it after ``backward`` and before ``step``.

    Raises:
        EngineError: ``param`` is frozen, or no engine trains it.
    """
    _tensor(param, "safe_set_full_grad", Engine.gradients, False, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns a copy of the full optimizer state of ``param`` with the name ``optim_state_key``, such as "exp_avg";
    None if ``param`` is frozen. Collective.

    Raises:
        EngineError: the optimizer has no state of this name, or has not made a step.
    """
    return _state(param, "safe_get_full_optimizer_state", optim_state_key, False)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Writes ``value`` to the full optimizer state of ``param`` with the name ``optim_state_key``, such as "exp_avg".
    Collective.

    ``value`` must be equal on all ranks.

    Raises:
        EngineError: ``param`` is frozen, or the optimizer has no state of this name or has not made a step.
    """
    _state(param, "safe_set_full_optimizer_state", optim_state_key, False, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Sets the full gradient of each trainable parameter in ``param_list`` to ``update_func(gradient, parameter)``.

    ``update_func`` gets a copy of the full gradient, and must return equal results on all ranks. Collective.
    """
    for parameter in param_list:
        if (grad := safe_get_full_grad(parameter)) is not None:
            safe_set_full_grad(parameter, update_func(grad, parameter))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns a copy of this rank's 1-D shard of the fp32 weight of ``param``; None if ``param`` is frozen.
    Collective.
    """
    return _tensor(param, "safe_get_local_fp32_param", Engine.masters, True)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's 1-D shard of the fp32 weight of ``param`` to ``value``, which must have as many elements as the
    shard. Collective.

    Raises:
        EngineError: ``param`` is frozen, or no engine trains it.
    """
    _tensor(param, "safe_set_local_fp32_param", Engine.masters, True, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Returns a copy of this rank's 1-D shard of the gradient of ``param``; None if ``param`` is frozen. Collective.

    Call it after ``backward`` and before ``step``.
    """
    return _tensor(param, "safe_get_local_grad", Engine.gradients, True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Sets this rank's 1-D shard of the gradient of ``param`` to ``value``, which must have as many elements as the
    shard. Collective.

    Call it after ``backward`` and before ``step``.

    Raises:
        EngineError: ``param`` is frozen, or no engine trains it.
    """
    _tensor(param, "safe_set_local_grad", Engine.gradients, True, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns a copy of this rank's 1-D shard of the optimizer state ``optim_state_key``, such as "exp_avg", of
    ``param``. Collective.

    Returns None if ``param`` is frozen.
    """
    return _state(param, "safe_get_local_optimizer_state", optim_state_key, True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets this rank's 1-D shard of the optimizer state ``optim_state_key``, such as "exp_avg", of ``param`` to
    ``value``. Collective.

    Raises:
        EngineError: ``param`` is frozen, or the optimizer has no state of this name or has not made a step.
    """
    _state(param, "safe_set_local_optimizer_state", optim_state_key, True, value)


class RepeatingLoader:
    """Endless iterator over ``loader``, which it starts again with ``iter(loader)`` after the last item."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._items: Iterator[Any] = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __len__(self) -> int:
        loader: Any = self.loader
        return len(loader)

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)
