"""Parameters of each built-in optimizer, by the names of the libraries that its users know."""

from dataclasses import dataclass, replace
from typing import Literal

from engine.config.reader import setting
from engine.config.rules import Choice, Flag, Int, ListOf, Real, Rule

SIZE = Int(low=1)
COUNT = Int(low=0)
NOT_NEGATIVE = Real(low=0)
FACTOR = Real(low=0, below=1)


def one_of(*options: str, noun: str) -> Rule:
    """A rule for a word of a list."""
    return Choice(options=options, noun=noun)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWParams:
    """Parameters of AdamW, with torch's defaults."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.999), ListOf(
        each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1"))  # fmt: skip
    """Decay rates of the running averages of the gradient and of its square."""
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the denominator."""
    weight_decay: float = setting(0.01, NOT_NEGATIVE)
    """Decoupled weight decay."""
    bias_correction: bool = setting(True, Flag())
    """Divide both averages by what they lack in the first updates; false, as in BERT's Adam, does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams(AdamWParams):
    """Parameters of Adam with weight decay in the gradient; "Adam" is AdamW unless adam_w_mode is false."""

    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    adam_w_mode: bool = setting(False, Flag(), kept=False)
    """false selects Adam as published; true, DeepSpeed's default, makes it AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW8bitParams(AdamWParams):
    """Parameters of AdamW whose moments take 8 bits an element, under the name of bitsandbytes and torchao."""

    block_size: Literal[64, 128, 256, 512, 1024, 2048] = setting(256, Choice(
        options=(64, 128, 256, 512, 1024, 2048), noun="a number of elements that share a scale"))  # fmt: skip
    """Elements of a moment that share a scale (fp32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdParams:
    """Parameters of stochastic gradient descent, with torch's defaults."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate."""
    momentum: float = setting(0.0, NOT_NEGATIVE)
    """Momentum factor."""
    dampening: float = setting(0.0, Real())
    """Dampening of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    nesterov: bool = setting(False, Flag())
    """Nesterov momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LionParams:
    """Parameters of Lion, which steps by the sign of an interpolated momentum."""

    lr: float = setting(1e-4, NOT_NEGATIVE)
    """Learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.99), ListOf(
        each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1"))  # fmt: skip
    """Interpolation weight of the update, and decay rate of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonParams:
    """Parameters of Muon, with torch's defaults: momentum whose singular values are brought near one."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate."""
    weight_decay: float = setting(0.1, NOT_NEGATIVE)
    """Decoupled weight decay."""
    momentum: float = setting(0.95, FACTOR)
    """Decay rate of the momentum."""
    nesterov: bool = setting(True, Flag())
    """Nesterov momentum."""
    ns_coefficients: tuple[float, float, float] = setting((3.4445, -4.775, 2.0315), ListOf(
        each=Real(), length=3, noun="a list of three numbers"))  # fmt: skip
    """Coefficients of the Newton-Schulz polynomial, of x, x^3 and x^5."""
    eps: float = setting(1e-7, NOT_NEGATIVE)
    """Least norm by which a matrix is divided."""
    ns_steps: int = setting(5, Int(low=1, below=100))
    """Newton-Schulz steps."""
    ns_dtype: Literal["bf16", "fp32"] = setting("bf16", one_of("bf16", "fp32", noun="a dtype of Newton-Schulz steps"))
    """Dtype of their products; bf16 as in torch."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = setting("original", one_of(
        "original", "match_rms_adamw", noun="an adjustment"))  # fmt: skip
    """Factor of the rate of an A x B matrix: sqrt(max(1, A/B)), or 0.2 sqrt(max(A, B)), the RMS of AdamW's updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorParams:
    """Parameters of Adafactor, with torch's defaults: second moments of matrices as a row and a column of means."""

    lr: float = setting(1e-2, NOT_NEGATIVE)
    """Largest relative step; later updates make 1 / sqrt(update) at most."""
    beta2_decay: float = setting(-0.8, Real(high=0))
    """Power of the update number with which new squares enter the means."""
    eps: tuple[float | None, float] = setting((None, 1e-3), ListOf(
        each=replace(NOT_NEGATIVE, null=True), length=2,
        noun="a list of two numbers, of which the first may be null"))  # fmt: skip
    """Least root of a mean square, null for that of the dtype, and least RMS of the weights that a step relates to."""
    d: float = setting(1.0, Real(above=0))
    """RMS to which an update is clipped."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFreeAdamWParams:
    """Parameters of schedule-free AdamW, which averages its iterates and needs no decay of the rate."""

    lr: float = setting(2.5e-3, NOT_NEGATIVE)
    """Learning rate, at which the run stays."""
    betas: tuple[float, float] = setting((0.9, 0.999), ListOf(
        each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1"))  # fmt: skip
    """Weight of the average in the point where gradients are taken, above 0, and decay rate of the mean square."""
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the denominator."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, at the point where gradients are taken."""
    warmup_steps: int = setting(0, COUNT)
    """Updates over which the rate rises linearly."""
    r: float = setting(0.0, NOT_NEGATIVE)
    """Power of the update number in the weight of an iterate."""
    weight_lr_power: float = setting(2.0, NOT_NEGATIVE)
    """Power of the largest rate so far in that weight."""
