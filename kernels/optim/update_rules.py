"""Optimizer updates on flat local tensors, in place.

Updates are elementwise, so the update of a shard equals the shard of the full update; LARS and LAMB need the norms of
whole parameters.

Adam, AdamW and SGD run torch's fused kernels (one pass over memory, on CPU and GPU). Step counts are Python ints, and
the moments are the only tensors in the caller's state. A kernel of this package runs large updates of Adam and Lion on
the host, with the same bits (``host_update``).

Schedule-free AdamW (Defazio et al. 2024, https://arxiv.org/abs/2405.15682): an average replaces a schedule.

    z   the iterate with AdamW's steps
    x   the average of all z, newer ones with more weight: the model for evaluation
    y   = (1 - beta) z + beta x, the weights in training, at which gradients are computed

Only y and z are stored, because x = (y - (1 - beta) z) / beta. Everything is elementwise. The rates, weights and order
of operations equal the authors' code for y and z.

LARS (You et al. 2017, https://arxiv.org/abs/1708.03888, algorithm 1) and LAMB (You et al. 2019,
https://arxiv.org/abs/1904.00962, algorithm 2): the length of a parameter's step depends on the parameter's norm.

    LARS   ratio = trust |w| / (|g| + decay |w| + eps)      v = momentum v + lr ratio (g + decay w)     w = w - v
    LAMB   u = m / (sqrt(v) + eps) + decay w, of averages with bias correction      w = w - lr clamp(|w| / |u|) u

The caller computes the norms of whole parameters, because a rule gets pieces. With a norm of zero the ratio is 1. The
bounds of LAMB's ratio, ``eps_inside_sqrt`` and ``bias_correction`` false follow DeepSpeed's FusedLamb.

Adafactor (Shazeer and Stern 2018): the second moments of a matrix as means over its rows and over its columns.

    squares    of gradients, summed over rows and columns              any piece of a matrix adds its squares
    means      of all updates, newer ones with more weight              small, full
    update     gradient / root of (row mean x column mean / their mean)  elementwise, from the means
    step       the update, at most ``clip`` in RMS, times a rate relative to the RMS of the weights

The options equal ``torch.optim.Adafactor``. Tensors of more than two dims are stacks of matrices; vectors have the mean
square of each element as state. Shape suffixes: L matrices of a stack, A rows, B columns; l lines, which are
consecutive rows of a stack; n elements of a piece.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

Rule = TypeVar("Rule")
_UNBIASED = 10**9  # beta ** this is 0 for every beta of fp32 below 1


def rule_of(kind: type[Rule], group: Mapping[str, Any], **others: Any) -> Rule:
    """Returns a rule of the class ``kind``, with fields from ``others`` or else from the options in ``group``."""
    given = {field.name: group[field.name] for field in fields(cast(Any, kind)) if field.name not in others}
    given["lr"] = float(given["lr"])
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    return kind(**given, **others)


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Hyperparameters of Adam for one update (Kingma and Ba 2015; decoupled: Loshchilov and Hutter 2019)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """True: AdamW, which decays the weights directly. False: the decay is added to the gradient."""
    bias_correction: bool = True
    """True if both moments are corrected for their start at zero."""

    def age(self, step: int) -> int:
        """Returns the step number for Adam's bias correction: ``step``, or a very large number if it is off."""
        return step if self.bias_correction else _UNBIASED


def adam_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    step: int,
    rule: AdamRule,
) -> None:
    """Performs update ``step`` (from 1) of Adam or AdamW on ``weights`` and moments in place."""
    # torch increments the counter in place, so each tensor gets a temporary copy of one counter per device
    counters = {w.device: torch.full((), float(rule.age(step) - 1), device=w.device) for w in weights}
    adam(
        list(weights),
        list(grads),
        list(first_moments),
        list(second_moments),
        [],
        [counters[w.device].clone() for w in weights],
        fused=True,
        decoupled_weight_decay=rule.decoupled,
        amsgrad=False,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
    )


@dataclass(frozen=True, slots=True)
class SGDRule:
    """Hyperparameters of SGD with momentum for one update, named as in ``torch.optim.SGD``."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def sgd_(
    weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor | None], rule: SGDRule
) -> list[Tensor | None]:
    """Makes an SGD update of ``weights`` in place; returns the list of momentum buffers for the next call.

    ``momenta``: a buffer for each of ``weights``, or None for all; with momentum, None gives new buffers.
    """
    buffers = list(momenta)
    sgd(
        list(weights),
        list(grads),
        buffers,
        foreach=False,
        fused=True,
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
        lr=rule.lr,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        maximize=False,
    )
    return buffers


@dataclass(frozen=True, slots=True)
class LionRule:
    """Hyperparameters of Lion for one update (Chen et al. 2023, algorithm 2)."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float


