"""``deepspeed.runtime.lr_schedules``: its five schedules as torch schedulers, usable without an engine.

Options follow the rules of the configuration; ``initialize`` returns the schedule that the configuration names.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from engine.config.optim_sections import SCHEDULERS
from engine.config.reader import read_section, stored
from engine.config.rules import Problems
from engine.errors import ConfigError
from engine.optim.lr_schedules import (
    UpdateScheduler,
    lr_range_test,
    one_cycle,
    one_cycle_momentum,
    params_by_group,
    warmup,
    warmup_cosine,
    warmup_decay,
)

logger = logging.getLogger("trine")

Rates = float | Sequence[float]
"""Learning rate of all parameter groups, or one for each group."""
_Rule = Callable[[int, float, Mapping[str, Any]], float]


class ScheduleValueError(ConfigError, ValueError):
    """Error about an invalid scheduler option; also a ValueError, as in DeepSpeed."""


class _Scheduled(UpdateScheduler):
    """Base of DeepSpeed's schedules: a rule of the update number and its options."""

    _rule: _Rule

    def __init__(self, optimizer: Any, options: Mapping[str, Any], last_batch_iteration: int) -> None:
        inner = _torch_optimizer(optimizer)
        self.params = _checked(type(self).__name__, options)
        try:
            self._by_group = params_by_group(self.params, len(inner.param_groups))
        except ConfigError as error:
            raise ScheduleValueError(str(error)) from None
        super().__init__(inner, last_batch_iteration)

    def rates(self, update: int) -> list[float]:
        """Returns the learning rate of each group in update number ``update``."""
        rule = type(self)._rule
        return [rule(update, float(base), own) for base, own in zip(self.base_lrs, self._by_group, strict=True)]

    def _each(self, option: str) -> list[Any]:
        """Returns an option for each group."""
        return [own[option] for own in self._by_group]


class LRRangeTest(_Scheduled):
    """Scheduler that raises the learning rate without end, to find the largest rate with stable training.

    The rate is ``lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)``. ``interval`` is the number of
    updates divided by ``lr_range_test_step_size``, rounded down with ``lr_range_test_staircase``.
    """

    _rule = staticmethod(lr_range_test)

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr_range_test_min_lr: Rates = 1e-3, lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, {
            "lr_range_test_min_lr": lr_range_test_min_lr, "lr_range_test_step_size": lr_range_test_step_size,
            "lr_range_test_step_rate": lr_range_test_step_rate, "lr_range_test_staircase": lr_range_test_staircase,
        }, last_batch_iteration)  # fmt: skip
        self.min_lr, self.step_size = self._each("lr_range_test_min_lr"), lr_range_test_step_size
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase


