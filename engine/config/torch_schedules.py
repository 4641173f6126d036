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
    """Parameters of ConstantLR, which multiplies the learning rate by ``factor`` in the first ``total_iters`` steps."""

    factor: float = setting(1 / 3, _FACTOR)
    """Fraction of the learning rate at the start."""
    total_iters: int = setting(5, _SIZE)
    """Number of steps with the reduced rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLRParams:
    """Parameters of LinearLR, which changes the learning rate linearly from one fraction of the configured rate to
    another.
    """

    start_factor: float = setting(1 / 3, Real(above=0, high=1))
    """Fraction of the learning rate at the start."""
    end_factor: float = setting(1.0, _FACTOR)
    """Fraction of the learning rate at the end."""
    total_iters: int = setting(5, _SIZE)
    """Number of steps of the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialLRParams:
    """Parameters of ExponentialLR, which multiplies the learning rate by ``gamma`` in every step."""

    gamma: float = setting(1.0, Real(above=0), required=True)
    """Factor of the learning rate in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialLRParams:
    """Parameters of PolynomialLR, which lowers the learning rate to 0 along a polynomial."""

    total_iters: int = setting(5, _SIZE)
    """Number of steps until the rate is 0."""
    power: float = setting(1.0, Real(above=0))
    """Power of the polynomial; 1 is a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLRParams:
    """Parameters of StepLR, which multiplies the learning rate by ``gamma`` every ``step_size`` steps."""

    step_size: int = setting(1, _SIZE, required=True)
    """Number of steps between two decays."""
    gamma: float = setting(0.1, Real(above=0))
    """Factor of the learning rate at each decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiStepLRParams:
    """Parameters of MultiStepLR, which multiplies the learning rate by ``gamma`` at each of the ``milestones``."""

    milestones: tuple[int, ...] = setting((), ListOf(each=_SIZE, noun="a list of steps"), required=True)
    """Step numbers of the decays."""
    gamma: float = setting(0.1, Real(above=0))
    """Factor of the learning rate at each decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineAnnealingLRParams:
    """Parameters of a learning rate that falls along a cosine to ``eta_min`` (Loshchilov and Hutter 2017)."""

    T_max: int = setting(1, _SIZE, required=True)
    """Number of steps until the rate is ``eta_min``."""
    eta_min: float = setting(0.0, _NOT_NEGATIVE)
    """Lowest learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineAnnealingWarmRestartsParams:
    """Parameters of a learning rate that falls along a cosine repeatedly, from its full value (Loshchilov and Hutter
    2017).
    """

    T_0: int = setting(1, _SIZE, required=True)
    """Number of steps of the first cosine."""
    T_mult: int = setting(1, _SIZE)
    """Factor by which each cosine has more steps than the previous one."""
    eta_min: float = setting(0.0, _NOT_NEGATIVE)
    """Lowest learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycleLRParams:
    """Parameters of torch's OneCycleLR: the learning rate rises and falls once (Smith 2018)."""

    max_lr: float = setting(1e-3, _NOT_NEGATIVE, required=True)
    """Learning rate at the peak."""
    total_steps: int = setting(1, _SIZE, required=True)
    """Number of steps of the whole training."""
    pct_start: float = setting(0.3, Real(low=0, below=1))
    """Fraction of the steps in which the rate rises."""
    anneal_strategy: Literal["cos", "linear"] = setting("cos", Choice(options=("cos", "linear"), noun="a strategy"))
    """Curve of rise and fall: cosine or linear."""
    cycle_momentum: bool = setting(True, Flag())
    """True moves the momentum opposite to the learning rate."""
    base_momentum: float = setting(0.85, _FACTOR)
    """Momentum at the peak of the learning rate."""
    max_momentum: float = setting(0.95, _FACTOR)
    """Momentum at the start and the end of training."""
    div_factor: float = setting(25.0, Real(above=0))
    """Ratio of the peak learning rate to the initial one."""
    final_div_factor: float = setting(1e4, Real(above=0))
    """Ratio of the initial learning rate to the final one."""
    three_phase: bool = setting(False, Flag())
    """True first falls to the initial rate, and below it in a third phase."""


TORCH_SCHEDULERS: Mapping[str, type[Any]] = MappingProxyType({
    "ConstantLR": ConstantLRParams, "LinearLR": LinearLRParams, "ExponentialLR": ExponentialLRParams,
    "PolynomialLR": PolynomialLRParams, "StepLR": StepLRParams, "MultiStepLR": MultiStepLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams, "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "OneCycleLR": OneCycleLRParams,
})  # fmt: skip