def lion_(weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], rule: LionRule) -> None:
    """Makes a Lion update of ``weights`` and ``momenta`` in place, with decoupled weight decay."""
    for weight, grad, momentum in zip(weights, grads, momenta, strict=True):
        direction = momentum.lerp(grad, 1 - rule.betas[0]).sign_()
        weight.mul_(1 - rule.lr * rule.weight_decay).add_(direction, alpha=-rule.lr)
        momentum.lerp_(grad, 1 - rule.betas[1])


@dataclass(frozen=True, slots=True)
class ScheduleFreeRule:
    """Hyperparameters of schedule-free AdamW for one update (Defazio et al. 2024)."""

    lr: float
    """Learning rate, including warmup."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    newest: float
    """Weight of the newest iterate z in the average x."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "ScheduleFreeRule":
        """Returns the rule with the options in ``group``; the caller first counts the update with :func:`count`."""
        lr, newest = group["scheduled_lr"], group["newest"]
        return cls(lr, tuple(group["betas"]), group["eps"], group["weight_decay"], newest)


def count(group: dict[str, Any]) -> None:
    """Adds one to ``group["step"]``, in a parameter group of schedule-free AdamW.

    It also sets ``scheduled_lr``, the learning rate with warmup, and ``newest``, the weight of the newest iterate z in
    the average x of the iterates.
    """
    step = group["step"] = group.get("step", 0) + 1
    warmup = group["warmup_steps"]
    lr = float(group["lr"]) * min(1.0, step / warmup if warmup else 1.0)
    largest = max(lr, group.get("lr_max", -1.0))
    weight = step ** group["weight_step_power"] * largest ** group["weight_lr_power"]
    total = group.get("weight_sum", 0.0) + weight
    group.update(scheduled_lr=lr, lr_max=largest, weight_sum=total, newest=weight / total if total else 0.0)


def schedule_free_(
    weights: Tensor, grads: Tensor, iterate: Tensor, squares: Tensor, step: int, rule: ScheduleFreeRule
) -> None:
    """Performs update ``step`` (from 1) of schedule-free AdamW in place; only ``grads`` stays unchanged.

    ``weights`` are y in Defazio et al. 2024, ``iterate`` is z, and ``squares`` the second moment.
    """
    beta1, beta2 = rule.betas
    squares.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    step_by = grads / (squares / (1 - beta2**step)).sqrt_().add_(rule.eps)
    if rule.weight_decay:
        step_by.add_(weights, alpha=rule.weight_decay)
    # the new y from the old y and z alone: x needs no memory
    weights.lerp_(iterate, rule.newest).add_(step_by, alpha=rule.lr * (beta1 * (1 - rule.newest) - 1))
    iterate.sub_(step_by, alpha=rule.lr)


def averaged(weights: Tensor, iterate: Tensor, betas: tuple[float, float]) -> Tensor:
    """Returns the averaged weights x of schedule-free AdamW, for evaluation.

    ``weights`` are the training weights y, ``iterate`` is the newest z, and ``betas[0]`` the weight of x in y.
    """
    return weights.lerp(iterate, 1 - 1 / betas[0])


Moments = Sequence[Tensor]
"""State tensors of a parameter, in the order of ``moment_names``; an update writes them in place."""


@dataclass(frozen=True, slots=True)
class LambRule:
    """Hyperparameters of LAMB for one update."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    eps_inside_sqrt: bool
    bounds: tuple[float, float]
    """Minimum and maximum of the trust ratio."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "LambRule":
        """Returns the rule with the hyperparameters in ``group``, a parameter group of the optimizer LAMB."""
        return rule_of(cls, group, bounds=(group["min_coeff"], group["max_coeff"]))

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the first and the second moment."""
        return ("exp_avg", "exp_avg_sq")

    def take_in(self, grads_n: Tensor, moments: Moments) -> None:
        """Updates the first and second moment in place with ``grads_n``."""
        first, second = moments
        first.lerp_(grads_n, 1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(grads_n, grads_n, value=1 - self.betas[1])

    def measured(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int) -> Tensor:
        """Returns Adam's update of a slice, with weight decay and without the trust ratio."""
        (first, second), (beta1, beta2) = moments, self.betas
        lacks = (1 - beta1**step, 1 - beta2**step) if self.bias_correction else (1.0, 1.0)
        mean_square = second / lacks[1]
        root = mean_square.add_(self.eps).sqrt_() if self.eps_inside_sqrt else mean_square.sqrt_().add_(self.eps)
        update = first / root.mul_(lacks[0])
        return update.add_(weights_n, alpha=self.weight_decay) if self.weight_decay else update

    def apply_(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int, norms: Tensor) -> None:
        """Subtracts the result of :meth:`measured`, times learning rate and trust ratio, from ``weights_n`` in place.

        The ratio is ``norms[0] / norms[1]``, limited to ``bounds``.
        """
        ratio = _ratio(norms, norms[0] / norms[1], self.bounds)
        # computed twice, because an update stored for the norm would need the memory of the weights
        update = self.measured(weights_n, grads_n, moments, step)
        weights_n.sub_(update.mul_((ratio * self.lr).to(update.dtype)))


