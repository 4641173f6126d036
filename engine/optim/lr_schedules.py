"""Learning rate schedules, as pure functions of the number of updates made so far.

Update k (from 0) uses ``schedule(k)``. Five schedules equal DeepSpeed's in every update; DeepSpeed evaluates warmups at
k - 1, hence the variable ``last``. The others are torch's.
"""

import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from engine.config.optim_sections import SchedulerConfig
from engine.config.torch_schedules import TORCH_SCHEDULERS
from engine.errors import ConfigError

logger = logging.getLogger("trine")


_END = -1
"""Member of ``_told``: the end of the schedule has been logged."""

LrSchedule = Callable[[int, float], float]
"""Schedule: (update, base learning rate of the group) -> learning rate."""

Momentum = Callable[[int], float]
SchedulerArgument = Callable[[Any], Any] | LRScheduler
"""Schedule that a script passes: update -> factor, optimizer -> LRScheduler, or an LRScheduler over its optimizer."""


def lr_range_test(update: int, base: float, p: Mapping[str, Any]) -> float:
    """Returns the learning rate of update number ``update``, from 0, in DeepSpeed's LRRangeTest. The rate rises without
    end.

    Args:
        base: no effect.
        p: params of the schedule, by DeepSpeed's names.
    """
    interval = update / p["lr_range_test_step_size"]
    interval = math.floor(interval) if p["lr_range_test_staircase"] else interval
    return float(p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * interval))


def warmup(update: int, base: float, p: Mapping[str, Any]) -> float:
    """Returns the learning rate of update number ``update``, from 0, in DeepSpeed's WarmupLR.

    It rises over ``warmup_num_steps`` updates from ``warmup_min_lr`` to ``warmup_max_lr``, then is constant.

    Args:
        base: learning rate of the parameter group, used if ``warmup_max_lr`` is None.
        p: params of the schedule, by DeepSpeed's names.
    """
    high = base if p["warmup_max_lr"] is None else p["warmup_max_lr"]
    gamma = _warmup_progress(update - 1, p) if update else 0.0
    return float(p["warmup_min_lr"] + (high - p["warmup_min_lr"]) * gamma)


def warmup_decay(update: int, base: float, p: Mapping[str, Any]) -> float:
    """Returns the learning rate of update number ``update``, from 0, in DeepSpeed's WarmupDecayLR.

    It rises over ``warmup_num_steps`` updates from ``warmup_min_lr`` to ``warmup_max_lr``, then falls linearly to
    ``warmup_min_lr`` at ``total_num_steps``.

    Args:
        base: learning rate of the parameter group, used if ``warmup_max_lr`` is None.
        p: params of the schedule, by DeepSpeed's names.
    """
    last, rise, total = update - 1, _warmup_steps(p), p["total_num_steps"]
    if last < rise:
        return warmup(update, base, p)
    high = base if p["warmup_max_lr"] is None else p["warmup_max_lr"]
    gamma = max(0.0, (total - last) / max(1, total - rise))
    return float(p["warmup_min_lr"] + (high - p["warmup_min_lr"]) * gamma)


def warmup_cosine(update: int, base: float, p: Mapping[str, Any]) -> float:
    """Returns the learning rate of update number ``update``, from 0, in DeepSpeed's WarmupCosineLR.

    After a first update with rate 0, it rises from ``warmup_min_ratio`` x ``base`` to ``base``, then falls along a
    cosine to ``cos_min_ratio`` x ``base``.

    Args:
        base: learning rate of the parameter group.
        p: params of the schedule, by DeepSpeed's names.
    """
    if update == 0:
        return 0.0
    last, rise = update - 1, _warmup_steps(p)
    if last < rise:
        return float(base * (p["warmup_min_ratio"] + (1 - p["warmup_min_ratio"]) * _warmup_progress(last, p)))
    progress = min(1.0, (last - rise + 1) / max(1, p["total_num_steps"] - rise))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return float(base * max(0.0, p["cos_min_ratio"] + (1 - p["cos_min_ratio"]) * cosine))


def one_cycle(update: int, base: float, p: Mapping[str, Any]) -> float:
    """Returns the learning rate of update number ``update``, from 0, in DeepSpeed's OneCycle.

    It rises from ``cycle_min_lr`` to ``cycle_max_lr``, falls back, then decays if ``decay_lr_rate`` and
    ``decay_step_size`` are set.

    Args:
        base: no effect.
        p: params of the schedule, by DeepSpeed's names.
    """
    low, high = p["cycle_min_lr"], p["cycle_max_lr"]
    after = update - _cycle_length(p)
    if update - 1 < _cycle_length(p):
        return float(low + (high - low) * _cycle_position(update, p))
    if not p["decay_step_size"] or not p["decay_lr_rate"]:
        return float(low)
    return float(low / (1 + p["decay_lr_rate"] * after / p["decay_step_size"]))


