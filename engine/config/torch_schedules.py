"""Learning rate schedules of ``torch.optim.lr_scheduler`` that a configuration can name, with torch's defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from engine.config.reader import setting
from engine.config.rules import Choice, Flag, Int, ListOf, Real

_SIZE = Int(low=1)
_NOT_NEGATIVE = Real(low=0)
_FACTOR = Real(low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLRParams:
    """Fraction of the rate for some steps, then the rate."""

    factor: float = setting(1 / 3, _FACTOR)
    """Fraction of the rate at the start."""
    total_iters: int = setting(5, _SIZE)
    """Steps with the fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLRParams:
    """Linear change from one fraction of the rate to another."""

    start_factor: float = setting(1 / 3, Real(above=0, high=1))
    """Fraction of the rate at the start."""
    end_factor: float = setting(1.0, _FACTOR)
    """Fraction of the rate at the end."""
    total_iters: int = setting(5, _SIZE)
    """Steps of the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialLRParams:
    """Decay by a factor in each step."""

    gamma: float = setting(1.0, Real(above=0), required=True)
    """Factor of each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialLRParams:
    """Decay to zero along a polynomial."""

    total_iters: int = setting(5, _SIZE)
    """Steps of the decay."""
    power: float = setting(1.0, Real(above=0))
    """Power of the polynomial; 1 is a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLRParams:
    """Decay by a factor every so many steps."""

    step_size: int = setting(1, _SIZE, required=True)
    """Steps between two decays."""
    gamma: float = setting(0.1, Real(above=0))
    """Factor of a decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiStepLRParams:
    """Decay by a factor at given steps."""

    milestones: tuple[int, ...] = setting((), ListOf(each=_SIZE, noun="a list of steps"), required=True)
    """Steps of the decays."""
    gamma: float = setting(0.1, Real(above=0))
    """Factor of a decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineAnnealingLRParams:
    """Cosine down to the lowest rate (Loshchilov and Hutter 2017)."""

    T_max: int = setting(1, _SIZE, required=True)
    """Steps to the lowest rate."""
    eta_min: float = setting(0.0, _NOT_NEGATIVE)
    """The lowest rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineAnnealingWarmRestartsParams:
    """Cosines in sequence, each from the full rate (Loshchilov and Hutter 2017)."""

    T_0: int = setting(1, _SIZE, required=True)
    """Steps of the first cosine."""
    T_mult: int = setting(1, _SIZE)
    """Factor by which each cosine is longer than the previous one."""
    eta_min: float = setting(0.0, _NOT_NEGATIVE)
    """The lowest rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycleLRParams:
    """One cycle up and down, in torch's form (Smith 2018)."""

    max_lr: float = setting(1e-3, _NOT_NEGATIVE, required=True)
    """Rate at the peak."""
    total_steps: int = setting(1, _SIZE, required=True)
    """Steps of the whole training."""
    pct_start: float = setting(0.3, Real(low=0, below=1))
    """Fraction of the steps that rise."""
    anneal_strategy: Literal["cos", "linear"] = setting("cos", Choice(options=("cos", "linear"), noun="a strategy"))
    """Shape of rise and fall."""
    cycle_momentum: bool = setting(True, Flag())
    """Move the momentum opposite to the rate."""
    base_momentum: float = setting(0.85, _FACTOR)
    """Momentum at the peak of the rate."""
    max_momentum: float = setting(0.95, _FACTOR)
    """Momentum at the start and the end."""
    div_factor: float = setting(25.0, Real(above=0))
    """Ratio of the peak to the rate at the start."""
    final_div_factor: float = setting(1e4, Real(above=0))
    """Ratio of the rate at the start to the rate at the end."""
    three_phase: bool = setting(False, Flag())
    """Fall to the rate at the start first, and below it in a third phase."""


TORCH_SCHEDULERS: Mapping[str, type[Any]] = MappingProxyType({
    "ConstantLR": ConstantLRParams, "LinearLR": LinearLRParams, "ExponentialLR": ExponentialLRParams,
    "PolynomialLR": PolynomialLRParams, "StepLR": StepLRParams, "MultiStepLR": MultiStepLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams, "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "OneCycleLR": OneCycleLRParams,
})  # fmt: skip