@dataclass(frozen=True, slots=True)
class LarsRule:
    """Hyperparameters of LARS for one update."""

    lr: float
    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "LarsRule":
        """Returns the rule with the hyperparameters in ``group``, a parameter group of the optimizer LARS."""
        return rule_of(cls, group)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Name of the state tensor, the momentum buffer; empty if ``momentum`` is 0."""
        return ("momentum_buffer",) if self.momentum else ()

    def take_in(self, grads_n: Tensor, moments: Moments) -> None:
        """Does nothing, because :meth:`apply_` updates the momentum."""

    def measured(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int) -> Tensor:
        """Returns ``grads_n``, from which the trust ratio of LARS is computed."""
        return grads_n

    def apply_(self, weights_n: Tensor, grads_n: Tensor, moments: Moments, step: int, norms: Tensor) -> None:
        """Subtracts a step, or with momentum the decaying sum of all steps, from ``weights_n`` in place.

        A step is (gradient + weight decay * weights) times learning rate and trust ratio.
        """
        denominator = norms[1] + self.weight_decay * norms[0] + self.eps
        ratio = _ratio(norms, self.trust_coefficient * norms[0] / denominator, None)
        made = grads_n.add(weights_n, alpha=self.weight_decay).mul_((ratio * self.lr).to(grads_n.dtype))
        for momentum in moments:
            made = momentum.mul_(self.momentum).add_(made)
        weights_n.sub_(made)


LayerRule = LambRule | LarsRule
"""Rule with a trust ratio, which updates a slice of a parameter; the caller computes norms over the full parameter."""


def _ratio(norms: Tensor, ratio: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """Returns the trust ratio, 0-dim on the device; 1 if a norm is zero."""
    bounded = ratio if bounds is None else ratio.clamp(*bounds)
    return torch.where((norms > 0).all(), bounded, torch.ones_like(ratio))


ROWS, COLUMNS, SQUARES = "row_var", "col_var", "variance"
"""torch's names of the running means: per row, per column, and per element."""


@dataclass(frozen=True, slots=True)
class AdafactorRule:
    """Hyperparameters of Adafactor for one update."""

    lr: float
    beta2_decay: float
    eps: float | None
    """Lower bound of the root of a mean square; None: the epsilon of the dtype."""
    least_rms: float
    """Lower bound of the weights' RMS in the relative step."""
    clip: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "AdafactorRule":
        """Returns the rule with the options in ``group``, a parameter group with the options of
        ``torch.optim.Adafactor``.
        """
        eps, least = group["eps"]
        return cls(float(group["lr"]), group["beta2_decay"], eps, least, group["d"], group["weight_decay"])

    def newest(self, step: int) -> float:
        """Returns the weight of update ``step`` (from 1) in the running means of squared gradients."""
        return float(step**self.beta2_decay)

    def rate(self, step: int) -> float:
        """Returns the step size of update ``step`` (from 1), relative to the RMS of the weights."""
        return min(self.lr, 1 / math.sqrt(step))

    def least(self, dtype: torch.dtype) -> float:
        """Returns the smallest divisor of gradients: ``eps``, or if it is None the machine epsilon of ``dtype``."""
        return torch.finfo(dtype).eps if self.eps is None else self.eps