class OneCycle(_Scheduled):
    """Scheduler of one cycle: the learning rate rises from ``cycle_min_lr`` to ``cycle_max_lr``, falls back, then
    decays.

    With ``cycle_momentum``, Adam's first beta moves opposite to the rate.
    """

    _rule = staticmethod(one_cycle)
    cycle_momentum = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: Rates, cycle_max_lr: Rates, decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None, decay_step_size: int = 0, cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8, cycle_max_mom: Rates = 0.9, decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, {
            "cycle_min_lr": cycle_min_lr, "cycle_max_lr": cycle_max_lr, "decay_lr_rate": decay_lr_rate,
            "cycle_first_step_size": cycle_first_step_size, "cycle_second_step_size": cycle_second_step_size,
            "cycle_first_stair_count": cycle_first_stair_count, "cycle_second_stair_count": cycle_second_stair_count,
            "decay_step_size": decay_step_size, "cycle_momentum": cycle_momentum, "cycle_min_mom": cycle_min_mom,
            "cycle_max_mom": cycle_max_mom, "decay_mom_rate": decay_mom_rate,
        }, last_batch_iteration)  # fmt: skip
        self.min_lrs, self.max_lrs = self._each("cycle_min_lr"), self._each("cycle_max_lr")
        first, second = cycle_first_step_size, cycle_second_step_size
        self.total_size = float(first + (first if second is None else second))
        self.step_ratio = first / self.total_size
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            logger.warning(
                "OneCycle moves no momentum of %s, whose options have no betas; set cycle_momentum to False.",
                type(self.optimizer).__name__,
            )
        if last_batch_iteration == -1:
            self._show()

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns the pair of betas of each parameter group for the next update; None without ``cycle_momentum``.

        Before the first update, the first beta in the result is ``cycle_max_mom``, as in DeepSpeed, but the update uses
        ``cycle_min_mom``.
        """
        if not self.cycle_momentum:
            return None
        return self._betas() if self.last_epoch else [(own["cycle_max_mom"], 0.99) for own in self._by_group]

    def _betas(self) -> list[tuple[float, float]]:
        return [(one_cycle_momentum(self.last_epoch, own), 0.99) for own in self._by_group]

    def _show(self) -> None:
        super()._show()
        shown = self._betas() if self.cycle_momentum else ()
        for group, betas in zip(self.optimizer.param_groups, shown, strict=False):
            group["betas"] = betas


class WarmupLR(_Scheduled):
    """Scheduler that raises the learning rate from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``
    steps, then leaves it constant.

    ``warmup_max_lr=None``: the optimizer's own rate. ``warmup_type``: shape of the rise, "log" or "linear".
    """

    _rule = staticmethod(warmup)

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: Rates = 0.0, warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, {
            "warmup_min_lr": warmup_min_lr, "warmup_max_lr": warmup_max_lr, "warmup_num_steps": warmup_num_steps,
            "warmup_type": _shape(warmup_type),
        }, last_batch_iteration)  # fmt: skip
        _remember_warmup(self)


class WarmupDecayLR(_Scheduled):
    """Scheduler that raises the learning rate from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``
    steps, then lowers it linearly to ``warmup_min_lr`` at step ``total_num_steps``.

    ``warmup_max_lr=None``: the optimizer's own rate.
    """

    _rule = staticmethod(warmup_decay)

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001, warmup_num_steps: int = 1000, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, {
            "total_num_steps": total_num_steps, "warmup_min_lr": warmup_min_lr, "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps, "warmup_type": _shape(warmup_type),
        }, last_batch_iteration)  # fmt: skip
        _remember_warmup(self)
        self.total_num_steps = total_num_steps


class WarmupCosineLR(_Scheduled):
    """Scheduler that raises the learning rate to the optimizer's own rate, then lowers it along a cosine.

    The rise starts at ``warmup_min_ratio`` times this rate and takes ``warmup_num_steps`` steps. The cosine ends at
    ``cos_min_ratio`` times this rate, at step ``total_num_steps``.
    """

    _rule = staticmethod(warmup_cosine)

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, {
            "total_num_steps": total_num_steps, "warmup_min_ratio": warmup_min_ratio, "cos_min_ratio": cos_min_ratio,
            "warmup_num_steps": warmup_num_steps, "warmup_type": _shape(warmup_type),
        }, last_batch_iteration)  # fmt: skip
        self.warmup_type, self.warmup_num_steps = self.params["warmup_type"], max(2, warmup_num_steps)
        self.total_num_steps, self.cos_min_ratio = total_num_steps, cos_min_ratio
        self.org_lrs = list(self.base_lrs)

    def get_lr_ratio(self) -> float:
        """Returns the number, 0 to 1, by which the optimizer's own rate is multiplied for the next update."""
        return warmup_cosine(self.last_epoch, 1.0, self.params)


SCHEDULES: Mapping[str, type[_Scheduled]] = MappingProxyType({
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
})  # fmt: skip
VALID_LR_SCHEDULES = [*SCHEDULES]


def _remember_warmup(schedule: _Scheduled) -> None:
    """Sets the attributes of DeepSpeed's warmups: rates of each group, shape and length."""
    given = zip(schedule.base_lrs, schedule._each("warmup_max_lr"), strict=True)
    high = [base if own is None else own for base, own in given]
    vars(schedule).update(
        min_lrs=schedule._each("warmup_min_lr"),
        max_lrs=high,
        warmup_type=schedule.params["warmup_type"],
        warmup_num_steps=max(2, schedule.params["warmup_num_steps"]),
    )


def _shape(given: Any) -> Any:
    if given not in ("log", "linear"):
        logger.warning('warmup_type %r is neither "log" nor "linear"; the warmup uses "log".', given)
        return "log"
    return given


def _torch_optimizer(given: Any) -> torch.optim.Optimizer:
    """Returns the optimizer itself, or a wrapper's attribute ``optimizer``."""
    found = given if isinstance(given, torch.optim.Optimizer) else getattr(given, "optimizer", None)
    if isinstance(found, torch.optim.Optimizer):
        return found
    raise TypeError(f"a schedule was given a {type(given).__name__}; pass a torch.optim.Optimizer.")


def _checked(kind: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options, checked by the rules of the configuration."""
    problems = Problems(kind)
    read = read_section(SCHEDULERS[kind], dict(options), kind, problems)
    if options.get("warmup_num_steps") == 0:
        problems.add(f"{kind}.warmup_num_steps", "0 steps are no warmup; set a whole number above 0.")
    try:
        problems.raise_if_any()
    except ConfigError as error:
        raise ScheduleValueError(str(error)) from None
    return stored(read, everything=True)
