"""Losses of logits that wait (``logit_slice``): by chunks of tokens, so that all logits never exist at once.

The terms are those of ``loss``, and so is what travels over "tp", label "loss": one maximum and one sum for all tokens.
Before that every rank goes through its chunks, and in backward once more; the gradient of the hidden states is summed
over "tp" where they came to the head, as that of the logits would have made it.
"""

from torch import Tensor

from engine.kernels.cross_entropy import CrossEntropy
from engine.kernels.linear_cross_entropy import Conditions, Head, LinearTerms, linear_cross_entropy, linear_terms
from engine.kernels.softmax_terms import Question, Softmax
from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.collectives import LOSS
from engine.parallel.tensor.logit_slice import LateProduct, Slice, SoftmaxParts


class OverAxis:
    """Terms travel over the tensor axis with the label "loss"."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis

    def largest(self, values: Tensor) -> None:
        """The largest values of all ranks, in place."""
        self._axis.all_reduce(values, LOSS, "max")

    def sum(self, values: Tensor) -> None:
        """The sums over all ranks, in place."""
        self._axis.all_reduce(values, LOSS)


def linear_terms_of(hidden: Slice, product: LateProduct, question: Question) -> LinearTerms:
    """Terms of all tokens of logits that wait; their softmax is used again by who shares it."""
    shared, axis = hidden.softmax, hidden.vocabulary.axis
    known = None if shared.parts is None else Softmax(*shared.parts[:2])
    conditions = Conditions(product.kernels, None if axis.size == 1 else OverAxis(axis), known)
    terms = linear_terms(hidden.rows(), Head(product.weight, product.bias), question, conditions)
    if known is None:
        shared.parts = SoftmaxParts(terms.largest, terms.log_sum.detach(), None)
    return terms


def summed_loss(logits: Slice, target_N: Tensor, form: CrossEntropy) -> Tensor | None:
    """The loss over the tokens of a whole vocabulary, whose gradients come with it; None for other losses."""
    product = logits.product
    if product is None or logits.vocabulary.axis.size > 1 or form.reduction == "none":
        return None
    return linear_cross_entropy(logits.rows(), product.weight, product.bias, target_N, form, product.kernels)