def mean_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of Adafactor's running means of squared gradients for a parameter of ``shape``.

    They are per row and per column of a matrix, or per element of a vector.
    """
    if len(shape) < 2:
        return {SQUARES: shape}
    return {ROWS: (*shape[:-1], 1), COLUMNS: (*shape[:-2], 1, shape[-1])}


def mean_elements(shape: tuple[int, ...]) -> int:
    """Returns the number of elements in all of Adafactor's running means for a parameter of ``shape``."""
    return sum(prod(each) for each in mean_shapes(shape).values())


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """Elements ``start:stop`` of a flattened tensor of ``shape``, as rows of a matrix or a stack of matrices."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def columns(self) -> int:
        """Number of elements in a row."""
        return self.shape[-1]

    @property
    def lines(self) -> slice:
        """Slice of the rows with elements in this piece; rows are numbered over the whole stack."""
        return slice(self.start // self.columns, -(-self.stop // self.columns))

    def matrices(self, device: torch.device) -> Tensor:
        """Returns, for each row in :attr:`lines`, the index of its matrix in a stack, int64 on ``device``."""
        return torch.arange(self.lines.start, self.lines.stop, device=device) // self.shape[-2]

    def add_squares(self, squares_n: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Adds ``squares_n``, the squared gradients of this piece, to ``sums`` in place.

        ``sums`` has names and shapes of :func:`mean_shapes` for the whole tensor: sums per row and per column, or per
        element of a vector.
        """
        if SQUARES in sums:
            sums[SQUARES].view(-1)[self.start : self.stop] += squares_n
            return
        lines = self.lines
        # a piece may begin or end inside a line: zeros fill it up, so that sums over lines and columns are plain
        whole_lB = squares_n.new_zeros(lines.stop - lines.start, self.columns)
        first = self.start - lines.start * self.columns
        whole_lB.view(-1)[first : first + len(squares_n)] = squares_n
        sums[ROWS].view(-1)[lines] += whole_lB.sum(dim=1)
        columns_LB = sums[COLUMNS].view(-1, self.columns)
        if len(columns_LB) == 1:
            columns_LB[0] += whole_lB.sum(dim=0)
        else:
            columns_LB.index_add_(0, self.matrices(squares_n.device), whole_lB.to(columns_LB.dtype))

    def update(self, grads_n: Tensor, scales: Mapping[str, Tensor], least: float) -> Tensor:
        """Returns the gradients ``grads_n`` of this piece, divided by the roots of their mean squares.

        ``scales``: result of :func:`scales_of`; ``least``: lower bound of the root.
        """
        if SQUARES in scales:
            mean_n = scales[SQUARES].view(-1)[self.start : self.stop].clone()
        else:
            lines, columns_LB = self.lines, scales[COLUMNS].view(-1, self.columns)
            columns = columns_LB if len(columns_LB) == 1 else columns_LB[self.matrices(grads_n.device)]
            first = self.start - lines.start * self.columns
            mean_n = (scales[ROWS].view(-1, 1)[lines] * columns).view(-1)[first : first + len(grads_n)]
        return mean_n.clamp_(min=least * least).rsqrt_().mul_(grads_n)


def take_in(means: Mapping[str, Tensor], sums: Mapping[str, Tensor], newest: float) -> None:
    """Updates ``means``, Adafactor's running means of squared gradients, in place.

    ``sums``: result of :meth:`MatrixPiece.add_squares`, which is converted to means; ``newest``: weight of these means,
    from 0 to 1.
    """
    for name, mean in means.items():
        count = {ROWS: sums[COLUMNS].shape[-1], COLUMNS: sums[ROWS].shape[-2]}[name] if name != SQUARES else 1
        mean.lerp_(sums[name] / count, newest)


def scales_of(means: Mapping[str, Tensor], least: float) -> dict[str, Tensor]:
    """Converts running ``means`` to row and column factors; their product is an element's mean squared gradient.

    Row means are divided by the mean of their matrix's row means, but at least by ``least``. Column means, and the
    means of a vector, are returned unchanged.
    """
    if SQUARES in means:
        return dict(means)
    # both means contain the mean of the full matrix, so one of them is divided by it
    rows = means[ROWS] / means[ROWS].mean(dim=-2, keepdim=True).clamp(min=least)
    return {ROWS: rows, COLUMNS: means[COLUMNS]}


def step_size(weights_square: Tensor, update_square: Tensor, elements: int, rule: AdafactorRule, step: int) -> Tensor:
    """Returns the factor for the update tensor of Adafactor in step ``step``, as a 0-dim tensor on the device.

    ``weights_square`` and ``update_square`` are sums of squares over all ``elements``.
    """
    root = math.sqrt(elements)
    rms = (weights_square.sqrt() / root).clamp(min=rule.least_rms)
    return rms * rule.rate(step) / (update_square.sqrt() / (root * rule.clip)).clamp(min=1.0)
