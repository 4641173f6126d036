"""Signs: numbers in one bit, with the mean of their sizes as the scale of a block (signSGD, Bernstein et al. 2018).

    scale = mean |block|,  value = + scale or - scale

A sign alone says little of a number, so it is for sums with error feedback (Karimireddy et al. 2019): what a message
leaves out is added to the next one. A block with a number that is not finite arrives as NaN altogether, and leaves
nothing. A message holds a bit for each number, eight a byte, the first one lowest, and then the scales in fp32. There
is no kernel for it: torch runs it on any device.

Shape suffixes: R messages, s elements of a message, m bytes of a message, B elements of a block, K blocks.
"""

import torch
from torch import Tensor

SMALLEST_MEAN = 2.0**-126
"""The smallest normal number of fp32: a scale that no device flushes to zero."""
_BITS = 8


@torch.no_grad()
def encode_signs(values_Rs: Tensor, block: int, residual_Rs: Tensor | None = None) -> Tensor:
    """Return the messages of ``values_Rs``, uint8 [R, m]; the residual is added before and left behind, as in
    :func:`~engine.kernels.wire.block_codec.encode_blocks`."""
    rows, elements = values_Rs.shape
    given = values_Rs.float()
    if residual_Rs is not None:
        given = given.add(residual_Rs)
    x_RKB = given.reshape(rows, -1, block)
    finite_RK1 = x_RKB.isfinite().all(dim=2, keepdim=True)
    mean_RK1 = torch.where(finite_RK1, x_RKB, 0.0).abs().mean(dim=2, keepdim=True)
    scale_RK1 = torch.where(mean_RK1 > 0, mean_RK1.clamp_min(SMALLEST_MEAN), 0.0)
    negative_RKB = x_RKB < 0
    if residual_Rs is not None:
        left = torch.where(finite_RK1, x_RKB - torch.where(negative_RKB, -scale_RK1, scale_RK1), 0.0)
        residual_Rs.copy_(left.view(rows, elements))
    weights = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=values_Rs.device)
    codes = (negative_RKB.view(rows, -1, _BITS).to(torch.uint8) * weights).sum(dim=2, dtype=torch.uint8)
    scales = torch.where(finite_RK1, scale_RK1, torch.nan).reshape(rows, -1)
    return torch.cat([codes, scales.view(torch.uint8)], dim=1)


def decoded_signs(messages_Rm: Tensor, block: int, elements: int) -> Tensor:
    """The values of all messages, fp32 [R, s]."""
    rows, end = messages_Rm.shape[0], elements // _BITS
    places = torch.arange(_BITS, dtype=torch.uint8, device=messages_Rm.device)
    bits = messages_Rm[:, :end].unsqueeze(2).bitwise_right_shift(places).bitwise_and(1)
    scale_RK1 = messages_Rm[:, end:].contiguous().view(torch.float32).view(rows, -1, 1)
    negative_RKB = bits.view(rows, -1, block).bool()
    return torch.where(negative_RKB, -scale_RK1, scale_RK1).view(rows, -1)