def one_cycle_momentum(update: int, p: Mapping[str, Any]) -> float:
    """Returns the momentum (beta1) of update number ``update``, from 0, in DeepSpeed's OneCycle.

    After a first update with ``cycle_min_mom``, it falls from ``cycle_max_mom`` to ``cycle_min_mom``, rises back, then
    grows if ``decay_mom_rate`` and ``decay_step_size`` are set.

    Args:
        p: params of the schedule, by DeepSpeed's names.
    """
    low, high = p["cycle_min_mom"], p["cycle_max_mom"]
    after = update - _cycle_length(p)
    if update - 1 < _cycle_length(p):
        return float(high - (high - low) * (_cycle_position(update, p) if update else 1.0))
    if not p["decay_step_size"] or not p["decay_mom_rate"]:
        return float(high)
    return float(high * (1 + p["decay_mom_rate"] * after / p["decay_step_size"]))


def _warmup_steps(p: Mapping[str, Any]) -> int:
    return max(2, int(p["warmup_num_steps"]))


def _warmup_progress(last: int, p: Mapping[str, Any]) -> float:
    rise = _warmup_steps(p)
    if last >= rise:
        return 1.0
    return math.log(last + 1) / math.log(rise) if p["warmup_type"] == "log" else last / rise


def _cycle_length(p: Mapping[str, Any]) -> float:
    second = p["cycle_second_step_size"]
    return float(p["cycle_first_step_size"] + (p["cycle_first_step_size"] if second is None else second))


def _cycle_position(update: int, p: Mapping[str, Any]) -> float:
    """Returns the position in the cycle: 0 at its ends, 1 at its peak; in steps if a stair count is given."""
    length, first = _cycle_length(p), float(p["cycle_first_step_size"])
    inside = update % length
    rising = inside <= first
    stairs = p["cycle_first_stair_count"]
    if not rising and p["cycle_second_stair_count"] is not None:
        stairs = p["cycle_second_stair_count"]
    position = inside / first if rising else (length - inside) / (length - first)
    return math.floor(position * stairs) / stairs if stairs else position


_SCHEDULES: Mapping[str, Callable[..., float]] = {
    "LRRangeTest": lr_range_test,
    "OneCycle": one_cycle,
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
}


