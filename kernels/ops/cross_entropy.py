"""Terms of a softmax over logits with columns on one or several ranks, and the gradient of the logits.

This is the vocabulary-parallel softmax of Megatron-LM (Shoeybi et al. 2019, section 3).

    largest     max x                         computed on the local columns, in fp32 (fp64 for fp64)
    log_sum     log sum exp(x - largest)      ``join_softmax_terms`` joins the columns of all ranks with one maximum
    picked      x at the target - largest     and one sum, through an ``Exchange`` that the caller provides
    weighted    sum w (x - largest)

    loss = log_sum - (1 - s) picked - s / V weighted        s: label smoothing (Szegedy et al. 2016, section 7)

The kernels read the logits once in the forward and once in the backward. The softmax itself is not saved: the backward
recomputes it from the logits. Gradients treat ``largest`` as a constant, because its contribution cancels in every
loss.

Shape suffixes: N rows, V vocabulary, W columns of this rank.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.kernels.dispatch import Kernels, fused_operator


class Question(NamedTuple):
    """Request for two optional softmax statistics per row: the logit at ``target``, and a weighted sum of logits."""

    target: Tensor | None = None
    """Target columns in the full vocabulary, [N] int64, equal on all ranks."""
    weight: Tensor | None = None
    """Class weights [W] for the weighted sum over the local columns."""
    even: bool = False
    """True: weight 1 for every column, in place of ``weight``."""
    start: int = 0
    """Index of the first local column in the full vocabulary."""

    @property
    def weighted(self) -> bool:
        """True if a weighted sum of the logits is requested."""
        return self.even or self.weight is not None

    def rows(self, part: slice) -> "Question":
        """Returns the same request for only the rows in the slice ``part``."""
        return self if self.target is None else self._replace(target=self.target[part])


class Statistics(NamedTuple):
    """Maximum, sum of exponentials and optional statistics of N rows, over this rank's columns of the logits.

    They are [N] each, and not differentiable.
    """

    largest: Tensor
    """Maximum of each row. For an infinite maximum, the other statistics use differences from 0."""
    total: Tensor
    """Sum of exp(x - largest) over the local columns."""
    picked: Tensor | None
    """Logit at the target, before the subtraction of ``largest``; 0 if the target is on another rank."""
    weighted: Tensor | None


class Softmax(NamedTuple):
    """Numbers for the softmax over the full vocabulary, [N] each: softmax(x) = exp(x - largest - log_sum)."""

    largest: Tensor
    """Maximum of each row; 0 for an infinite maximum."""
    log_sum: Tensor


class Slopes(NamedTuple):
    """Loss gradients of log-sum-exp, target logit and weighted logit sum of N rows, [N] each; None: no gradient."""

    log_sum: Tensor | None
    picked: Tensor | None = None
    weighted: Tensor | None = None

    def rows(self, part: slice) -> "Slopes":
        """Returns the gradients for only the rows in the slice ``part``."""
        return Slopes(*(None if slope is None else slope[part] for slope in self))


class Exchange(Protocol):
    """Interface of all-reduces between the ranks that divide the vocabulary."""

    def largest(self, values: Tensor) -> None:
        """Overwrites ``values`` with their elementwise maximum over the ranks."""

    def sum(self, values: Tensor) -> None:
        """Overwrites ``values`` with their elementwise sum over the ranks."""


def fits_softmax_kernels(logits: Tensor) -> bool:
    """Returns True if the Triton kernels support ``logits``: fp32, fp16 or bf16, 2-dim, with contiguous rows."""
    narrow = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return narrow and logits.dim() == 2 and logits.shape[1] > 0 and logits.stride(1) == 1


def find_statistics(logits_NW: Tensor, question: Question, triton: bool) -> Statistics:
    """Returns statistics of each row of ``logits_NW`` over this rank's columns.

    They are maximum, sum of exp(logit - maximum), and the statistics that ``question`` requests.

    ``triton``: uses Triton, in one pass, if its kernels support the logits; otherwise PyTorch.
    """
    if not triton or not fits_softmax_kernels(logits_NW):
        return statistics_reference(logits_NW, question)
    target, weight, even, start = question
    largest, total, picked, weighted = _statistics(logits_NW, target, weight, even, start)
    return Statistics(largest, total, None if target is None else picked, weighted if question.weighted else None)


def join_softmax_terms(
    found: Statistics, question: Question, width: int, exchange: Exchange | None, known: Softmax | None = None
) -> tuple[Softmax, Tensor | None, Tensor | None]:
    """Converts ``found``, the softmax statistics over this rank's columns, to statistics over all ranks' columns.

    It all-reduces one maximum and one sum; with ``known`` only the sum, or nothing if ``question`` is empty.

    Args:
        question: request from which ``found`` was computed.
        width: number of columns of this rank.
        exchange: all-reduces over the ranks with other columns; None: this rank has all columns.
        known: softmax of the same logits from an earlier call; None: it is computed.

    Returns:
        (:class:`Softmax`, logit at the target, weighted sum of the logits). The last two are [N], computed after the
            subtraction of the row's largest logit from all logits; None if not requested.
    """
    own_N = found.largest.masked_fill(found.largest.isinf(), 0)
    largest_N = found.largest.clone() if known is None else known.largest
    if known is None:
        if exchange is not None:
            exchange.largest(largest_N)
        largest_N.masked_fill_(largest_N.isinf(), 0)
    # The differences of each rank are relative to its own maximum; shift them to the common maximum before the sum.
    terms = []
    if known is None:
        infinite = found.largest == torch.inf
        terms.append(found.total * (found.largest.masked_fill(infinite, 0) - largest_N).exp())
    if question.target is not None and found.picked is not None:
        _, elsewhere = place_in(question.target, question.start, width)
        terms.append((found.picked - largest_N).masked_fill_(elsewhere, 0))
    if found.weighted is not None:
        weights: Tensor | int = width if question.weight is None else question.weight.to(own_N.dtype).sum()
        terms.append(found.weighted + (own_N - largest_N) * weights)
    sums_KN = torch.stack(terms) if terms else largest_N.new_empty((0, len(largest_N)))
    if terms and exchange is not None:
        exchange.sum(sums_KN)
    sums = list(sums_KN.unbind())
    softmax = known or Softmax(largest_N, sums.pop(0).log())
    picked_N = sums.pop(0) if question.target is not None else None
    return softmax, picked_N, sums.pop() if sums else None


def find_gradient(
    logits_NW: Tensor, question: Question, softmax: Softmax, slopes: Slopes, triton: bool, inplace: bool = False
) -> Tensor:
    """Returns the gradient of ``logits_NW`` from ``slopes``, the gradients of the softmax statistics.

    ``question`` and ``softmax``: argument and result of :func:`join_softmax_terms`. ``inplace``: overwrites the logits
    and returns them.
    """
    if slopes.log_sum is None:
        slopes = slopes._replace(log_sum=torch.zeros_like(softmax.largest))
    if not triton or not fits_softmax_kernels(logits_NW):
        found = gradient_reference(logits_NW, question, softmax, slopes)
        return logits_NW.copy_(found) if inplace else found
    slopes = Slopes(*(None if slope is None else slope.contiguous() for slope in slopes))
    given = question.target, question.weight, *softmax, *slopes, question.start
    if not inplace:
        grad_NW: Tensor = _gradient(logits_NW, *given)
        return grad_NW
    _gradient_(logits_NW, *given)
    return logits_NW


def place_in(target: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Converts columns ``target`` of the full vocabulary to columns of this rank, which has ``width`` columns from
    ``start``.

    Returns:
        (column on this rank, or 0 if another rank has it; True if another rank has it).
    """
    place = target - start
    elsewhere = (place < 0) | (place >= width)
    return place.masked_fill_(elsewhere, 0), elsewhere


