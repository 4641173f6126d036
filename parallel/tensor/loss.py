"""Cross-entropy of logits whose vocabulary is cut over the axis "tp" (Megatron-LM, Shoeybi et al. 2019, section 3).

    loss = log sum exp(x - max x) - (x[target] - max x)

The maximum, the sum and the logit of the target are found on the parts: three fp32 scalars a token travel, in
two all-reduces with the label "loss". Backward needs none: every rank has the softmax of its own columns.

Shape suffixes: N tokens, W this rank's columns of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.collectives import LOSS, refuse_second_derivatives


def cross_entropy(
    logits_NW: Tensor, target_N: Tensor, start: int, axis: TensorAxis, ignore_index: int, reduction: str
) -> Tensor:
    """As ``functional.cross_entropy``, of the columns from ``start`` on; computed in fp32, given in the logits' dtype.

    ``target_N``: int64, the same on all ranks. ``reduction``: "mean", "sum" or "none". The result is the same on
    all ranks.
    """
    counted_N = target_N != ignore_index
    target_N = target_N.where(counted_N, start)
    loss_N: Tensor = _TokenLoss.apply(logits_NW, target_N, start, axis)  # type: ignore[no-untyped-call]
    loss_N = loss_N.masked_fill(~counted_N, 0)
    if reduction == "none":
        return loss_N.to(logits_NW.dtype)
    total = loss_N.sum()
    return (total if reduction == "sum" else total / counted_N.sum()).to(logits_NW.dtype)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NW: Tensor, target_N: Tensor, start: int, axis: TensorAxis) -> Tensor:
        wide = torch.promote_types(logits_NW.dtype, torch.float32)
        largest_N = logits_NW.amax(dim=-1).to(wide)
        axis.all_reduce(largest_N, LOSS, "max")
        shares_NW = logits_NW - largest_N.unsqueeze(-1)  # fp32 by promotion; from here on in place
        place_N1 = (target_N - start).unsqueeze(-1)
        elsewhere_N1 = (place_N1 < 0) | (place_N1 >= logits_NW.shape[-1])
        place_N1.masked_fill_(elsewhere_N1, 0)
        sums_2N = torch.empty((2, len(largest_N)), dtype=wide, device=logits_NW.device)
        sums_2N[1] = shares_NW.gather(-1, place_N1).masked_fill_(elsewhere_N1, 0).squeeze(-1)
        torch.sum(shares_NW.exp_(), dim=-1, out=sums_2N[0])
        axis.all_reduce(sums_2N, LOSS)
        shares_NW.div_(sums_2N[0].unsqueeze(-1))
        ctx.save_for_backward(shares_NW, place_N1, elsewhere_N1)
        ctx.dtype = logits_NW.dtype
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivatives()
        shares_NW, place_N1, elsewhere_N1 = ctx.saved_tensors
        grad_N1 = grad_N.unsqueeze(-1)
        grad_NW = shares_NW * grad_N1
        grad_NW.scatter_add_(-1, place_N1, -grad_N1.masked_fill(elsewhere_N1, 0))
        return grad_NW.to(ctx.dtype), None, None, None
