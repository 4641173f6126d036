"""Losses of sharded logits: the values that ``torch`` computes over the full vocabulary, from this rank's columns.

    cross_entropy, nll_loss     class numbers as targets; every option but the two that torch deprecates
    logsumexp, log_softmax      over the vocabulary
    gather                      along the vocabulary: the value at each index comes from the rank that holds it

Sums travel over "tp" with the label "loss". A rule returns ``NotImplemented`` for options that it does not cover, and
the caller gathers. Values are computed in fp32 or wider and returned in the dtype that torch returns.

Shape suffixes: N tokens, V the vocabulary, W this rank's columns of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.kernels.ops.cross_entropy import CrossEntropy, Question, Reduction, check_target, place_in
from engine.parallel.tensor.collectives import LOSS, reduce_from
from engine.parallel.tensor.logits.logit_shard import LogitShard, Vocabulary, share_operand
from engine.parallel.tensor.logits.parallel_cross_entropy import softmax_terms, summed_loss


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of a loss, by torch's names."""

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
        """Whether the rules below return what torch returns for these arguments."""
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
        """Labels [N]; 0 for ignored ones.

        Raises:
            EngineError: a label outside the vocabulary. On a GPU this is not checked, since it would stall the stream.
        """
        check_target(self.target, self.input.vocabulary.size, self.ignore_index)
        target: Tensor = self.target.masked_fill(self.target == self.ignore_index, 0)
        return target.reshape(-1)

    def reduced(self, losses_N: Tensor, target_N: Tensor) -> Tensor:
        """The losses without ignored labels, reduced; a mean is weighted as in torch."""
        ignored_N = (self.target == self.ignore_index).reshape(-1)
        counted_N = ~ignored_N if self.weight is None else self.weight[target_N].masked_fill(ignored_N, 0)
        found = self.form.reduced(losses_N.masked_fill(ignored_N, 0), counted_N)
        return found.reshape(self.target.shape) if self.reduction == "none" else found


def sharded_cross_entropy(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``functional.cross_entropy`` for labels [N] of [N, V], or [B, ...] of [B, V, ...]."""
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
    """``functional.nll_loss`` of log-probabilities."""
    given = _Options(*args, **kwargs)
    if not given.understood:
        return NotImplemented
    target_N = given.checked_target()
    losses_N = -_pick(given.input.rows(), -1, target_N.unsqueeze(-1), given.input.vocabulary).squeeze(-1)
    if given.weight is not None:
        losses_N = losses_N * given.weight[target_N]
    return given.reduced(losses_N, target_N).to(_given_dtype(given.input, also_on_host=True))


def logsumexp(func: Callable[..., Any], input: Any, dim: Any, keepdim: bool = False, *, out: Any = None) -> Any:
    """``torch.logsumexp`` over the vocabulary: [.., V] -> [..]."""
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
    """``log_softmax`` over the vocabulary. Backward sums one scalar a token over "tp"."""
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
    """``torch.gather`` along the vocabulary: a plain tensor with the shape of ``index``.

    Raises:
        EngineError: an index outside the vocabulary. On a GPU this is not checked.
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
            f"an index of gather is outside the vocabulary of {size} rows; give indices from 0 to {size - 1}."
        )
    return _pick(input.local, input.dim, index, input.vocabulary)


def _pick(local: Tensor, dim: int, index: Tensor, vocabulary: Vocabulary) -> Tensor:
    place, elsewhere = place_in(index, vocabulary.start, vocabulary.width)
    return reduce_from(local.gather(dim, place).masked_fill(elsewhere, 0), vocabulary.axis, LOSS)


def _is_vocabulary(logits: LogitShard, dims: Any) -> bool:
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % logits.local.dim() == logits.dim


def _given_dtype(logits: LogitShard, also_on_host: bool) -> torch.dtype:
    """The dtype of the result: fp32 under autocast, which widens fewer functions on the CPU; else the logits' own."""
    dtype, device = logits.dtype, logits.local.device
    narrow = dtype in (torch.float16, torch.bfloat16) and not logits.local.is_meta
    widens = narrow and (also_on_host or not is_host(device))
    return torch.float32 if widens and torch.is_autocast_enabled(device.type) else dtype
