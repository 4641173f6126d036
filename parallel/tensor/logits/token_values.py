"""Log-probabilities and entropies of tokens for policy training, from logits with a vocabulary that may be sharded.

Shape suffixes: B rows, S tokens, V the vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.tensor.collectives import LOSS, reduce_from
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits


def token_values(
    logits_BSV: Tensor, labels_BS: Tensor, names: Collection[str], temperature: float = 1.0
) -> dict[str, Tensor]:
    """Computes log-probabilities of the labels and other per-token statistics. Returns a dict from name ("log_probs"
    and ``names``) to a tensor [B, S] in fp32, or bool for "is_top1".

    Args:
        logits_BSV: logits [B, S, V], plain or sharded over axis tp. Sharded logits cause collectives with the label
            "loss".
        labels_BS: int64 [B, S], from 0 to V - 1.
        names: any of "entropy", "log_sum_sq_probs" (log of the sum of squared probabilities), "mean_logits" and
            "is_top1" (True if the label has the largest logit). Only "log_probs" and "entropy" have gradients.
        temperature: the divisor of the logits.
    """
    scaled_BSV = logits_BSV.float()
    if temperature != 1.0:
        scaled_BSV = scaled_BSV / temperature
    losses = functional.cross_entropy(scaled_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")
    found = {"log_probs": -losses.view(labels_BS.shape)}
    if "entropy" in names:
        logs_BSV = scaled_BSV.log_softmax(-1)
        found["entropy"] = -_summed(logs_BSV.exp() * logs_BSV)
    with torch.no_grad():
        if "log_sum_sq_probs" in names:
            found["log_sum_sq_probs"] = torch.logsumexp(2 * scaled_BSV.log_softmax(-1), -1)
        if "mean_logits" in names:
            found["mean_logits"] = _summed(scaled_BSV) / scaled_BSV.shape[-1]
        if "is_top1" in names:
            found["is_top1"] = _likeliest(scaled_BSV) == labels_BS
    return found


def _summed(values_BSV: Tensor) -> Tensor:
    """Returns the sum over the vocabulary, [B, S]."""
    if not isinstance(values_BSV, ShardedLogits):
        return values_BSV.sum(-1)
    part = values_BSV.part
    return reduce_from(part.local.sum(-1), part.vocabulary.axis, LOSS)


def _likeliest(logits_BSV: Tensor) -> Tensor:
    """Returns the index of the largest logit of each token, [B, S]."""
    if not isinstance(logits_BSV, ShardedLogits):
        return logits_BSV.argmax(-1)
    part = logits_BSV.part
    largest_BS, place_BS = part.local.max(-1)
    axis, begin = part.vocabulary.axis, part.vocabulary.start
    of_ranks = axis.all_gather(largest_BS.contiguous(), LOSS).argmax(0, keepdim=True)
    return axis.all_gather((place_BS + begin).contiguous(), LOSS).gather(0, of_ranks).squeeze(0)
