"""Sections of the optimizer and of the learning rate schedule, with the params of each type.

Names are DeepSpeed's, and torch's for the schedules of ``torch.optim.lr_scheduler``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from engine.config.reader import Sections, setting, stored
from engine.config.rules import AnyOf, Choice, Flag, Int, ListOf, Real, Rule, Text
from engine.config.torch_schedules import TORCH_SCHEDULERS

SIZE = Int(low=1)
COUNT = Int(low=0)
NOT_NEGATIVE = Real(low=0)
FACTOR = Real(low=0, below=1)
RATIO = Real(low=0, high=1)
BETAS = ListOf(each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1")
GLOBS = ListOf(each=Text(), noun='a list of name patterns such as ["*.bias"]')


RATES = AnyOf(
    rules=(NOT_NEGATIVE, ListOf(each=NOT_NEGATIVE, least=1, noun="a list of rates")),
    remedy="give a number of at least 0, or a list of one number for each parameter group",
)
"""Rule for a learning rate of all parameter groups, or a list with one rate for each group."""
RATES_OR_NULL = replace(RATES, null=True)
MOMENTA = AnyOf(
    rules=(FACTOR, ListOf(each=FACTOR, least=1, noun="a list of momenta")),
    remedy="give a number from 0 to below 1, or a list of one number for each parameter group",
)
"""Rule for a momentum of all parameter groups, or a list with one momentum for each group."""


def one_of(*options: str, noun: str) -> Rule:
    """Returns a rule that accepts one of the words ``options``; ``noun`` names such a word in an error."""
    return Choice(options=options, noun=noun)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWParams:
    """Parameters of AdamW, with torch's defaults."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate, which a schedule may change."""
    betas: tuple[float, float] = setting((0.9, 0.999), BETAS)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the root of the second moment."""
    weight_decay: float = setting(0.01, NOT_NEGATIVE)
    """Decoupled weight decay, multiplied by lr."""
    bias_correction: bool = setting(True, Flag())
    """Divide both averages by 1 - beta^t, t the update number; false, as in BERT's Adam, does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams(AdamWParams):
    """Parameters of Adam. Weight decay is decoupled, as in AdamW, unless ``adam_w_mode`` is false."""

    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    adam_w_mode: bool = setting(False, Flag(), kept=False)
    """false selects Adam as published; true, DeepSpeed's default, makes it AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW8bitParams(AdamWParams):
    """Parameters of AdamW with 8-bit moments, as in bitsandbytes and torchao."""

    block_size: Literal[64, 128, 256, 512, 1024, 2048] = setting(256, Choice(
        options=(64, 128, 256, 512, 1024, 2048), noun="a number of elements that share a scale"))  # fmt: skip
    """Elements of a moment that share a scale (fp32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdParams:
    """Parameters of stochastic gradient descent, with torch's defaults."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate, which a schedule may change."""
    momentum: float = setting(0.0, NOT_NEGATIVE)
    """Decay rate of the momentum; 0: no momentum."""
    dampening: float = setting(0.0, Real())
    """Fraction of each gradient that is left out of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    nesterov: bool = setting(False, Flag())
    """true uses Nesterov momentum, false plain momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LionParams:
    """Parameters of Lion, which updates by the sign of an interpolated momentum."""

    lr: float = setting(1e-4, NOT_NEGATIVE)
    """Learning rate, which a schedule may change."""
    betas: tuple[float, float] = setting((0.9, 0.99), BETAS)
    """Interpolation weight of the update, and decay rate of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay, multiplied by lr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LambParams(AdamWParams):
    """Parameters of LAMB (Adam with updates scaled by weight norms), with DeepSpeed's names and defaults."""

    eps_inside_sqrt: bool = setting(False, Flag())
    """Add eps to the mean square instead of its root."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the update before its norm is computed."""
    max_coeff: float = setting(10.0, Real(above=0))
    """Upper bound of the trust ratio (norm of weights / norm of update), which multiplies the learning rate."""
    min_coeff: float = setting(0.01, NOT_NEGATIVE)
    """Lower bound of the trust ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LARSParams:
    """Parameters of LARS: SGD with momentum, and steps scaled by the norm of the weights."""

    lr: float = setting(1e-1, NOT_NEGATIVE)
    """Learning rate, which a schedule may change."""
    momentum: float = setting(0.9, FACTOR)
    """Decay rate of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    trust_coefficient: float = setting(1e-3, Real(above=0))
    """Trust coefficient: norm of an update at learning rate 1, as a fraction of the norm of the weights."""
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the denominator of the trust ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonParams:
    """Parameters of Muon, with torch's defaults. Its update is the momentum, orthogonalized by Newton-Schulz steps."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate, which a schedule may change."""
    weight_decay: float = setting(0.1, NOT_NEGATIVE)
    """Decoupled weight decay, multiplied by lr."""
    momentum: float = setting(0.95, FACTOR)
    """Decay rate of the momentum."""
    nesterov: bool = setting(True, Flag())
    """true uses Nesterov momentum, false plain momentum."""
    ns_coefficients: tuple[float, float, float] = setting((3.4445, -4.775, 2.0315), ListOf(
        each=Real(), length=3, noun="a list of three numbers"))  # fmt: skip
    """Coefficients of the Newton-Schulz polynomial, of x, x^3 and x^5."""
    eps: float = setting(1e-7, NOT_NEGATIVE)
    """Lower bound of the Frobenius norm by which a momentum matrix is divided."""
    ns_steps: int = setting(5, Int(low=1, below=100))
    """Number of Newton-Schulz steps."""
    ns_dtype: Literal["bf16", "fp32"] = setting("bf16", one_of("bf16", "fp32", noun="a dtype of Newton-Schulz steps"))
    """Dtype of the Newton-Schulz products; bf16 as in torch."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = setting("original", one_of(
        "original", "match_rms_adamw", noun="an adjustment"))  # fmt: skip
    """Factor of the learning rate for an A x B matrix. original: sqrt(max(1, A/B)); match_rms_adamw: 0.2 sqrt(max(A,
    B)).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SOAPParams:
    """Parameters of SOAP, with the authors' names and defaults: Adam in the eigenbasis of Shampoo's preconditioners."""

    lr: float = setting(3e-3, NOT_NEGATIVE)
    """Learning rate, which a schedule may change."""
    betas: tuple[float, float] = setting((0.95, 0.95), BETAS)
    """Decay rates of the running averages of the gradient and of its square, in the eigenbasis."""
    shampoo_beta: float | None = setting(None, Real(low=0, below=1, null=True))
    """Decay rate of the preconditioners, the averages of G G' and G' G; null takes the second of betas."""
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the root of the second moment."""
    weight_decay: float = setting(0.01, NOT_NEGATIVE)
    """Decoupled weight decay, multiplied by lr."""
    precondition_frequency: int = setting(10, SIZE)
    """Number of updates between two refreshes of the eigenbases."""
    max_precond_dim: int = setting(10000, COUNT)
    """Longest dimension with a preconditioner; a longer one, such as a vocabulary, has the identity as its basis."""
    normalize_grads: bool = setting(False, Flag())
    """Divide each update by its RMS."""
    correct_bias: bool = setting(True, Flag())
    """Divide both averages by 1 - beta^t, t the update number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShampooParams:
    """Parameters of Shampoo, with the names of Distributed Shampoo."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate, which a schedule may change."""
    betas: tuple[float, float] = setting((0.9, 0.999), ListOf(
        each=Real(low=0, high=1), length=2, noun="a list of two numbers from 0 to 1"))  # fmt: skip
    """Decay rates of the momentum, below 1, and of the preconditioners; 1 sums them, as published in 2018."""
    epsilon: float = setting(1e-12, Real(above=0))
    """Term added to the eigenvalues of the preconditioners."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay, multiplied by lr."""
    precondition_frequency: int = setting(10, SIZE)
    """Number of updates between two eigendecompositions of the preconditioners."""
    start_preconditioning_step: int | None = setting(None, Int(low=1, null=True))
    """First update that uses preconditioners; earlier ones follow the grafted rule. null: precondition_frequency."""
    max_preconditioner_dim: int = setting(8192, COUNT)
    """Longest dimension with a preconditioner; a longer one uses the identity."""
    use_bias_correction: bool = setting(True, Flag())
    """Divide averages by 1 - beta^t, t the update number."""
    grafting: Literal["none", "sgd", "adagrad", "rmsprop", "adam"] = setting("adam", one_of(
        "none", "sgd", "adagrad", "rmsprop", "adam", noun="a rule to graft"))  # fmt: skip
    """Optimizer that sets the norm of each update; grafting_beta2 is the decay rate of its squared gradients."""
    grafting_beta2: float = setting(0.999, FACTOR)
    """Decay rate of the squared gradients of the grafted optimizer."""
    grafting_epsilon: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the denominator of the grafted optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorParams:
    """Parameters of Adafactor, with torch's defaults. Second moments of matrices are row and column means only."""

    lr: float = setting(1e-2, NOT_NEGATIVE)
    """Upper bound of the relative step size; update t is also bounded by 1 / sqrt(t)."""
    beta2_decay: float = setting(-0.8, Real(high=0))
    """Exponent d in the decay rate 1 - t^d of the squared gradients at update t."""
    eps: tuple[float | None, float] = setting((None, 1e-3), ListOf(
        each=replace(NOT_NEGATIVE, null=True), length=2,
        noun="a list of two numbers, the first of them or null"))  # fmt: skip
    """Lower bounds of the root of a mean square (null: the dtype's eps) and of the RMS of the weights that scales a
    step."""
    d: float = setting(1.0, Real(low=1))
    """Clipping threshold: upper bound of the RMS of an update."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay, multiplied by lr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFreeAdamWParams:
    """Parameters of schedule-free AdamW, which averages its iterates and needs no decaying learning rate."""

    lr: float = setting(2.5e-3, NOT_NEGATIVE)
    """Learning rate, constant after the warmup."""
    betas: tuple[float, float] = setting((0.9, 0.999), BETAS)
    """Weight (above 0) of the average in the point at which gradients are computed, and decay rate of the squared
    gradients.
    """
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the root of the second moment."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, applied at the point at which gradients are computed."""
    warmup_steps: int = setting(0, COUNT)
    """Updates over which the learning rate rises linearly."""
    weight_step_power: float = setting(0.0, NOT_NEGATIVE)
    """Power of the update number in the weight of an iterate (``r`` in the authors' code)."""
    weight_lr_power: float = setting(2.0, NOT_NEGATIVE)
    """Power of the largest learning rate so far in the weight of an iterate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRangeTestParams:
    """Parameters of LRRangeTest, a learning rate that grows step by step to find the range of usable rates."""

    lr_range_test_min_lr: float | tuple[float, ...] = setting(1e-3, RATES)
    """Learning rate at the start."""
    lr_range_test_step_size: int = setting(2000, SIZE)
    """Steps between two increases."""
    lr_range_test_step_rate: float = setting(1.0, NOT_NEGATIVE)
    """Increase per lr_range_test_step_size steps, as a fraction of the initial learning rate."""
    lr_range_test_staircase: bool = setting(False, Flag())
    """True raises the rate in stairs of lr_range_test_step_size steps, false continuously."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycleParams:
    """Parameters of OneCycle: the learning rate rises, falls, then decays; the momentum moves opposite to it."""

    cycle_min_lr: float | tuple[float, ...] = setting(0.0, RATES, required=True)
    """Learning rate at the start and the end of the cycle."""
    cycle_max_lr: float | tuple[float, ...] = setting(0.0, RATES, required=True)
    """Learning rate at the peak of the cycle."""
    decay_lr_rate: float = setting(0.0, NOT_NEGATIVE)
    """Decay of the learning rate per decay_step_size steps after the cycle."""
    cycle_first_step_size: int = setting(2000, SIZE)
    """Number of steps in which the learning rate rises."""
    cycle_second_step_size: int | None = setting(None, Int(low=0, null=True))
    """Number of steps in which the learning rate falls; null: cycle_first_step_size."""
    cycle_first_stair_count: int = setting(0, COUNT)
    """Number of stairs of the rise; 0: the rate rises continuously."""
    cycle_second_stair_count: int | None = setting(None, Int(low=0, null=True))
    """Number of stairs of the fall; null: cycle_first_stair_count."""
    decay_step_size: int = setting(0, COUNT)
    """Number of steps per decay after the cycle; 0: no decay."""
    cycle_momentum: bool = setting(True, Flag())
    """True moves the momentum opposite to the learning rate."""
    cycle_min_mom: float | tuple[float, ...] = setting(0.8, MOMENTA)
    """Momentum at the peak of the learning rate."""
    cycle_max_mom: float | tuple[float, ...] = setting(0.9, MOMENTA)
    """Momentum at the start and the end of the cycle."""
    decay_mom_rate: float = setting(0.0, NOT_NEGATIVE)
    """Increase of the momentum per decay_step_size steps after the cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLRParams:
    """Parameters of WarmupLR, a learning rate that rises and is then constant."""

    warmup_min_lr: float | tuple[float, ...] = setting(0.0, RATES)
    """Learning rate at the start; a list has one for each parameter group."""
    warmup_max_lr: float | tuple[float, ...] | None = setting(None, RATES_OR_NULL)
    """Learning rate after the warmup; a list has one for each parameter group; null: the optimizer's."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Number of warmup steps."""
    warmup_type: Literal["log", "linear"] = setting("log", one_of("log", "linear", noun="a warmup type"))
    """Curve of the warmup: logarithmic or linear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of WarmupDecayLR, a learning rate that rises and then falls linearly to its minimum."""

    total_num_steps: int = setting(1, SIZE, required=True)
    """Step number at which the learning rate is at its minimum."""
    warmup_max_lr: float | tuple[float, ...] | None = setting(0.001, RATES_OR_NULL)
    """Learning rate after the warmup; a list has one for each parameter group; null: the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosineLRParams:
    """Parameters of WarmupCosineLR, a learning rate that rises and then falls along a cosine.

    ``warmup_min_ratio`` and ``cos_min_ratio`` are fractions of the optimizer's learning rate.
    """

    total_num_steps: int = setting(1, SIZE, required=True)
    """Step number at which the learning rate is at its minimum."""
    warmup_min_ratio: float = setting(0.0, RATIO)
    """Fraction of the learning rate at the start."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Number of warmup steps."""
    cos_min_ratio: float = setting(1e-4, RATIO)
    """Fraction of the learning rate at the end."""
    warmup_type: Literal["log", "linear"] = setting("log", one_of("log", "linear", noun="a warmup type"))
    """Curve of the warmup: logarithmic or linear."""


OPTIMIZERS: Mapping[str, type[Any]] = MappingProxyType({
    "AdamW": AdamWParams, "Adam": AdamParams, "SGD": SgdParams, "Lion": LionParams, "Muon": MuonParams,
    "Lamb": LambParams, "LARS": LARSParams, "SOAP": SOAPParams, "Shampoo": ShampooParams,
    "AdamW8bit": AdamW8bitParams, "Adafactor": AdafactorParams, "ScheduleFreeAdamW": ScheduleFreeAdamWParams,
})  # fmt: skip
MATRIX_OPTIMIZERS = frozenset({"Muon", "SOAP", "Shampoo"})
"""Names of optimizers that update whole matrices, and accept no other parameters."""
SCHEDULERS: Mapping[str, type[Any]] = MappingProxyType({
    "LRRangeTest": LRRangeTestParams, "OneCycle": OneCycleParams, "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams, "WarmupCosineLR": WarmupCosineLRParams, **TORCH_SCHEDULERS,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Parameter group with its own learning rate or weight decay."""

    params: tuple[str, ...] = setting((), GLOBS, required=True)
    """``fnmatch`` patterns of parameter names in the original model."""
    lr: float | None = setting(None, Real(low=0, null=True))
    """Learning rate of the group; null uses the optimizer's."""
    weight_decay: float | None = setting(None, Real(low=0, null=True))
    """Weight decay of the group; null uses the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer with its params and parameter groups."""

    type: Literal[
        "AdamW", "Adam", "SGD", "Lion", "Lamb", "LARS", "Muon", "SOAP", "Shampoo", "AdamW8bit", "Adafactor",
        "ScheduleFreeAdamW",
    ] = setting("AdamW", Choice(
        options=tuple(OPTIMIZERS), noun="built in", fold=True,
        remedy="give AdamW, Adam, SGD, Lion, Lamb, LARS, Muon, SOAP, Shampoo, AdamW8bit, Adafactor or "
        "ScheduleFreeAdamW, or pass optimizer=... to engine.initialize"))  # fmt: skip
    """AdamW, Adam, SGD, Lion, Lamb, LARS, Muon, SOAP, Shampoo, AdamW8bit, Adafactor or ScheduleFreeAdamW, in any letter
    case."""
    params: Mapping[str, Any] = stored(AdamWParams())
    """Settings of the chosen optimizer, with all defaults filled in."""
    no_weight_decay: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of parameters without weight decay."""
    groups: tuple[GroupConfig, ...] = setting((), Sections(cls=GroupConfig))
    """Parameter groups with their own learning rate or weight decay."""
    update_unused: bool = setting(False, Flag())
    """true applies decay and momentum to parameters without a gradient in a step, as DeepSpeed does; false skips them,
    as torch does.
    """
    include_frozen: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of frozen parameters that may be thawed later; gradients and optimizer state are allocated for
    them.
    """
    before: tuple["MatchedOptimizerConfig", ...] = ()
    """Earlier optimizers of a list; a parameter belongs to the first one that matches its name."""

    @property
    def entries(self) -> "tuple[OptimizerConfig, ...]":
        """All configured optimizers, in order. The last (this object) updates the parameters that none of the others
        updates.
        """
        return (*self.before, self)

    @property
    def kind(self) -> str:
        """Names of all configured optimizers, such as "Muon + AdamW"."""
        return " + ".join(dict.fromkeys(entry.type for entry in self.entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedOptimizerConfig(OptimizerConfig):
    """Entry of a list of optimizers: it updates the parameters with names that fit a pattern in ``match``."""

    match: str | tuple[str, ...] = setting((), AnyOf(rules=(Text(), GLOBS)), required=True)
    """Name patterns of the parameters that it updates."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Name patterns of the parameters that this optimizer updates."""
        return (self.match,) if isinstance(self.match, str) else self.match


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Learning-rate schedule and its params."""

    type: str = setting("WarmupLR", Choice(options=tuple(SCHEDULERS), noun="a scheduler", fold=True), required=True)
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR as in DeepSpeed, or a class of
    torch.optim.lr_scheduler.
    """
    params: Mapping[str, Any] = stored(WarmupLRParams())
    """Settings of the chosen scheduler, with all defaults filled in."""
