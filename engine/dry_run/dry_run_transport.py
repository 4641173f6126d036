"""Messages of a rank without neighbours: arrivals have only shapes, and sent tensors are retained."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from engine.parallel.comm.backend import Flow
from engine.parallel.pipeline.runtime.transport import Arrival, MemoryTransport, Message, ReceiveBuffers
from engine.planning.activation_memory.live_storages import LiveStorages
from engine.planning.activation_memory.schedule_walk import MessageBuffer


class DryRunTransport:
    """Transport that passes messages between stages of this rank, and notes all others, outside of ``live``.

    The walk over the schedule counts the buffers, since several microbatches use them, and the sent tensors, since the
    schedule determines when a send completes.
    """

    def __init__(
        self, rank_of_stage: Sequence[int], live: LiveStorages, shapes: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._rank_of_stage, self._live, self._shapes = rank_of_stage, live, shapes
        self._own, self._buffers = MemoryTransport(), ReceiveBuffers(torch.device("cpu"))
        self._near: list[Tensor] = []
        self._far: dict[Message, Tensor] = {}
        self.taken: list[MessageBuffer] = []
        self.given_back: list[MessageBuffer] = []
        self.kept: list[MessageBuffer] = []

    def send(self, message: Message, tensor: Tensor, exact: bool = True) -> None:
        """Retains a tensor sent to another rank until :meth:`complete`, or until its gradient arrives."""
        if self._is_own(message):
            self._own.send(message, tensor)
        elif abs(message.target - message.source) == 1:
            self._near.append(tensor.detach().contiguous())
        else:
            self._far[message] = tensor.detach().contiguous()

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype, exact: bool = True) -> Arrival:
        """Returns a tensor of this shape."""
        if self._is_own(message):
            return self._own.receive(message, shape, dtype)
        with self._shapes():
            tensor = self._buffers.take(tuple(shape), dtype)
        self._live.leave_out(tensor)
        self.taken.append(_buffer(tensor))
        return tensor.detach

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Does nothing, since :meth:`complete` releases sends."""

    def delivered(self, message: Message) -> None:
        """Releases a send past a neighbouring stage."""
        self._far.pop(message, None)

    def recycle(self, tensor: Tensor) -> None:
        """Notes whether the buffer can be reused, or is still referenced."""
        if not self._buffers.lent(tensor):
            return
        buffer = _buffer(tensor)
        if self._buffers.give(tensor):
            self.given_back.append(buffer)
        else:
            self.kept.append(buffer)
            self._live.take_in(tensor)

    def complete(self) -> None:
        """Completes all sends to neighbours, and begins new notes."""
        self._near.clear()
        self.taken, self.given_back, self.kept = [], [], []

    def finish(self) -> None:
        """Ends the step."""
        self.complete()
        self._far.clear()

    def _is_own(self, message: Message) -> bool:
        return self._rank_of_stage[message.source] == self._rank_of_stage[message.target]


def _buffer(tensor: Tensor) -> MessageBuffer:
    return MessageBuffer(tuple(tensor.shape), str(tensor.dtype), tensor.numel() * tensor.element_size())
