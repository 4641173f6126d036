"""Optimizer and schedule as ``initialize`` returns them, also while the plan of the engine waits for a batch."""

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.config import Config
from engine.deepspeed.runtime.lr_schedules import SCHEDULES
from engine.engine import Engine
from engine.errors import EngineError
from engine.reporting.step_report import StepReport


class LastStep:
    """The last call of ``step``, and the norm of the last update."""

    def __init__(self) -> None:
        self.norm: float | None = None
        self._report: StepReport | None = None

    def take(self, report: StepReport | None) -> None:
        """Keep the report of a step; None: it made no update."""
        self._report = report
        if report is not None:
            self.norm = report.grad_norm

    @property
    def applied(self) -> bool:
        """Whether it made an update."""
        return self._report is not None and not self._report.skipped

    @property
    def skipped(self) -> bool:
        """Whether it was skipped, because a gradient was not finite."""
        return self._report is not None and self._report.skipped


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """The engine's optimizer with the members of DeepSpeed's: groups and state are those that the engine updates."""

    def __init__(self, engine: Engine, given: torch.optim.Optimizer | None, last: LastStep) -> None:
        # the base's constructor is left out: it makes groups of its own
        self._engine, self._given, self._last = engine, given, last

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer inside.

        Raises:
            EngineError: it is not made yet.
        """
        if self._given is None and not self._engine.built:
            raise EngineError(
                "the optimizer was asked before the first forward, from which tensor and pipeline ranks make their "
                "plan; ask it after model_engine(...), or pass optimizer=... to initialize, whose groups are there."
            )
        return self._given if self._given is not None else self._engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the optimizer inside."""
        return self.optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """State of the optimizer inside."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Options of the optimizer inside."""
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
        """Loss scale of the next step."""
        return self._engine.loss_scale

    loss_scale = cur_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return self._last.skipped

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of a microbatch by the engine."""
        self._engine.backward(loss, retain_graph)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused.

        Raises:
            EngineError: the engine's step reduces, clips and updates.
        """
        raise EngineError("optimizer.step() of an engine's optimizer; call model_engine.step(), which calls it.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of an unfinished step."""
        self._engine.zero_grad()


class LateSchedule:
    """The schedule of an engine whose plan waits for the first batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.lr_scheduler, name)


def returned_optimizer(engine: Engine, given: Any, last: LastStep) -> Any:
    """The optimizer: the user's own where DeepSpeed returns it too, at stage 0 in fp32, and None without one."""
    config, own = engine.config, given if isinstance(given, torch.optim.Optimizer) else None
    if config.optimizer is None and given is None:
        return None
    plain = config.zero_optimization.stage == 0 and not config.bf16.enabled and not config.fp16.enabled
    if plain and own is None and given is not None and engine.built:
        return engine.optimizer  # that which a callable made
    return own if own is not None and plain else DeepSpeedOptimizer(engine, own, last)


def returned_schedule(engine: Engine, given: Any) -> Any:
    """The torch scheduler that was given, or that a callable or the configuration makes; None without one."""
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return given
    if given is None and engine.config.scheduler is None:
        return None
    return engine.lr_scheduler if engine.built else LateSchedule(engine)


def configured_schedule(config: Config, given: Any) -> Any:
    """The user's schedule, or the configured one as a scheduler with DeepSpeed's members, if it has that name."""
    section = config.scheduler
    if given is not None or section is None or section.type not in SCHEDULES:
        return given
    return partial(_made, SCHEDULES[section.type], section.params)


def _made(kind: Callable[..., Any], params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    if params.get("warmup_num_steps") == 0:  # any warmup takes two steps at least
        params = dict(params) | {"warmup_num_steps": 1}
    return kind(optimizer, **params)
