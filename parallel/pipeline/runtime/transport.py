"""Transport of values and gradients between stages.

Both ends of a message know shape and dtype from the trace, so only content is sent. Between two stages the messages of
one flow arrive in the order of the sends.

    send      issued at once; the tensor stays allocated until the send completes: ``release`` or ``delivered``
    receive   offered early, into a buffer that is reused once no tensor shares its memory

Receive buffers are reused because fresh memory costs page faults and fragmentation. Model code may store a received
tensor (``output_hidden_states``), and autograd may pass a received gradient on: a buffer with other references is not
reused.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.parallel.comm.backend import Channel, Flow, Link
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder


class Message(NamedTuple):
    """Key of a message between stages: a tensor of the recorded forward or its gradient, for one microbatch.

    ``flow``: "forward" or "backward"; ``value``: number of the tensor.
    """

    flow: Flow
    value: int
    microbatch: int
    source: int
    """Index of the sending stage."""
    target: int
    """Index of the receiving stage."""


Arrival = Callable[[], Tensor]
"""Function that waits for a message and returns its tensor, owned by the caller."""


class Transport(Protocol):
    """Interface by which the executor sends values and gradients between stages, without waiting for receivers."""

    def send(self, message: Message, tensor: Tensor, exact: bool = True) -> None:
        """Starts to send ``tensor``, which must not change until the send completes.

        ``exact`` = False allows an encoding with fewer bits.
        """

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype, exact: bool = True) -> Arrival:
        """Starts to receive ``message``; returns a function that waits and returns the tensor.

        ``exact``: equal to the sender's; False allows fewer bits. Call :meth:`receive`, for each flow between two
        stages, in the order of the sends.
        """

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Waits for the sends of ``stage`` and ``microbatch`` to neighbouring stages.

        ``flow``: "forward" or "backward". Call it when the neighbours have posted their receives.
        """

    def delivered(self, message: Message) -> None:
        """Frees the sent tensor of ``message``; call it when ``message`` is known to have arrived."""

    def recycle(self, tensor: Tensor) -> None:
        """Makes the memory of a received ``tensor`` available to later receives."""

    def finish(self) -> None:
        """Waits until all sends have completed."""


