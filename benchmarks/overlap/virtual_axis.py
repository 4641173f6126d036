"""Collectives between virtual ranks of one process: copies and sums on streams of one device.

A rank's transfers run on a side stream, like NCCL's, and begin when the tensors of all ranks are ready. The host
launches one rank after the other, so a reduce-scatter is launched when it is waited for, after all ranks have posted
theirs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.device import SideStream, record_event
from engine.parallel.comm.comm import Pending
from engine.parallel.tensor.tp_axis import TensorAxis


class Posted(NamedTuple):
    """Tensor that a rank has computed, with the event of its completion."""

    tensor: Tensor
    ready: torch.Event | None


class Board:
    """Tensors that virtual ranks exchange in one operation."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.inputs: Sequence[Tensor] = ()
        """What each rank gathers from, before it is divided into chunks."""
        self.pieces = 1
        self.posted: dict[tuple[int, int], Posted] = {}
        """By rank and number of the call."""

    def begin(self, inputs: Sequence[Tensor], pieces: int) -> None:
        """Starts an operation on the ranks' ``inputs``, in ``pieces`` chunks."""
        self.inputs, self.pieces = inputs, pieces
        self.posted.clear()


class VirtualAxis(TensorAxis):
    """Tensor axis of one virtual rank; ``side``: CUDA stream of its transfers."""

    def __init__(self, index: int, board: Board, device: torch.device, side: SideStream) -> None:
        self.index, self.size, self.dry, self.listener = index, board.ranks, False, None
        self._board, self._device, self._side = board, device, side
        self._calls = 0

    def begin(self) -> None:
        """Restarts the count of chunks for a new operation."""
        self._calls = 0

    def start_all_gather(self, part: Tensor, label: str) -> tuple[Tensor, Pending]:
        """Copies the corresponding chunk of all ranks."""
        full, call = part.new_empty((self.size, *part.shape)), self._next()
        with self._side.behind():
            for row, given in zip(full, self._board.inputs, strict=True):
                row.copy_(given.chunk(self._board.pieces, -2)[call], non_blocking=True)
        return full, Pending(self._side.join)

    def start_reduce_scatter(self, full: Tensor, label: str) -> tuple[Tensor, Pending]:
        """Posts ``full`` [W, ..]; the wait sums this rank's slices of all posted tensors in fp32."""
        return self._start_sum(full, self.index)

    def start_sum(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Posts ``tensor``; the wait sums all posted tensors in fp32 into a new one."""
        return self._start_sum(tensor, slice(None))

    def _start_sum(self, full: Tensor, place: int | slice) -> tuple[Tensor, Pending]:
        part, call = torch.empty_like(full[place]), self._next()
        self._board.posted[self.index, call] = Posted(full, record_event(self._device))

        def wait() -> None:
            posted = [self._board.posted[rank, call] for rank in range(self.size)]
            with self._side.after([one.ready for one in posted]):
                parts = torch.stack([one.tensor[place] for one in posted])
                part.copy_(parts.sum(0, dtype=torch.float32))
            self._side.join()

        return part, Pending(wait)

    def _next(self) -> int:
        self._calls += 1
        return self._calls - 1