class GuardedSteps:
    """Guard of a user's torch scheduler that the engine steps after each update: the user's own calls of ``step`` have
    no effect.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler, self._kind, self._told = scheduler, type(scheduler), False
        # a class of its own, since an attribute of the scheduler would be part of its state_dict
        scheduler.__class__ = type(self._kind.__name__, (self._kind,), {"step": lambda *_, **__: self._leave_out()})

    def make(self) -> None:
        """Makes one step of the guarded scheduler."""
        self._kind.step(self.scheduler)

    def lift(self) -> None:
        """Ends the guard: the user's calls of ``step`` take effect again."""
        self.scheduler.__class__ = self._kind

    def _leave_out(self) -> None:
        if not self._told:
            logger.warning(
                "step() of the %s passed as lr_scheduler has no effect, since the engine calls it after each update; "
                "leave the call out, or do not pass the scheduler.",
                self._kind.__name__,
            )
        self._told = True


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Learning rates and momenta of an optimizer over the course of training. :func:`make_learning_rate` makes it."""

    optimizer: torch.optim.Optimizer
    base: tuple[float, ...]
    """Configured learning rate of each parameter group."""
    schedules: tuple[LrSchedule, ...] = ()
    """Schedule of each group; () if rates are constant, or set by the user or a torch scheduler."""
    momenta: tuple[Momentum, ...] = ()
    """Momentum schedule of each group; () if momentum is constant."""
    scheduler: LRScheduler | None = None
    """torch scheduler, which counts updates itself; None without one."""
    guarded: GuardedSteps | None = None
    """Replaced ``step`` of ``scheduler``, if the script passed it."""
    remake: Callable[[], LRScheduler] | None = None
    """Function that makes the configured torch scheduler again at its first step."""
    _set: dict[int, float] = field(default_factory=dict)
    """Last rate that the schedule set, by group."""
    _told: set[int] = field(default_factory=set)
    """Groups with a logged warning that the schedule overrides the user's rate, and ``_END``."""

    @property
    def governs(self) -> frozenset[str]:
        """Names of the parameter-group options that a schedule sets: a subset of "lr" and "betas"."""
        rates = {"lr"} if self.schedules or self.scheduler is not None else set[str]()
        return frozenset(rates | ({"betas"} if self.momenta else set()))

    def at(self, update: int) -> float:
        """Returns the learning rate of the first parameter group for update number ``update``, from 0.

        If a torch scheduler or the user sets the rates, it is the current rate.
        """
        if not self.schedules:
            return float(self.optimizer.param_groups[0]["lr"])
        return self.schedules[0](update, self.base[0])

    def prepare(self, update: int) -> None:
        """Sets the learning rates and momenta of all parameter groups for update number ``update``, from 0.

        Without a schedule, or with a torch scheduler, rates are unchanged.
        """
        self._tell_end(update)
        for index, (group, base) in enumerate(zip(self.optimizer.param_groups, self.base, strict=True)):
            if self.schedules:
                self._notice(index, float(group["lr"]))
                group["lr"] = self.schedules[index](update, base)
                self._set[index] = group["lr"]
            if self.momenta and "betas" in group:
                group["betas"] = (self.momenta[index](update), 0.99)

    def begin_at(self, update: int) -> None:
        """Moves a resumed run's configured torch scheduler and learning rates to update number ``update``, from 0."""
        assert self.remake is not None and self.scheduler is not None
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group.update(lr=base, initial_lr=base)
        fresh: Any = self.remake()
        fresh.optimizer._opt_called = True  # torch warns of steps without updates between them
        for _ in range(min(update, _length(fresh, update))):
            fresh.step()
        self.scheduler.load_state_dict(fresh.state_dict())

    def _notice(self, index: int, rate: float) -> None:
        """Warns once that a rate which the user set by hand has no effect."""
        if self._set.get(index, rate) != rate and index not in self._told:
            logger.warning(
                "the learning rate of optimizer group %d was set to %g by hand, but the schedule sets it again before "
                "each update; leave the scheduler out to set rates by hand.",
                index,
                rate,
            )
            self._told.add(index)

    @property
    def _ended(self) -> bool:
        """True if a torch scheduler has made all of its steps."""
        if self.scheduler is None:
            return False
        made = getattr(self.scheduler, "last_epoch", 0)  # torch's ChainedScheduler has none
        return bool(made >= _length(self.scheduler, sys.maxsize))

    def _tell_end(self, update: int) -> None:
        """Warns once that updates after the end of a schedule use its last rate."""
        if self._ended and _END not in self._told:
            logger.warning(
                "the %s has ended: update %d and all later ones use its last rate, %g; set its total_steps to the "
                "number of updates of the run.",
                type(self.scheduler).__name__,
                update,
                self.optimizer.param_groups[0]["lr"],
            )
            self._told.add(_END)

    def done(self) -> None:
        """Steps the torch scheduler after an update; does nothing without a torch scheduler or after the schedule's
        end.
        """
        if self._ended:
            return
        if self.guarded is not None:
            self.guarded.make()
        elif self.scheduler is not None:
            self.scheduler.step()


def make_learning_rate(
    optimizer: torch.optim.Optimizer, config: SchedulerConfig | None, given: SchedulerArgument | None
) -> LearningRate:
    """Returns the learning rates of ``optimizer``: they follow the user's schedule ``given``, else the schedule of
    ``config``, else they are constant.

    Args:
        given: function from update number to factor of the initial rate, function from optimizer to LRScheduler, or an
            LRScheduler over the user's optimizer.

    Raises:
        ConfigError: ``given`` returns neither a number nor an LRScheduler, or torch refuses the configured params.
    """
    base = tuple(float(group["lr"]) for group in optimizer.param_groups)
    if isinstance(given, LRScheduler):
        return LearningRate(optimizer, base, scheduler=given, guarded=GuardedSteps(given))
    if given is not None:
        return _from_callable(optimizer, base, given)
    if config is None:
        return LearningRate(optimizer, base)
    if config.type in TORCH_SCHEDULERS:
        remake = partial(getattr(torch.optim.lr_scheduler, config.type), optimizer, **_lists(config.params))
        return LearningRate(optimizer, base, scheduler=_made(config.type, remake), remake=remake)
    schedule, params = _SCHEDULES[config.type], params_by_group(config.params, len(base))
    moved = config.type == "OneCycle" and config.params["cycle_momentum"]
    momenta = tuple(partial(one_cycle_momentum, p=p) for p in params) if moved else ()
    return LearningRate(optimizer, base, tuple(partial(schedule, p=p) for p in params), momenta)


def _made(kind: str, make: Callable[[], LRScheduler]) -> LRScheduler:
    try:
        return make()
    except ValueError as error:
        raise ConfigError(
            f"scheduler: torch's {kind} refuses this optimizer or these params: {str(error).rstrip('.')}; change them."
        ) from error


def _length(scheduler: LRScheduler, otherwise: int) -> int:
    """Returns the number of steps that a scheduler can make; ``otherwise`` if it has no end."""
    length = getattr(scheduler, "total_steps", None)
    return length if isinstance(length, int) else otherwise


