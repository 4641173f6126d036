"""How values and their gradients get from stage to stage.

A message is named by what it carries; both ends know its shape and dtype from the timeline, so that neither
shapes nor names travel. Between two ranks the messages of one flow keep the order in which they are sent.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.parallel.backend import Flow
from engine.parallel.comm import Comm, Pending


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
        """Send ``tensor``, which nobody may write to until it is settled."""

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        """Offer to receive; the order of the offers is that of the sends."""

    def settle(self, actions: int) -> None:
        """One more action is done: let go of what its neighbours took ``actions`` or more actions ago."""

    def delivered(self, message: Message) -> None:
        """The other side has shown that it has ``message``: let go of its tensor."""

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

    def settle(self, actions: int) -> None:
        """Nothing is held."""

    def delivered(self, message: Message) -> None:
        """Nothing is held."""

    def finish(self) -> None:
        """Refuse to end with messages that nobody took."""
        assert not self._waiting, f"nobody took {list(self._waiting)}"


class CommTransport:
    """Between processes, through ``comm``; between two stages of one rank, by hand.

    A tensor that was sent is held until it has left. For neighbouring stages ``check`` has proven that the
    taker comes for it before two more actions are done; whatever goes further is held until its gradient
    comes back, or until the end of the step.
    """

    def __init__(self, comm: Comm, rank_of_stage: Sequence[int], device: torch.device) -> None:
        self._comm = comm
        self._rank_of_stage = rank_of_stage
        self._here = comm.grid.coord().pp
        self._device = device
        self._own = MemoryTransport()
        self._near: list[list[Pending]] = [[]]
        """Sends to neighbouring stages, by the action after which they were made; the newest last."""
        self._far: dict[Message, Pending] = {}

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send to the rank of the target stage."""
        rank = self._rank_of_stage[message.target]
        if rank == self._here:
            return self._own.send(message, tensor)
        pending = self._comm.send(tensor.detach().contiguous(), rank, message.flow)
        if abs(message.target - message.source) == 1:
            self._near[-1].append(pending)
        else:
            self._far[message] = pending
        return None

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        """Receive into a new tensor."""
        rank = self._rank_of_stage[message.source]
        if rank == self._here:
            return self._own.receive(message, shape, dtype)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        pending = self._comm.receive(tensor, rank, message.flow)

        def arrive() -> Tensor:
            pending.wait()
            return tensor

        return arrive

    def settle(self, actions: int) -> None:
        """Wait for the sends to neighbours that are older."""
        self._near.append([])
        while len(self._near) > actions:
            for pending in self._near.pop(0):
                pending.wait()

    def delivered(self, message: Message) -> None:
        """Let go of a tensor that went past a neighbour."""
        if message in self._far:
            self._far.pop(message).wait()

    def finish(self) -> None:
        """Wait for all sends."""
        self.settle(0)
        self._near.append([])
        for pending in self._far.values():
            pending.wait()
        self._far.clear()
        self._own.finish()
