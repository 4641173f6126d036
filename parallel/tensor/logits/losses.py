"""Losses of sharded logits, computed from this rank's columns and equal to those of ``torch`` on the full vocabulary.

    cross_entropy, nll_loss     class numbers as targets; all options except the two that torch deprecates
    logsumexp, log_softmax      over the vocabulary
    gather                      along the vocabulary: the rank that stores an index sends the value

Sums are all-reduced over "tp" with the label "loss". A rule returns ``NotImplemented`` for options that it does not
cover, and the caller gathers. Values are computed in fp32 or wider and returned in torch's dtype.

Terms of the softmax over a sharded vocabulary (Megatron-LM, Shoeybi et al. 2019, section 3):

    cross-entropy   log_sum - picked              log_sum   log sum_v exp(x_v - max x)
    z-loss          (log_sum + max x)^2           picked    x_target - max x
    smoothing       log_sum sum_v w_v - weighted  weighted  sum_v w_v (x_v - max x)

Each rank computes maximum and terms of its shard, and two all-reduces combine them in fp32: one for the maximum, one
for all terms. Backward needs no communication: every rank has the softmax of its own columns. The implementation in
torch saves this softmax; kernels recompute it (``kernels.ops.cross_entropy``) and save two numbers per token.
Cross-entropy all-reduces 3 scalars per token, or 4 with label smoothing; a z-loss 2 alone, none after cross-entropy.

The maximum has no gradient: its contributions cancel in every formula above.

Lazy logits use the same terms and send the same bytes: every rank computes its chunks of tokens, then all-reduces one
maximum and one sum for all tokens; backward recomputes the chunks. The gradient of the hidden states is summed over
"tp" before the head.

Shape suffixes: N tokens, V the vocabulary, W this rank's columns of the vocabulary, K terms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.kernels.ops.cross_entropy import (
    CrossEntropy,
    Question,
    Reduction,
    Slopes,
    Softmax,
    check_target,
    find_gradient,
    find_statistics,
    fits_softmax_kernels,
    join_softmax_terms,
    place_in,
    uses_triton,
)
from engine.kernels.ops.linear_cross_entropy import Conditions, Head, LinearTerms, linear_cross_entropy, linear_terms
from engine.parallel.tensor.collectives import LOSS, reduce_from, refuse_second_derivatives
from engine.parallel.tensor.logits.logit_shard import (
    LateProduct,
    LogitShard,
    SharedSoftmax,
    SoftmaxParts,
    Vocabulary,
    share_operand,
)
from engine.parallel.tensor.tp_axis import TensorAxis


class Terms(NamedTuple):
    """Per-token softmax terms of a loss: tensors [N], equal on all ranks, with gradients; None if not needed.

    For logits x, ``log_sum``: log of the sum of exp(x - max x); ``picked``: x - max x at the target; ``weighted``: sum
    of (x - max x) times the class weight (1 if there are none) over the vocabulary.
    """

    log_sum: Tensor
    picked: Tensor | None
    weighted: Tensor | None


def softmax_terms(logits: LogitShard, question: Question) -> Terms:
    """Returns the per-token softmax terms that ``question`` selects, over the full vocabulary. All-reduces over "tp",
    but reuses softmax statistics that ``logits`` has cached.
    """
    vocabulary, shared = logits.vocabulary, logits.softmax
    question = question._replace(start=vocabulary.start)
    if logits.product is not None:
        return Terms(*linear_terms_of(logits, logits.product, question)[1:])
    logits_NW, kernels = logits.rows(), vocabulary.axis.kernels
    fused = fits_softmax_kernels(logits_NW) and uses_triton("cross_entropy", logits_NW, vocabulary.width, kernels)
    found: tuple[Any, ...] = (_FusedTerms if fused else _Terms).apply(  # type: ignore[no-untyped-call]
        logits_NW, question, vocabulary, shared
    )
    return Terms(*found)


class _FusedTerms(torch.autograd.Function):
    """Terms of the softmax by kernels, which save only two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any, logits_NW: Tensor, question: Question, vocabulary: Vocabulary, shared: SharedSoftmax
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        known = None if shared.parts is None else Softmax(*shared.parts[:2])
        if known is not None and question.target is None and not question.weighted:
            softmax, picked_N, weighted_N = known, None, None
        else:
            found = find_statistics(logits_NW, question, triton=True)
            exchange = OverAxis(vocabulary.axis)
            softmax, picked_N, weighted_N = join_softmax_terms(found, question, vocabulary.width, exchange, known)
        shared.parts = shared.parts or SoftmaxParts(*softmax, None)
        ctx.save_for_backward(logits_NW, question.target, question.weight, *softmax)
        ctx.question = question._replace(target=None, weight=None)
        return softmax.log_sum.clone(), picked_N, weighted_N

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        logits_NW, target_N, weight_W, *softmax = ctx.saved_tensors
        question = ctx.question._replace(target=target_N, weight=weight_W)
        return find_gradient(logits_NW, question, Softmax(*softmax), Slopes(*slopes), triton=True), None, None, None


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NW: Tensor, question: Question, vocabulary: Vocabulary, shared: SharedSoftmax
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        target_N, weight_W, even, start = question
        largest_N = _largest(logits_NW, vocabulary, shared)
        shifted_NW = logits_NW - largest_N.unsqueeze(-1)  # fp32 by promotion
        place = None if target_N is None else place_in(target_N.unsqueeze(-1), start, vocabulary.width)
        terms = []
        if place is not None:
            terms.append(shifted_NW.gather(-1, place[0]).masked_fill_(place[1], 0).squeeze(-1))
        if even or weight_W is not None:
            terms.append((shifted_NW if weight_W is None else shifted_NW * weight_W).sum(-1))
        parts, sums = _finish(shifted_NW, largest_N, terms, vocabulary, shared, ctx.needs_input_grad[0])
        ctx.save_for_backward(parts.shares, *(place or (None, None)), weight_W)
        ctx.dtype, ctx.shared = logits_NW.dtype, shared
        picked_N = sums[0] if place is not None else None
        return parts.log_sum.clone(), picked_N, sums[-1] if question.weighted else None

    @staticmethod
    def backward(
        ctx: Any, log_sum_N: Tensor | None, picked_N: Tensor | None, weighted_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        if ctx.shared.parts is not None:  # free the largest tensor: later losses use only the others
            ctx.shared.parts = ctx.shared.parts._replace(shares=None)
        shares_NW, place_N1, elsewhere_N1, weight_W = ctx.saved_tensors
        grad_NW = torch.zeros_like(shares_NW) if log_sum_N is None else shares_NW * log_sum_N.unsqueeze(-1)
        if picked_N is not None:
            grad_NW.scatter_add_(-1, place_N1, picked_N.unsqueeze(-1).masked_fill(elsewhere_N1, 0))
        if weighted_N is not None:
            weighted_N1 = weighted_N.unsqueeze(-1)
            grad_NW = grad_NW.add_(weighted_N1) if weight_W is None else grad_NW.addcmul_(weighted_N1, weight_W)
        return grad_NW.to(ctx.dtype), None, None, None


def _largest(logits_NW: Tensor, vocabulary: Vocabulary, shared: SharedSoftmax) -> Tensor:
    if shared.parts is not None:
        return shared.parts.largest
    largest_N = logits_NW.amax(dim=-1).to(torch.promote_types(logits_NW.dtype, torch.float32))
    vocabulary.axis.all_reduce(largest_N, LOSS, "max")
    return largest_N.masked_fill_(largest_N.isinf(), 0)


def _finish(
    shifted_NW: Tensor,
    largest_N: Tensor,
    terms: list[Tensor],
    vocabulary: Vocabulary,
    shared: SharedSoftmax,
    graded: bool,
) -> tuple[SoftmaxParts, list[Tensor]]:
    """Sums ``terms`` over the ranks, with the terms that ``shared`` lacks; ``shifted_NW`` is overwritten."""
    known = shared.parts
    if known is None:
        shifted_NW.exp_()
        terms = [shifted_NW.sum(-1), *terms]
    sums_KN = torch.stack(terms) if terms else largest_N.new_empty((0, len(largest_N)))
    if terms:
        vocabulary.axis.all_reduce(sums_KN, LOSS)
    sums = list(sums_KN.unbind())
    if known is None:
        total_N = sums.pop(0)
        shares_NW = shifted_NW.div_(total_N.unsqueeze(-1)) if graded else None
        shared.parts = SoftmaxParts(largest_N, total_N.log(), shares_NW)
    elif graded and known.shares is None:
        shared.parts = known._replace(shares=shifted_NW.sub_(known.log_sum.unsqueeze(-1)).exp_())
    assert shared.parts is not None
    return shared.parts, sums


class OverAxis:
    """Reducer of per-token loss terms over the tensor ranks of ``axis``, by all-reduces with the label "loss"."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis

    def largest(self, values: Tensor) -> None:
        """Replaces ``values`` by the maximum over all tensor ranks, in place."""
        self._axis.all_reduce(values, LOSS, "max")

    def sum(self, values: Tensor) -> None:
        """Sums ``values`` over all tensor ranks, in place."""
        self._axis.all_reduce(values, LOSS)


def linear_terms_of(hidden: LogitShard, product: LateProduct, question: Question) -> LinearTerms:
    """Returns the softmax terms that ``question`` selects for lazy logits, computed from ``hidden`` in chunks of
    tokens. Caches the softmax statistics in ``hidden``; never stores the full logits.

    ``product``: head that computes the logits.
    """
    shared, axis = hidden.softmax, hidden.vocabulary.axis
    known = None if shared.parts is None else Softmax(*shared.parts[:2])
    conditions = Conditions(product.kernels, None if axis.size == 1 else OverAxis(axis), known)
    terms = linear_terms(hidden.rows(), Head(product.weight, product.bias), question, conditions)
    if known is None:
        shared.parts = SoftmaxParts(terms.largest, terms.log_sum.detach(), None)
    return terms


def summed_loss(logits: LogitShard, target_N: Tensor, form: CrossEntropy) -> Tensor | None:
    """Returns the mean or sum of the cross-entropy of lazy logits, by an operator that fuses head and loss.

    Returns None if the logits are not lazy, the vocabulary is sharded, or ``form.reduction`` is "none".
    """
    product = logits.product
    if product is None or logits.vocabulary.axis.size > 1 or form.reduction == "none":
        return None
    return linear_cross_entropy(logits.rows(), product.weight, product.bias, target_N, form, product.kernels)


@dataclass(frozen=True, slots=True)
class _Options:
    """Arguments of a loss, by torch's names."""

    input: Any
    target: Any
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def understood(self) -> bool:
        """True if the rules below return torch's result for these arguments."""
        logits, target, weight = self.input, self.target, self.weight
        return (
            isinstance(logits, LogitShard)
            and isinstance(target, Tensor)
            and target.dtype == torch.int64
            and logits.dim == min(1, logits.local.dim() - 1)
            and tuple(target.shape) == logits.leading
            and (weight is None or (isinstance(weight, Tensor) and not weight.requires_grad))
            and (weight is None or tuple(weight.shape) == (logits.vocabulary.size,))
            and self.size_average is None
            and self.reduce is None
            and self.reduction in ("mean", "sum", "none")
            and 0 <= self.label_smoothing <= 1
        )

    @property
    def form(self) -> CrossEntropy:
        """The options of the loss without class weights."""
        return CrossEntropy(self.ignore_index, self.label_smoothing, cast(Reduction, self.reduction))

    def checked_target(self) -> Tensor:
        """Returns labels [N], with 0 for ignored labels.

        Raises:
            EngineError: a label is outside the vocabulary. A GPU does not check, because the check would stall the
                stream.
        """
        check_target(self.target, self.input.vocabulary.size, self.ignore_index)
        target: Tensor = self.target.masked_fill(self.target == self.ignore_index, 0)
        return target.reshape(-1)

    def reduced(self, losses_N: Tensor, target_N: Tensor) -> Tensor:
        """Returns the losses without ignored labels, reduced; a mean is weighted as in torch."""
        ignored_N = (self.target == self.ignore_index).reshape(-1)
        counted_N = ~ignored_N if self.weight is None else self.weight[target_N].masked_fill(ignored_N, 0)
        found = self.form.reduced(losses_N.masked_fill(ignored_N, 0), counted_N)
        return found.reshape(self.target.shape) if self.reduction == "none" else found


def sharded_cross_entropy(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Computes ``functional.cross_entropy`` of logits with a sharded vocabulary, by all-reduces of per-token terms.

    Returns ``NotImplemented`` for arguments that it does not support; the caller then gathers the logits.
    """
    given = _Options(*args, **kwargs)
    if not given.understood:
        return NotImplemented
    logits, smoothing, weight_V = given.input, given.label_smoothing, given.weight
    vocabulary, target_N, dtype = logits.vocabulary, given.checked_target(), _given_dtype(logits, also_on_host=True)
    if weight_V is None:
        summed = summed_loss(logits, given.target.reshape(-1), given.form)
        if summed is not None:
            return summed.to(dtype)
    weight_W = None if weight_V is None else weight_V.narrow(0, vocabulary.start, vocabulary.width)
    question = Question(target_N, weight_W, even=weight_V is None) if smoothing else Question(target_N)
    terms = softmax_terms(logits, question)
    assert terms.picked is not None
    losses_N = terms.log_sum - terms.picked
    if weight_V is not None:
        losses_N = losses_N * weight_V[target_N]
    if terms.weighted is not None:
        total: Any = vocabulary.size if weight_V is None else weight_V.sum()
        even_N = (terms.log_sum * total - terms.weighted) / vocabulary.size
        losses_N = losses_N * (1 - smoothing) + even_N * smoothing
    return given.reduced(losses_N, target_N).to(dtype)


def nll_loss(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Computes ``functional.nll_loss`` of log-probabilities with a sharded vocabulary, by one all-reduce of the values
    at the targets.

    Returns ``NotImplemented`` for arguments that it does not support; the caller then gathers the input.
    """
    given = _Options(*args, **kwargs)
    if not given.understood:
        return NotImplemented
    target_N = given.checked_target()
    losses_N = -_pick(given.input.rows(), -1, target_N.unsqueeze(-1), given.input.vocabulary).squeeze(-1)
    if given.weight is not None:
        losses_N = losses_N * given.weight[target_N]
    return given.reduced(losses_N, target_N).to(_given_dtype(given.input, also_on_host=True))


def logsumexp(func: Callable[..., Any], input: Any, dim: Any, keepdim: bool = False, *, out: Any = None) -> Any:
    """Computes ``torch.logsumexp`` over the sharded vocabulary dim; the result is equal on all ranks.

    Returns ``NotImplemented`` if ``dim`` is not the vocabulary, or if ``out`` is given.
    """
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if not isinstance(input, LogitShard) or not _is_vocabulary(input, dims) or out is not None:
        return NotImplemented
    terms = softmax_terms(input, Question())
    assert input.softmax.parts is not None
    found = (
        (terms.log_sum + input.softmax.parts.largest).to(_given_dtype(input, also_on_host=False)).reshape(input.leading)
    )
    return found.unsqueeze(input.dim) if keepdim else found


def log_softmax(
    func: Callable[..., Any], input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None, **kwargs: Any
) -> Any:
    """Computes ``log_softmax`` over the sharded vocabulary dim; the result is sharded like ``input``. Backward sums one
    scalar for each token over "tp". Returns ``NotImplemented`` if ``dim`` is not the vocabulary.
    """
    if isinstance(_stacklevel, torch.dtype):  # in torch.log_softmax the third argument is the dtype
        dtype = _stacklevel
    if not isinstance(input, LogitShard) or not _is_vocabulary(input, (dim,)) or kwargs:
        return NotImplemented
    if dtype is not None:
        input = input.now(input.local.to(dtype))
    terms = softmax_terms(input, Question())
    assert input.softmax.parts is not None
    largest, log_sum = (
        value_N.reshape(input.leading).unsqueeze(input.dim) for value_N in (input.softmax.parts.largest, terms[0])
    )
    found = input.local - largest - share_operand(log_sum, input.vocabulary.axis, LOSS)
    return input.now(found.to(_given_dtype(input, also_on_host=False)))


def gather(func: Callable[..., Any], input: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    """Computes ``torch.gather`` along the sharded vocabulary dim. Returns a plain tensor with the shape of ``index``,
    equal on all ranks.

    Returns ``NotImplemented`` if ``dim`` is not the vocabulary.

    Raises:
        EngineError: an index on the CPU is outside the vocabulary. On a GPU, indices are not checked.
    """
    if (
        not isinstance(input, LogitShard)
        or not isinstance(index, Tensor)
        or not _is_vocabulary(input, (dim,))
        or kwargs
    ):
        return NotImplemented
    size = input.vocabulary.size
    if is_host(index.device) and bool(((index < 0) | (index >= size)).any()):
        raise EngineError(
            f"an index of gather is outside the vocabulary of {size} rows; pass indices from 0 to {size - 1}."
        )
    return _pick(input.local, input.dim, index, input.vocabulary)


def _pick(local: Tensor, dim: int, index: Tensor, vocabulary: Vocabulary) -> Tensor:
    place, elsewhere = place_in(index, vocabulary.start, vocabulary.width)
    return reduce_from(local.gather(dim, place).masked_fill(elsewhere, 0), vocabulary.axis, LOSS)


def _is_vocabulary(logits: LogitShard, dims: Any) -> bool:
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % logits.local.dim() == logits.dim


def _given_dtype(logits: LogitShard, also_on_host: bool) -> torch.dtype:
    """Returns the dtype of the result: fp32 under autocast (fewer functions on the CPU), else the logits' own."""
    dtype, device = logits.dtype, logits.local.device
    narrow = dtype in (torch.float16, torch.bfloat16) and not logits.local.is_meta
    widens = narrow and (also_on_host or not is_host(device))
    return torch.float32 if widens and torch.is_autocast_enabled(device.type) else dtype
