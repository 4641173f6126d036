"""Sections of the optimizer and of the learning rate schedule: what each kind of them takes.

Names are DeepSpeed's, and torch's for the schedules of ``torch.optim.lr_scheduler``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from engine.config.optimizers.params import (
    COUNT,
    FACTOR,
    NOT_NEGATIVE,
    SIZE,
    AdafactorParams,
    AdamParams,
    AdamW8bitParams,
    AdamWParams,
    LionParams,
    MuonParams,
    ScheduleFreeAdamWParams,
    SgdParams,
    one_of,
)
from engine.config.reader import Sections, setting, stored
from engine.config.rules import AnyOf, Choice, Flag, Int, ListOf, Real, Text
from engine.config.torch_schedules import TORCH_SCHEDULERS

GLOBS = ListOf(each=Text(), noun='a list of name patterns such as ["*.bias"]')


RATES = AnyOf(
    rules=(NOT_NEGATIVE, ListOf(each=NOT_NEGATIVE, noun="a list of rates")),
    remedy="give a number of at least 0, or a list of one number for each parameter group",
)
"""Rate of all groups, or one of each."""
RATES_OR_NULL = replace(RATES, null=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRangeTestParams:
    """Learning rate that grows step by step, to find the range that trains."""

    lr_range_test_min_lr: float | tuple[float, ...] = setting(1e-3, RATES)
    """Rate at the start."""
    lr_range_test_step_size: int = setting(2000, SIZE)
    """Steps between two increases."""
    lr_range_test_step_rate: float = setting(1.0, NOT_NEGATIVE)
    """Increase per step_size, as a fraction of the rate at the start."""
    lr_range_test_staircase: bool = setting(False, Flag())
    """Increase in stairs instead of continuously."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycleParams:
    """One cycle of the learning rate up and down, with the momentum moving opposite, then decay."""

    cycle_min_lr: float | tuple[float, ...] = setting(0.0, RATES, required=True)
    """Rate at the start and the end of the cycle."""
    cycle_max_lr: float | tuple[float, ...] = setting(0.0, RATES, required=True)
    """Rate at the peak of the cycle."""
    decay_lr_rate: float = setting(0.0, NOT_NEGATIVE)
    """Decay of the rate after the cycle."""
    cycle_first_step_size: int = setting(2000, SIZE)
    """Steps of the rise."""
    cycle_second_step_size: int | None = setting(None, Int(low=1, null=True))
    """Steps of the fall; null takes as many as the rise."""
    cycle_first_stair_count: int = setting(0, COUNT)
    """Stairs of the rise; 0 rises continuously."""
    cycle_second_stair_count: int | None = setting(None, Int(low=0, null=True))
    """Stairs of the fall; null takes as many as the rise."""
    decay_step_size: int = setting(0, COUNT)
    """Steps per decay after the cycle; 0 means no decay."""
    cycle_momentum: bool = setting(True, Flag())
    """Cycle the momentum as well."""
    cycle_min_mom: float = setting(0.8, FACTOR)
    """Momentum at the peak of the rate."""
    cycle_max_mom: float = setting(0.9, FACTOR)
    """Momentum at the start and the end of the cycle."""
    decay_mom_rate: float = setting(0.0, NOT_NEGATIVE)
    """Decay of the momentum after the cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLRParams:
    """Learning rate that rises and then stays."""

    warmup_min_lr: float | tuple[float, ...] = setting(0.0, RATES)
    """Rate at the start; a list gives one for each parameter group."""
    warmup_max_lr: float | tuple[float, ...] | None = setting(None, RATES_OR_NULL)
    """Rate after the warmup, or a list of them; null uses the optimizer's."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Steps of the warmup."""
    warmup_type: Literal["log", "linear"] = setting("log", one_of("log", "linear", noun="a warmup type"))
    """Shape of the warmup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecayLRParams(WarmupLRParams):
    """Learning rate that rises and then falls linearly to its minimum."""

    total_num_steps: int = setting(1, SIZE, required=True)
    """Steps of the whole training."""
    warmup_max_lr: float | tuple[float, ...] | None = setting(0.001, RATES_OR_NULL)
    """Rate after the warmup, or a list of them; null uses the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosineLRParams:
    """Learning rate that rises and then falls along a cosine; all values are fractions of the optimizer's rate."""

    total_num_steps: int = setting(1, SIZE, required=True)
    """Steps of the whole training."""
    warmup_min_ratio: float = setting(0.0, NOT_NEGATIVE)
    """Fraction at the start."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Steps of the warmup."""
    cos_min_ratio: float = setting(1e-4, NOT_NEGATIVE)
    """Fraction at the end."""
    warmup_type: Literal["log", "linear"] = setting("log", one_of("log", "linear", noun="a warmup type"))
    """Shape of the warmup."""


