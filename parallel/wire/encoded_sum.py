"""One exchange of messages, and the sum of what arrives: the step of every reduction in fewer bits.

    values [N, s] -> messages [N, m] -> all-to-all -> decode, add in fp32 in the order of ranks -> sum [s]

Every contribution is encoded, this rank's own too, so that a sum is the same whoever makes it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.kernels.wire.block_codec import Codec
from engine.parallel.comm.comm import Pending

Exchange = Callable[[Tensor, Tensor], Pending]
"""(received, given) -> the all-to-all of their rows."""


def sum_messages(given_Rm: Tensor, out_s: Tensor, codec: Codec, exchange: Exchange) -> Pending:
    """Send each row to its owner; the wait leaves the sum of the rows that have come in ``out_s``."""
    received_Rm = torch.empty_like(given_Rm)
    return exchange(received_Rm, given_Rm).then(partial(codec.add, received_Rm, out_s))
