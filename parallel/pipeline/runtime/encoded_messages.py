"""Quantized messages between stages: activations forward, gradients backward (straight-through).

    value [..]  ->  message [m], uint8  ->  value [..] of the receiver, a leaf of its graph
    gradient of the leaf  ->  message [m]  ->  gradient of the value that the sender has computed

Only values with a gradient are encoded: masks and positions may contain infinities or integers. The error of an element
is at most half the scale of its block.

Error feedback (Seide et al. 2014), for gradients alone: the rounding error of a value's gradient is added to the
gradient of that value in the next microbatch. The sum of sent gradients then differs from the true sum by one residual,
for any number of microbatches. Activations need no feedback, because they are not summed over microbatches.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.codecs.block_codec import make_codec
from engine.kernels.dispatch import Kernels
from engine.parallel.comm.backend import Flow
from engine.parallel.comm.encoded_collectives import ActivationFormat


class MessageEncoder:
    """Encoder and decoder of the quantized messages of this rank's pipeline stages.

    Args:
        form: number format of the messages.
        feedback: True adds the rounding error of a tensor's gradient to this tensor's gradient in the next microbatch;
            needs 4 bytes per element.
    """

    def __init__(self, form: ActivationFormat, kernels: Kernels, feedback: bool) -> None:
        self._form, self._codec, self._feedback = form, make_codec(form.wire, kernels), feedback
        self._residuals: dict[tuple[int, int, int], Tensor] = {}
        """Rounding error of the last message, fp32 [1, s], by value, sending and receiving stage."""

    @property
    def residuals(self) -> tuple[Tensor, ...]:
        """Rounding errors of the last sent gradients: fp32, one tensor per recorded activation and pair of stages."""
        return tuple(self._residuals.values())

    def encodes(self, dtype: torch.dtype, elements: int) -> bool:
        """Returns True if encoding shortens a message of ``elements`` numbers of ``dtype``."""
        return self._form.shortens(dtype, elements)

    def message_bytes(self, elements: int) -> int:
        """Returns the bytes of the encoded message of a tensor with ``elements`` numbers."""
        return self._form.message_bytes(elements)

    @torch.no_grad()
    def encode(self, tensor: Tensor, flow: Flow, place: tuple[int, int, int]) -> Tensor:
        """Returns the encoded message of ``tensor`` (any shape and strides), a 1-D uint8 tensor.

        ``flow``: "forward" or "backward". ``place``: (number of the tensor in the recorded forward, sending stage,
        receiving stage), the key of the error feedback for gradients.
        """
        values = tensor.detach().reshape(1, -1)
        size = self._form.wire.padded(values.shape[1])
        if size > values.shape[1]:
            values = functional.pad(values, (0, size - values.shape[1]))
        kept = self._feedback and flow == "backward"
        return self._codec.encode(values, self._residual(place, values) if kept else None).view(-1)

    @torch.no_grad()
    def decode(self, message_m: Tensor, out: Tensor) -> None:
        """Decodes ``message_m``, a 1-D uint8 tensor, into the contiguous tensor ``out``."""
        size = self._form.wire.padded(out.numel())
        if size == out.numel():
            self._codec.decode(message_m.view(1, -1), out.view(1, -1))
            return
        values = out.new_empty((1, size))
        self._codec.decode(message_m.view(1, -1), values)
        out.view(-1).copy_(values.view(-1)[: out.numel()])

    def _residual(self, place: tuple[int, int, int], values: Tensor) -> Tensor:
        """Returns the residual of a value: zeros if no residual of this shape is stored."""
        kept = self._residuals.get(place)
        if kept is None or kept.shape != values.shape:
            kept = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
            self._residuals[place] = kept
        return kept
