"""Optimizer and scheduler that ``deepspeed.initialize`` returns, usable before the model is sharded."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import Config
from engine.deepspeed.runtime.lr_schedules import SCHEDULES
from engine.engine import Engine
from engine.errors import EngineError
from engine.reporting.step_report import StepReport


class LastStep:
    """Results of the engine's ``step`` calls: the report of the last call, and the last reported gradient norm."""

    def __init__(self) -> None:
        self.norm: float | None = None
        self._report: StepReport | None = None

    def take(self, report: StepReport | None) -> None:
        """Stores ``report``, the result of the engine's ``step``; None: the call has not updated the weights."""
        self._report = report
        if report is not None:
            self.norm = report.grad_norm

    @property
    def applied(self) -> bool:
        """True if the last call of ``step`` updated the weights; False if it only ended a microbatch or was skipped."""
        return self._report is not None and not self._report.skipped

    @property
    def skipped(self) -> bool:
        """True if the last step was skipped because of a non-finite gradient."""
        return self._report is not None and self._report.skipped


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Wrapper of a torch optimizer with DeepSpeed's attributes."""

    def __init__(self, engine: Engine, given: torch.optim.Optimizer | None, last: LastStep) -> None:
        # does not call the base constructor, which would create groups of its own
        self._engine, self._given, self._last = engine, given, last

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Wrapped torch optimizer: the argument of ``initialize``, or else the engine's own, made at the first batch or
        before.

        Raises:
            EngineError: no optimizer was passed, and the engine has not made its own.
        """
        if self._given is None and not self._engine.built:
            raise EngineError(
                "the optimizer was read before the first forward, but the engine makes the optimizer in this forward; "
                "read it after the first model_engine(...), or pass your own optimizer=... to deepspeed.initialize."
            )
        return self._given if self._given is not None else self._engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """State of the wrapped optimizer: a mapping from each parameter to its state tensors."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default options of the wrapped optimizer."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_engine" not in vars(self):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def __repr__(self) -> str:
        return f"DeepSpeedOptimizer of {self.optimizer!r}"

    @property
    def cur_scale(self) -> float:
        """Loss scale of the next step; 1 except in an fp16 run."""
        return self._engine.loss_scale

    loss_scale = cur_scale

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because of a non-finite gradient."""
        return self._last.skipped

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the engine's backward for ``loss``, the loss of a microbatch."""
        self._engine.backward(loss, retain_graph)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raises an error; call the engine's ``step`` instead.

        Raises:
            EngineError: always.
        """
        raise EngineError("optimizer.step() was called on an engine's optimizer; call model_engine.step() instead.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last update; ``set_to_none`` has no effect."""
        self._engine.zero_grad()


class LateSchedule:
    """Placeholder of a learning-rate scheduler that the engine makes at the first batch.

    Attributes are read from the engine's scheduler; before the first batch, reading them raises EngineError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.lr_scheduler, name)


def returned_optimizer(engine: Engine, given: Any, last: LastStep) -> Any:
    """Returns the optimizer object that ``deepspeed.initialize`` returns; None if the engine has no optimizer.

    ``given`` is the script's optimizer, or a callable that makes it. A torch optimizer at ZeRO 0 in fp32 is returned
    itself; otherwise the result is a ``DeepSpeedOptimizer``. Its ``overflow`` is read from ``last``, which records if
    the engine's last step was skipped.
    """
    config, own = engine.config, given if isinstance(given, torch.optim.Optimizer) else None
    if config.optimizer is None and given is None:
        return None
    plain = config.zero_optimization.stage == 0 and not config.bf16.enabled and not config.fp16.enabled
    if plain and own is None and given is not None and engine.built:
        return engine.optimizer  # made by the callable
    return own if own is not None and plain else DeepSpeedOptimizer(engine, own, last)


def returned_schedule(engine: Engine, given: Any) -> Any:
    """Returns the scheduler object that ``deepspeed.initialize`` returns; None without a schedule.

    ``given`` is the script's argument. A torch scheduler is returned unchanged; for a callable or None, the result is
    the engine's scheduler, or a placeholder before the first batch.
    """
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return given
    if given is None and engine.config.scheduler is None:
        return None
    return engine.lr_scheduler if engine.built else LateSchedule(engine)


def configured_schedule(config: Config, given: Any) -> Any:
    """Returns the argument ``lr_scheduler`` for ``engine.initialize``: the user's schedule ``given`` or, if None, a
    function that makes the DeepSpeed schedule of ``config``; None if ``config`` has no schedule of DeepSpeed.
    """
    section = config.scheduler
    if given is not None or section is None or section.type not in SCHEDULES:
        return given
    return ConfiguredSchedule(section.type, section.params)


@dataclass(frozen=True, slots=True)
class ConfiguredSchedule:
    """Function that makes the DeepSpeed schedule of section ``scheduler`` for an optimizer."""

    words: str
    """Type of the schedule, for the banner."""
    params: Mapping[str, Any]

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        """Returns the schedule over ``optimizer``."""
        params = dict(self.params)
        if params.get("warmup_num_steps") == 0:  # a warmup has at least two steps
            params["warmup_num_steps"] = 1
        return SCHEDULES[self.words](optimizer, **params)