def _lists(params: Mapping[str, Any]) -> dict[str, Any]:
    """Converts tuples of a configuration to the lists that torch expects."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}


def params_by_group(params: Mapping[str, Any], groups: int) -> list[Mapping[str, Any]]:
    """Returns the schedule params of each of ``groups`` parameter groups.

    A list in ``params`` has one number for each group; any other value applies to all.

    Raises:
        ConfigError: a list in ``params`` has another length than ``groups``.
    """
    for key, value in params.items():
        if isinstance(value, list | tuple) and len(value) != groups:
            raise ConfigError(
                f"scheduler.params.{key} is a list of {len(value)} numbers, but the optimizer has {groups} "
                f"parameter group{'s' * (groups > 1)}; give one number for each group, or one for all."
            )
    entries = params.items()
    return [{k: v[index] if isinstance(v, list | tuple) else v for k, v in entries} for index in range(groups)]


def check_scheduler(scheduler: SchedulerArgument | None, optimizer: object) -> None:
    """Raises if the engine cannot use the user's ``scheduler`` with the user's ``optimizer``.

    Raises:
        ConfigError: ``scheduler`` was made over another optimizer, or its steps need a metric (ReduceLROnPlateau).
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(f"lr_scheduler is {_METRIC}")
    if isinstance(scheduler, LRScheduler) and scheduler.optimizer is not optimizer:
        kind = type(scheduler).__name__
        raise ConfigError(
            f"lr_scheduler is a {kind} over another optimizer than the passed one; pass its own optimizer as "
            f"optimizer=..., or lr_scheduler=lambda optimizer: {kind}(optimizer, ...)."
        )


def schedule_words(scheduler: SchedulerArgument | None) -> str:
    """Returns words for the user's ``scheduler``: its attribute ``words``, or "schedule given in code"; "" for None."""
    return "" if scheduler is None else str(getattr(scheduler, "words", "schedule given in code"))


_METRIC = (
    "a ReduceLROnPlateau, which needs a metric at each step; pass a schedule of the step alone, or set the lr of "
    "eng.optimizer's groups yourself."
)


def _from_callable(
    optimizer: torch.optim.Optimizer, base: tuple[float, ...], given: Callable[[Any], Any]
) -> LearningRate:
    try:
        made, failure = given(optimizer), None
    except ConfigError:
        raise
    except Exception as error:  # a factor function may fail on an optimizer in any way
        made, failure = None, error
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(f"lr_scheduler returned {_METRIC}")
    if isinstance(made, LRScheduler):
        return LearningRate(optimizer, base, scheduler=made, guarded=GuardedSteps(made))
    try:
        float(given(0))
    except Exception as error:
        raise ConfigError(
            f"lr_scheduler {given!r} returned neither a number for update 0 nor an LRScheduler for the optimizer; pass "
            "a callable update -> factor or optimizer -> torch.optim.lr_scheduler.LRScheduler."
        ) from (failure or error)
    return LearningRate(optimizer, base, (lambda update, lr: lr * float(given(update)),) * len(base))


class UpdateScheduler(LRScheduler):
    """Base class of torch schedulers with learning rates that depend only on the number of the update.

    Args:
        optimizer: optimizer with the parameter groups that receive the rates.
        last_batch_iteration: number of the last update made, from 0; -1: a new run, and the rates are set at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        # LRScheduler's constructor is left out: it refuses a position above -1 for an optimizer that it has not seen
        self.optimizer = optimizer
        self.base_lrs = [float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.last_epoch = last_batch_iteration + 1
        if last_batch_iteration == -1:
            self._show()

    @abstractmethod
    def rates(self, update: int) -> list[float]:
        """Returns the learning rate of each parameter group for update number ``update``, from 0."""

    @property
    def last_batch_iteration(self) -> int:
        """Number of the last update that was made, from 0; -1 before the first update."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the learning rate of each parameter group for the next update."""
        return list(self.rates(self.last_epoch))

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Returns the learning rate that each parameter group last received."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Sets the learning rates of the next update; call it after each update.

        Args:
            last_batch_iteration: number of the update that was just made, from 0; None: one more than at the last call.
        """
        self._place(1 + (self.last_epoch if last_batch_iteration is None else last_batch_iteration))

    def state_dict(self) -> dict[str, Any]:
        """Returns ``{"last_batch_iteration": N}`` with the number N of the last update."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the number of the last update, and sets the rates of the next update.

        ``state_dict`` may also come from a torch scheduler.
        """
        # an engine that makes the steps has replaced ``step``
        self._place(state_dict.get("last_epoch", state_dict.get("last_batch_iteration", -1) + 1))

    def _place(self, update: int) -> None:
        self.last_epoch = update
        self._show()

    def _show(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates(self.last_epoch), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
