"""Fused linear layer and cross-entropy in chunks of tokens, without ever storing the full logits.

One chunk's logits are in memory at a time, as in Liger and Apple's CCE (Wijmans et al. 2024).

    a chunk    logits_CW = x W' + b  ->  terms of the softmax  ->  gradient written over the logits  ->  dx, dW, db

The logits of a chunk have about the bytes of all hidden states, C W ~ N H, and at least a quarter of the bytes of dW, C
~ H / 2: each chunk reads and writes all of dW, and the products of a chunk must take longer than this traffic. The size
depends on shapes alone: dW is summed over the chunks, so a measured size would give other bits in each run.

Two methods compute the gradients:
    with the loss   for all columns on one rank and a loss summed over the tokens: the forward computes dx and dW for a
                    gradient of 1 per token, and the backward scales them. 6 N V H flop. dx and dW (fp32) are saved
                    until the backward.
    recomputed      in all other cases (a gradient for each token, columns on several ranks, other terms): the backward
                    recomputes the logits in the same chunks. 8 N V H flop. A few numbers per token are saved.
dW and db are summed over the chunks in fp32 (fp64 for fp64) and rounded once. A weight with a main gradient in that
dtype gets no dW: recomputed chunks add to the main gradient, and the dW of a forward is scaled and added in one pass.
Additional memory: the logits of one chunk, and dW in fp32.

Shape suffixes: N tokens, C tokens of a chunk, H width, V vocabulary, W columns of this rank.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.dispatch import Kernels, OpenSum, open_sum
from engine.kernels.ops.cross_entropy import (
    CrossEntropy,
    Exchange,
    Question,
    Slopes,
    Softmax,
    Statistics,
    check_target,
    find_gradient,
    find_statistics,
    join_softmax_terms,
    uses_triton,
)
from engine.kernels.ops.linear import add_by_library_

FAST_CHUNK = 2048
"""Tokens from which on longer chunks are hardly faster."""
LEAST_CHUNK = 256
"""Minimum tokens of a chunk; matrix products of fewer tokens do not fill a GPU."""
_FP16_SLOPE = 256.0
"""Factor on fp16 gradients of logits before the sum.

Without the factor, softmax probabilities below 6e-8 would underflow to 0 with any loss scale, because the loss scale is
applied later.
"""


class Head(NamedTuple):
    """Language-model head on one rank: weight [W, H] and bias [W] or None.

    W is the number of the rank's vocabulary columns, and H the width of the hidden states.
    """

    weight: Tensor
    bias: Tensor | None

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Returns the logits [C, W] of C tokens with the hidden states ``hidden_CH``."""
        return functional.linear(hidden_CH, self.weight, self.bias)


class Conditions(NamedTuple):
    """Arguments of :func:`linear_terms`: Triton or PyTorch, all-reduces over ranks, and softmax of an earlier call."""

    kernels: Kernels
    exchange: Exchange | None = None
    """All-reduces over ranks with other vocabulary columns; None if this rank has all columns."""
    known: Softmax | None = None
    """Softmax of the same logits from an earlier call, not computed or communicated again."""


class LinearTerms(NamedTuple):
    """Softmax statistics of N tokens over the full vocabulary, [N] each, in fp32 or fp64.

    All except ``largest`` are differentiable.
    """

    largest: Tensor
    log_sum: Tensor
    picked: Tensor | None
    weighted: Tensor | None


