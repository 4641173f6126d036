"""How values and their gradients get from stage to stage.

A message is named by what it carries; both ends know its shape and dtype from the timeline, so that neither
shapes nor names travel. Between two stages the messages of one flow keep the order in which they are sent.

    send      issued at once; the tensor is held until it has left, which ``release`` or ``delivered`` tells
    receive   offered early, into a buffer that is used again when nobody else holds it

Memory for messages that arrive, used again and again: fresh memory costs page faults and fragments.

A buffer goes back to the shelf only when nobody holds a tensor over it. Model code may keep what it was given
(``output_hidden_states``), and autograd may hand a gradient on as it came: such memory is left to its holder.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.parallel.comm.backend import Channel, Flow, Link
from engine.parallel.comm.comm import Comm, Pending


class Message(NamedTuple):
    """The value (or its gradient) of one microbatch on its way between two stages."""

    flow: Flow
    value: int
    microbatch: int
    source: int
    """Stage that sends."""
    target: int
    """Stage that receives."""


Arrival = Callable[[], Tensor]
"""Waits for a message and gives its tensor, which belongs to the caller alone."""


class Transport(Protocol):
    """Carries messages. Sends never wait for the other side."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send ``tensor``, which nobody may write to until it has left."""

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        """Offer to receive; the order of the offers of a channel is that of its sends."""

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Let go of what this stage has sent to its neighbours: they have offered to take it."""

    def delivered(self, message: Message) -> None:
        """The other side has shown that it has ``message``: let go of its tensor."""

    def recycle(self, tensor: Tensor) -> None:
        """What arrived in ``tensor`` is not needed any more."""

    def finish(self) -> None:
        """Wait until everything sent has left."""


class MemoryTransport:
    """All stages in one process; a message lies in a dictionary until it is taken."""

    def __init__(self) -> None:
        self._waiting: dict[Message, Tensor] = {}

    def send(self, message: Message, tensor: Tensor) -> None:
        """Leave the tensor for its taker."""
        assert message not in self._waiting, message
        self._waiting[message] = tensor.detach()

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        """Take the tensor when it is asked for."""

        def take() -> Tensor:
            tensor = self._waiting.pop(message)
            assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype, message
            return tensor

        return take

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Nothing is held."""

    def delivered(self, message: Message) -> None:
        """Nothing is held."""

    def recycle(self, tensor: Tensor) -> None:
        """The tensor is the sender's own."""

    def finish(self) -> None:
        """Refuse to end with messages that nobody took."""
        assert not self._waiting, f"nobody took {list(self._waiting)}"


class _Sent(NamedTuple):
    """A message on its way, and its memory."""

    pending: Pending
    tensor: Tensor


class CommTransport:
    """Between processes, through ``comm``; between two stages of one rank, by hand.

    A tensor that was sent is held until it has left. For neighbouring stages the schedule tells when that is
    certain (``releases``); whatever goes further is held until its gradient comes back, or until the end of the step.
    """

    def __init__(self, comm: Comm, rank_of_stage: Sequence[int], device: torch.device) -> None:
        self._comm = comm
        self._rank_of_stage = rank_of_stage
        self._own = MemoryTransport()
        self._buffers = ReceiveBuffers(device)
        self._near: dict[tuple[Flow, int, int], list[_Sent]] = {}
        """Sends to neighbouring stages, by flow, stage and microbatch."""
        self._far: dict[Message, _Sent] = {}

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send to the rank of the target stage."""
        link = self._link(message)
        if link.source == link.target:
            return self._own.send(message, tensor)
        tensor = tensor.detach().contiguous()
        sent = _Sent(self._comm.send(tensor, link), tensor)
        if abs(message.target - message.source) == 1:
            self._near.setdefault((message.flow, message.source, message.microbatch), []).append(sent)
        else:
            self._far[message] = sent
        return None

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        """Receive into a buffer."""
        link = self._link(message)
        if link.source == link.target:
            return self._own.receive(message, shape, dtype)
        tensor = self._buffers.take(tuple(shape), dtype)
        pending = self._comm.receive(tensor, link)

        def arrive() -> Tensor:
            pending.wait()
            return tensor.detach()  # the buffer itself never becomes a leaf of a graph

        return arrive

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Wait for the sends to neighbours; that takes no longer than the way."""
        for sent in self._near.pop((flow, stage, microbatch), ()):
            sent.pending.wait()

    def delivered(self, message: Message) -> None:
        """Let go of a tensor that went past a neighbour."""
        if message in self._far:
            self._far.pop(message).pending.wait()

    def recycle(self, tensor: Tensor) -> None:
        """Keep the memory for the next message of its kind."""
        self._buffers.give(tensor)

    def finish(self) -> None:
        """Wait for all sends."""
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
    """A shelf of tensors by shape and dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: dict[int, Tensor] = {}
        """By the address of their memory."""
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any content. Hand on other names for its memory (``detach``), and not itself."""
        shelf = self._free.get((shape, dtype))
        tensor = shelf.pop() if shelf else torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            self._lent[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def give(self, tensor: Tensor) -> None:
        """The holder of ``tensor``, which may be anybody's, is done with it and keeps no other name for its memory."""
        own = self._lent.pop(tensor.untyped_storage().data_ptr(), None)
        if own is not None and _names(own) <= _OURS:
            self._free.setdefault((tuple(own.shape), own.dtype), []).append(own)

    def forget(self) -> None:
        """What is lent now belongs to its holders."""
        self._lent.clear()


_OURS = 2
"""The buffer itself, and the tensor that is given back."""


def _names(tensor: Tensor) -> int:
    """How many tensors share this memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` is one more