def statistics_reference(logits_NW: Tensor, question: Question) -> Statistics:
    """Computes softmax statistics of each row of ``logits_NW`` over this rank's columns, in PyTorch.

    ``question`` requests the optional statistics.
    """
    wide = torch.promote_types(logits_NW.dtype, torch.float32)
    largest_N = logits_NW.amax(-1).to(wide)
    shifted_NW = logits_NW - largest_N.masked_fill(largest_N.isinf(), 0).unsqueeze(-1)  # fp32 by type promotion
    picked_N = weighted_N = None
    if question.target is not None:
        place_N, elsewhere_N = place_in(question.target, question.start, logits_NW.shape[-1])
        picked_N = logits_NW.gather(-1, place_N.unsqueeze(-1)).squeeze(-1).to(wide).masked_fill_(elsewhere_N, 0)
    if question.weighted:
        weighted_N = (shifted_NW if question.weight is None else shifted_NW * question.weight).sum(-1)
    return Statistics(largest_N, shifted_NW.exp_().sum(-1), picked_N, weighted_N)


def gradient_reference(logits_NW: Tensor, question: Question, softmax: Softmax, slopes: Slopes) -> Tensor:
    """Computes the gradient of ``logits_NW`` from ``slopes``, the gradients of the softmax statistics, in PyTorch."""
    log_sum_N, picked_N, weighted_N = slopes
    assert log_sum_N is not None
    shares_NW = (logits_NW - softmax.largest.unsqueeze(-1)).sub_(softmax.log_sum.unsqueeze(-1)).exp_()
    grad_NW = shares_NW.mul_(log_sum_N.unsqueeze(-1))
    wanted_N = log_sum_N != 0
    if picked_N is not None:
        assert question.target is not None
        place_N, elsewhere_N = place_in(question.target, question.start, logits_NW.shape[-1])
        grad_NW.scatter_add_(-1, place_N.unsqueeze(-1), picked_N.masked_fill(elsewhere_N, 0).unsqueeze(-1))
        wanted_N = wanted_N | (picked_N != 0)
    if weighted_N is not None:
        weight: Tensor | float = 1.0 if question.weight is None else question.weight
        grad_NW += weighted_N.unsqueeze(-1) * weight
        wanted_N = wanted_N | (weighted_N != 0)
    return grad_NW.masked_fill_(~wanted_N.unsqueeze(-1), 0).to(logits_NW.dtype)