def chunk_tokens(tokens: int, width: int, columns: int) -> int:
    """Returns the number of tokens per chunk, a power of two, for a loss that is computed chunk by chunk.

    A chunk has about as many logits as the hidden states of all ``tokens`` have elements, or more for fast products.
    ``width``: size of a hidden state. ``columns``: number of logits per token.
    """
    quarter = min(tokens // 4, FAST_CHUNK)
    wanted = max(-(-tokens * width // max(columns, 1)), width // 2, quarter, LEAST_CHUNK)
    return 1 << (wanted - 1).bit_length()


def linear_cross_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_N: Tensor, form: CrossEntropy, kernels: Kernels
) -> Tensor:
    """Computes the cross-entropy of ``linear(hidden, weight, bias)`` chunk by chunk, never with all logits in memory.

    Returns the loss, 0-dim, or [N] for reduction "none", in fp32 (fp64 for fp64 operands). ``target_N``: class indices,
    int64. The loss can be differentiated once.

    Raises:
        EngineError: a target is outside the vocabulary; checked only on the CPU.
    """
    given = tuple(x for x in (hidden_NH, weight_VH, bias_V) if x is not None)
    if has_torch_function(given):
        return handle_torch_function(linear_cross_entropy, given, hidden_NH, weight_VH, bias_V, target_N, form, kernels)
    check_target(target_N, len(weight_VH), form.ignore_index)
    hidden_NH, weight_VH, bias_V = as_autocast(hidden_NH, weight_VH, bias_V)
    counted_N = target_N != form.ignore_index
    if form.reduction != "none" and torch.is_grad_enabled() and any(x.requires_grad for x in given):
        total: Tensor = _Summed.apply(hidden_NH, weight_VH, bias_V, target_N, (form, kernels))  # type: ignore[no-untyped-call]
        return total
    question = Question(target_N, even=form.label_smoothing > 0)
    terms = linear_terms(hidden_NH, Head(weight_VH, bias_V), question, Conditions(kernels))
    assert terms.picked is not None
    losses_N = form.losses(terms.log_sum, terms.picked, terms.weighted, len(weight_VH))
    return form.reduced(losses_N.masked_fill(~counted_N, 0), counted_N)


def linear_terms(hidden_NH: Tensor, head: Head, question: Question, conditions: Conditions) -> LinearTerms:
    """Computes the softmax statistics of ``head.logits(hidden)`` chunk by chunk; the backward recomputes the logits.

    With ``conditions.exchange``, it all-reduces one maximum and one sum. With ``conditions.known``, it all-reduces only
    the sum, or nothing if ``question`` is empty. The backward does not communicate: the caller sums the gradient of
    ``hidden_NH`` over the ranks.
    """
    found: tuple[Any, ...] = _Terms.apply(hidden_NH, *head, question, conditions)  # type: ignore[no-untyped-call]
    return LinearTerms(*found)


def as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (hidden, weight, bias) cast to autocast's dtype; unchanged if autocast is off or ``hidden`` is fp64."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _chunks(hidden_NH: Tensor, columns: int) -> Iterator[slice]:
    tokens, width = hidden_NH.shape
    size = chunk_tokens(tokens, width, columns)
    for first in range(0, tokens, size):
        yield slice(first, first + size)


def _columns_like(hidden_NH: Tensor, head: Head, kernels: Kernels) -> bool:
    return uses_triton("linear_cross_entropy", hidden_NH, len(head.weight), kernels)


class _Sums:
    """Sums of the gradients over the chunks; only ``wanted`` gradients are computed."""

    def __init__(self, hidden_NH: Tensor, head: Head, wanted: tuple[bool, ...], into: Tensor | None = None) -> None:
        """Allocates the sums; ``into``: the existing sum of the weight's gradient; None: a new sum."""
        self._hidden, self._weight = hidden_NH, head.weight
        wide = torch.promote_types(head.weight.dtype, torch.float32)
        wants_hidden, wants_weight, wants_bias = wanted
        self.hidden = torch.empty_like(hidden_NH, memory_format=torch.contiguous_format) if wants_hidden else None
        self.weight = into
        if wants_weight and into is None:
            self.weight = torch.zeros_like(head.weight, dtype=wide)
        bias = head.bias if wants_bias else None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=wide)

    def add(self, part: slice, grad_CW: Tensor) -> None:
        """Adds the contribution of one chunk with ``grad_CW``, the gradient of the chunk's logits."""
        if self.hidden is not None:
            torch.mm(grad_CW, self._weight, out=self.hidden[part])
        if self.weight is not None:
            add_by_library_(self.weight, grad_CW.t(), self._hidden[part])
        if self.bias is not None:
            self.bias += grad_CW.sum(0, dtype=self.bias.dtype)


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_WH: Tensor,
        bias_W: Tensor | None,
        question: Question,
        conditions: Conditions,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.main = conditions.kernels.main.use(weight_WH)
        head = Head(weight_WH, bias_W)
        ctx.triton = _columns_like(hidden_NH, head, conditions.kernels)
        known, answered = conditions.known, question.target is None and not question.weighted
        if known is not None and answered:
            softmax, picked_N, weighted_N = known, None, None
        else:
            found = _statistics(hidden_NH, head, question, ctx.triton)
            softmax, picked_N, weighted_N = join_softmax_terms(
                found, question, len(weight_WH), conditions.exchange, known
            )
        ctx.save_for_backward(hidden_NH, weight_WH, bias_W, question.target, question.weight, *softmax)
        ctx.question = question._replace(target=None, weight=None)
        ctx.mark_non_differentiable(softmax.largest)
        return softmax.largest, softmax.log_sum.clone(), picked_N, weighted_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_WH, bias_W, target_N, weight_W, largest_N, log_sum_N = ctx.saved_tensors
        head, softmax = Head(weight_WH, bias_W), Softmax(largest_N, log_sum_N)
        question = ctx.question._replace(target=target_N, weight=weight_W)
        opened = _main_sum(ctx, torch.promote_types(weight_WH.dtype, torch.float32))
        if opened is not None and not opened.holds:
            opened.into.zero_()
        sums = _Sums(hidden_NH, head, ctx.needs_input_grad[:3], None if opened is None else opened.into)
        with _without_autocast(hidden_NH):
            for part in _chunks(hidden_NH, len(weight_WH)):
                logits_CW, asked = head.logits(hidden_NH[part]), question.rows(part)
                its = Softmax(softmax.largest[part], softmax.log_sum[part])
                wanted = Slopes(*slopes).rows(part)
                sums.add(part, find_gradient(logits_CW, asked, its, wanted, ctx.triton, inplace=True))
                del logits_CW  # free the logits before the next chunk allocates its own
        if opened is not None:
            ctx.main.end(ctx.next_functions[1][0])
            return sums.hidden, None, _as(sums.bias, bias_W), None, None
        return sums.hidden, _as(sums.weight, weight_WH), _as(sums.bias, bias_W), None, None


class _Summed(torch.autograd.Function):
    """Loss over all tokens of a whole vocabulary, with gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        how: tuple[CrossEntropy, Kernels],
    ) -> Tensor:
        form, kernels = how
        ctx.main = kernels.main.use(weight_VH)
        head, counted_N = Head(weight_VH, bias_V), target_N != form.ignore_index
        triton = _columns_like(hidden_NH, head, kernels)
        sums = _Sums(hidden_NH, head, ctx.needs_input_grad[:3])
        parts: list[Tensor] = []
        unit = _FP16_SLOPE if hidden_NH.dtype == torch.float16 else 1.0
        with _without_autocast(hidden_NH):
            # Each chunk's logits become their own gradient in place, so only one chunk is allocated.
            for part in _chunks(hidden_NH, len(weight_VH)):
                logits_CV = head.logits(hidden_NH[part])
                question = Question(target_N[part], even=form.label_smoothing > 0)
                found = find_statistics(logits_CV, question, triton)
                softmax, picked_C, weighted_C = join_softmax_terms(found, question, len(weight_VH), None)
                assert picked_C is not None
                losses_C = form.losses(softmax.log_sum, picked_C, weighted_C, len(weight_VH))
                parts.append(losses_C.masked_fill_(~counted_N[part], 0))
                # The gradient of 1 a token is known before the backward; scaled by _FP16_SLOPE, fp16 keeps small
                # probabilities.
                slopes = form.slopes(counted_N[part].to(losses_C.dtype) * unit, len(weight_VH))
                sums.add(part, find_gradient(logits_CV, question, softmax, slopes, triton, inplace=True))
                del logits_CV  # free the logits before the next chunk allocates its own
        ctx.save_for_backward(sums.hidden, sums.weight, sums.bias, counted_N)
        ctx.unit = unit
        ctx.mean, ctx.dtypes = form.reduction == "mean", (weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        losses_N = torch.cat(parts) if parts else hidden_NH.new_empty(0, dtype=wide)
        return form.reduced(losses_N, counted_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_NH, dweight_VH, dbias_V, counted_N = ctx.saved_tensors
        slope = slope / ctx.unit
        if ctx.mean:
            slope = slope / counted_N.sum().clamp_(min=1)
        weight, bias = ctx.dtypes
        dhidden_NH, dbias_V = _scaled(dhidden_NH, slope), _scaled(dbias_V, slope, bias)
        opened = None if dweight_VH is None else _main_sum(ctx, dweight_VH.dtype)
        if opened is None:
            return dhidden_NH, _scaled(dweight_VH, slope, weight), dbias_V, None, None
        scale = slope.reshape(1).to(dweight_VH.dtype)
        if opened.holds:
            opened.into.addcmul_(dweight_VH, scale)
        else:
            torch.mul(dweight_VH, scale, out=opened.into)
        ctx.main.end(ctx.next_functions[1][0])
        return dhidden_NH, None, dbias_V, None, None


def _main_sum(ctx: Any, wide: torch.dtype) -> OpenSum | None:
    """Returns the open main gradient of the head's weight, if its dtype is that of sums over chunks; else None."""
    opened = open_sum(ctx.main, ctx.next_functions[1][0]) if ctx.needs_input_grad[1] else None
    return opened if opened is not None and opened.into.dtype == wide else None


def _statistics(hidden_NH: Tensor, head: Head, question: Question, triton: bool) -> Statistics:
    """Returns the statistics of all tokens, computed chunk by chunk."""
    found: list[Statistics] = []
    with _without_autocast(hidden_NH):
        for part in _chunks(hidden_NH, len(head.weight)):
            found.append(find_statistics(head.logits(hidden_NH[part]), question.rows(part), triton))
    if not found:
        found = [find_statistics(head.logits(hidden_NH), question, triton)]
    if len(found) == 1:
        return found[0]
    return Statistics(*(None if column[0] is None else torch.cat(column) for column in zip(*found, strict=True)))  # type: ignore[arg-type]


def _scaled(x: Tensor | None, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Returns ``x * scale`` in ``dtype``, rounded once."""
    if x is None:
        return None
    # a 0-dim scale would be rounded to the dtype of x first
    return torch.mul(x, scale.reshape(1), out=torch.empty_like(x, dtype=dtype))


def _without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _as(total: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if total is None or parameter is None else total.to(parameter.dtype)