class MemoryTransport:
    """Transport of stages in one process, with a dictionary of sent tensors."""

    def __init__(self) -> None:
        self._waiting: dict[Message, Tensor] = {}

    def send(self, message: Message, tensor: Tensor, exact: bool = True) -> None:
        """Stores ``tensor``, detached and without a copy, for the receiver."""
        assert message not in self._waiting, message
        self._waiting[message] = tensor.detach()

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype, exact: bool = True) -> Arrival:
        """Returns a function that removes the stored tensor of ``message`` and returns it."""

        def take() -> Tensor:
            tensor = self._waiting.pop(message)
            assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype, message
            return tensor

        return take

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Does nothing: no send is pending."""

    def delivered(self, message: Message) -> None:
        """Does nothing: no send is pending."""

    def recycle(self, tensor: Tensor) -> None:
        """Does nothing: a received tensor belongs to the sender."""

    def finish(self) -> None:
        """Checks that every sent message has been received; raises AssertionError otherwise."""
        assert not self._waiting, f"messages were sent but not received: {list(self._waiting)}"


class _Sent(NamedTuple):
    """Pending send, with the tensor that must stay allocated."""

    pending: Pending
    tensor: Tensor


class CommTransport:
    """Transport between pipeline ranks over ``comm``; two stages of one rank exchange tensors directly.

    Sent tensors stay allocated until their send completes.

    Args:
        rank_of_stage: index on axis pp of the rank of each stage.
        encoder: codec of messages that may be rounded, or None.
    """

    def __init__(
        self,
        comm: Comm,
        rank_of_stage: Sequence[int],
        device: torch.device,
        encoder: MessageEncoder | None = None,
    ) -> None:
        self._comm, self._encoder = comm, encoder
        self._rank_of_stage = rank_of_stage
        self._own = MemoryTransport()
        self._buffers = ReceiveBuffers(device)
        self._near: dict[tuple[Flow, int, int], list[_Sent]] = {}
        """Sends to neighbouring stages, by flow, stage and microbatch."""
        self._far: dict[Message, _Sent] = {}
        """Sends past a neighbouring stage."""

    def send(self, message: Message, tensor: Tensor, exact: bool = True) -> None:
        """Starts to send ``tensor`` over axis pp to the rank of the target stage of ``message``.

        ``exact`` = False: the encoder, if present, may encode the tensor with fewer bits.
        """
        link = self._link(message)
        if link.source == link.target:
            return self._own.send(message, tensor)
        if self._encoder is not None and not exact and self._encoder.encodes(tensor.dtype, tensor.numel()):
            tensor = self._encoder.encode(tensor, message.flow, (message.value, message.source, message.target))
        else:
            tensor = tensor.detach().contiguous()
        sent = _Sent(self._comm.send(tensor, link), tensor)
        if abs(message.target - message.source) == 1:
            self._near.setdefault((message.flow, message.source, message.microbatch), []).append(sent)
        else:
            # the receiver may be many actions behind, so no action of this rank waits for such a send
            self._far[message] = sent
        return None

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype, exact: bool = True) -> Arrival:
        """Starts to receive ``message`` into a reused buffer; returns a function that waits and returns the tensor.

        ``exact``: equal to the sender's; False allows fewer bits.
        """
        link = self._link(message)
        if link.source == link.target:
            return self._own.receive(message, shape, dtype)
        if self._encoder is not None and not exact and self._encoder.encodes(dtype, prod(shape)):
            return self._receive_encoded(self._encoder, link, tuple(shape), dtype)
        tensor = self._buffers.take(tuple(shape), dtype)
        pending = self._comm.receive(tensor, link)

        def arrive() -> Tensor:
            pending.wait()
            return tensor.detach()  # an alias, so that the buffer itself never becomes a leaf of a graph

        return arrive

    def _receive_encoded(
        self, encoder: MessageEncoder, link: Link, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Arrival:
        """Receives an encoded message into a separate buffer and decodes it after the arrival."""
        message = self._buffers.take((encoder.message_bytes(prod(shape)),), torch.uint8)
        pending = self._comm.receive(message, link)

        def arrive() -> Tensor:
            pending.wait()
            tensor = self._buffers.take(shape, dtype)
            encoder.decode(message, tensor)
            self._buffers.give(message)
            return tensor.detach()

        return arrive

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Waits for the sends of ``stage`` to its neighbouring stages, and frees the sent tensors.

        Affects only sends of this ``flow`` and ``microbatch``.
        """
        for sent in self._near.pop((flow, stage, microbatch), ()):
            sent.pending.wait()

    def delivered(self, message: Message) -> None:
        """Waits for the send of ``message`` if its receiver is not a neighbouring stage."""
        if message in self._far:
            self._far.pop(message).pending.wait()

    def recycle(self, tensor: Tensor) -> None:
        """Makes the memory of the received ``tensor`` available to the next message of its shape and dtype."""
        self._buffers.give(tensor)

    def finish(self) -> None:
        """Waits until all sends have completed. Later messages never reuse the memory of tensors not yet recycled."""
        for sent in (*chain.from_iterable(self._near.values()), *self._far.values()):
            sent.pending.wait()
        self._near.clear()
        self._far.clear()
        self._buffers.forget()
        self._own.finish()

    def _link(self, message: Message) -> Link:
        channel = Channel(message.flow, message.source, message.target)
        return Link(channel, self._rank_of_stage[message.source], self._rank_of_stage[message.target])


class ReceiveBuffers:
    """Pool of receive buffers, reused by shape and dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: dict[int, Tensor] = {}
        """Buffers in use, by the number of their storage."""
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a contiguous buffer of ``shape`` and ``dtype`` with arbitrary content, reused or new.

        Pass only aliases (``detach``) of the buffer to other code.
        """
        shelf = self._free.get((shape, dtype))
        tensor = shelf.pop() if shelf else torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            self._lent[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def lent(self, tensor: Tensor) -> bool:
        """Returns True if ``tensor`` shares memory with a buffer in use."""
        return tensor.untyped_storage()._cdata in self._lent

    def give(self, tensor: Tensor) -> bool:
        """Puts the buffer of ``tensor`` back into the pool, if no other tensor shares its memory.

        Returns True if the buffer is back in the pool.
        """
        own = self._lent.pop(tensor.untyped_storage()._cdata, None)
        # the user's code may have stored an alias: the next message must not overwrite it
        ours = own is not None and _names(own) <= _OURS
        if own is not None and ours:
            self._free.setdefault((tuple(own.shape), own.dtype), []).append(own)
        return ours

    def forget(self) -> None:
        """Drops all buffers in use; their memory is not reused."""
        self._lent.clear()


_OURS = 2
"""Tensors over a buffer without other users: the buffer and the alias in ``give``."""


def _names(tensor: Tensor) -> int:
    """Returns the number of tensors that share this memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # not counting `storage`