def uses_triton(operator: str, logits: Tensor, width: int, kernels: Kernels) -> bool:
    """Returns True if ``operator`` runs in Triton on ``logits``, with rows of ``width`` elements."""
    return logits.dtype in (torch.float32, torch.bfloat16, torch.float16) and kernels.triton(operator, logits, width)


@fused_operator("trine::softmax_statistics")
def _statistics(
    logits: Tensor, target: Tensor | None, weight: Tensor | None, even: bool, start: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from engine.kernels.gpu.cross_entropy import Asked, softmax_statistics

    return softmax_statistics(logits, Asked(target, weight, even, start))


@fused_operator("trine::softmax_gradient")
def _gradient(
    logits: Tensor, target: Tensor | None, weight: Tensor | None, largest: Tensor, log_sum: Tensor,
    d_log_sum: Tensor, d_picked: Tensor | None, d_weighted: Tensor | None, start: int,
) -> Tensor:  # fmt: skip
    from engine.kernels.gpu import cross_entropy as gpu

    out = logits.new_empty(logits.shape)
    asked = gpu.Asked(target, weight, weight is None, start)
    gpu.softmax_gradient(logits, asked, (largest, log_sum), gpu.SlopeBuffers(d_log_sum, d_picked, d_weighted), out)
    return out


@fused_operator("trine::softmax_gradient_", mutates=("logits",))
def _gradient_(
    logits: Tensor, target: Tensor | None, weight: Tensor | None, largest: Tensor, log_sum: Tensor,
    d_log_sum: Tensor, d_picked: Tensor | None, d_weighted: Tensor | None, start: int,
) -> None:  # fmt: skip
    from engine.kernels.gpu import cross_entropy as gpu

    asked = gpu.Asked(target, weight, weight is None, start)
    gpu.softmax_gradient(logits, asked, (largest, log_sum), gpu.SlopeBuffers(d_log_sum, d_picked, d_weighted), logits)


@_statistics.register_fake
def _(
    logits: Tensor, target: Tensor | None, weight: Tensor | None, even: bool, start: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    asked = (True, True, target is not None, even or weight is not None)
    first, second, third, fourth = (logits.new_empty(rows if want else 0, dtype=torch.float32) for want in asked)
    return first, second, third, fourth


@_gradient.register_fake
def _(
    logits: Tensor, target: Tensor | None, weight: Tensor | None, largest: Tensor, log_sum: Tensor,
    d_log_sum: Tensor, d_picked: Tensor | None, d_weighted: Tensor | None, start: int,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


@_gradient_.register_fake
def _(
    logits: Tensor, target: Tensor | None, weight: Tensor | None, largest: Tensor, log_sum: Tensor,
    d_log_sum: Tensor, d_picked: Tensor | None, d_weighted: Tensor | None, start: int,
) -> None:  # fmt: skip
    return None


Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Options of the cross-entropy loss, with the names and meanings of ``torch.nn.functional.cross_entropy``."""

    ignore_index: int = -100
    """Target of rows without a loss; their gradient is exactly 0."""
    label_smoothing: float = 0.0
    reduction: Reduction = "mean"

    def slopes(self, slope_N: Tensor, vocabulary: int) -> Slopes:
        """Returns the gradients with respect to log-sum-exp, target logit and weighted logit sum of each row.

        ``slope_N``: gradient with respect to each row's loss. ``vocabulary``: number of classes on all ranks.
        """
        smoothing = self.label_smoothing
        weighted_N = slope_N * (-smoothing / vocabulary) if smoothing else None
        return Slopes(slope_N, slope_N * (smoothing - 1), weighted_N)

    def losses(self, log_sum: Tensor, picked: Tensor, weighted: Tensor | None, vocabulary: int) -> Tensor:
        """Returns the loss of each row from softmax statistics over all columns, [N] each.

        ``log_sum``: log of the sum of exp(logit - largest). ``picked``: target's logit - largest. ``weighted``: sum
        over all classes of (logit - largest), for label smoothing. ``vocabulary``: number of classes.
        """
        losses_N = log_sum - picked * (1 - self.label_smoothing)
        return losses_N if weighted is None else losses_N - weighted * (self.label_smoothing / vocabulary)

    def reduced(self, losses_N: Tensor, counted_N: Tensor) -> Tensor:
        """Reduces the losses of N rows by ``reduction``: "mean" or "sum" (0-dim), or "none" ([N]).

        ``counted_N``: True for rows that are not ignored; the mean is over these rows.
        """
        if self.reduction == "none":
            return losses_N
        total = losses_N.sum()
        return total if self.reduction == "sum" else total / counted_N.sum()


def check_target(target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Checks that each class index in ``target`` is from 0 to ``vocabulary`` - 1, or equals ``ignore_index``.

    On an accelerator it checks nothing, because the host would have to wait.

    Raises:
        EngineError: a class index is outside the vocabulary.
    """
    if not is_host(target.device):
        return
    if bool((((target < 0) | (target >= vocabulary)) & (target != ignore_index)).any()):
        raise EngineError(
            f"a label is outside the vocabulary of {vocabulary} rows; pass labels from 0 to {vocabulary - 1}, or "
            f"{ignore_index} to ignore a position."
        )