OPTIMIZERS: Mapping[str, type[Any]] = MappingProxyType({
    "AdamW": AdamWParams, "Adam": AdamParams, "SGD": SgdParams, "Lion": LionParams, "Muon": MuonParams,
    "AdamW8bit": AdamW8bitParams, "Adafactor": AdafactorParams, "ScheduleFreeAdamW": ScheduleFreeAdamWParams,
})  # fmt: skip
MATRIX_OPTIMIZERS = frozenset({"Muon"})
"""Those that update a matrix as a whole, and take nothing but matrices."""
SCHEDULERS: Mapping[str, type[Any]] = MappingProxyType({
    "LRRangeTest": LRRangeTestParams, "OneCycle": OneCycleParams, "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams, "WarmupCosineLR": WarmupCosineLRParams, **TORCH_SCHEDULERS,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Parameters with a learning rate or weight decay of their own."""

    params: tuple[str, ...] = setting((), GLOBS, required=True)
    """Patterns of the original parameter names."""
    lr: float | None = setting(None, Real(low=0, null=True))
    """Learning rate of the group; null uses the optimizer's."""
    weight_decay: float | None = setting(None, Real(low=0, null=True))
    """Weight decay of the group; null uses the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its parameter groups."""

    type: Literal[
        "AdamW", "Adam", "SGD", "Lion", "Muon", "AdamW8bit", "Adafactor", "ScheduleFreeAdamW"
    ] = setting("AdamW", Choice(
        options=tuple(OPTIMIZERS), noun="built in", fold=True,
        remedy="give AdamW, Adam, SGD, Lion, Muon, AdamW8bit, Adafactor or ScheduleFreeAdamW, or pass optimizer=... "
        "to engine.initialize"))  # fmt: skip
    """AdamW, Adam, SGD, Lion, Muon, AdamW8bit, Adafactor or ScheduleFreeAdamW, in any letter case."""
    params: Mapping[str, Any] = stored(AdamWParams())
    """Settings of the chosen optimizer, with all defaults filled in."""
    no_weight_decay: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of parameters without weight decay."""
    groups: tuple[GroupConfig, ...] = setting((), Sections(cls=GroupConfig))
    """Parameters with a learning rate or weight decay of their own."""
    update_unused: bool = setting(False, Flag())
    """Update parameters without a gradient in a step by decay and momentum, as DeepSpeed does; false: as torch, no."""
    include_frozen: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of frozen parameters that may be thawed later, with memory for gradient and optimizer state."""
    before: tuple["MatchedOptimizerConfig", ...] = ()
    """Optimizers of a list before the last one: each takes the parameters that it is the first to match."""

    @property
    def entries(self) -> "tuple[OptimizerConfig, ...]":
        """All optimizers of a list in order; this one, which takes the rest, is the last."""
        return (*self.before, self)

    @property
    def kind(self) -> str:
        """The types of all entries, such as "Muon + AdamW"."""
        return " + ".join(dict.fromkeys(entry.type for entry in self.entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedOptimizerConfig(OptimizerConfig):
    """An optimizer of a list, before the last one."""

    match: str | tuple[str, ...] = setting((), AnyOf(rules=(Text(), GLOBS)), required=True)
    """Name patterns of the parameters that it updates."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """``match`` as a list."""
        return (self.match,) if isinstance(self.match, str) else self.match


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Learning rate schedule."""

    type: str = setting("WarmupLR", Choice(options=tuple(SCHEDULERS), noun="a scheduler", fold=True), required=True)
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR as in DeepSpeed, or a schedule of torch's."""
    params: Mapping[str, Any] = stored(WarmupLRParams())
    """Settings of the chosen scheduler, with all defaults filled in."""
