"""Placement of a case's ranks: several in this process on one device, or one process for each device."""

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels.clock import Clock, EventClock, WallClock
from benchmarks.overlap.virtual_axis import Board, VirtualAxis
from engine.kernels.device import SideStream, is_host
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.symmetric_memory import SharedBytes, SlotSizes, SymmetricBuffer
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import World, open_world
from engine.parallel.grid import Grid
from engine.parallel.tensor.overlap.fused_sum import last_turn
from engine.parallel.tensor.tp_axis import TensorAxis

SECONDS = 5.0
"""Timeout in seconds of a kernel's wait for a signal."""
SPARE_PROCESSORS = 16
"""Processors reserved for copies between virtual ranks, which are kernels too."""
Turns = Generator[None, None, Tensor]
"""Generator of a rank's launches, which yields where other ranks must launch."""


class Place(Protocol):
    """Ranks of a case, with some or all of them in this process."""

    device: torch.device
    ranks: int
    own: Sequence[int]
    """Indices of the ranks in this process."""
    axes: Sequence[TensorAxis]
    """Tensor axis of each rank in this process."""
    board: Board | None
    """Exchange of virtual ranks; None for real ranks."""
    clock: Clock

    def open(self, sizes: SlotSizes) -> list[SymmetricBuffer]:
        """Opens symmetric memory of each rank in this process; every rank calls it."""

    def programs(self, spare: int = 0) -> int | None:
        """Returns the number of concurrent programs of one rank's kernel; None: one per processor."""

    def together(self, works: Sequence[Turns]) -> list[Tensor]:
        """Runs the work of the ranks in this process; results are ready on the current stream."""

    def of_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors of all ranks; ``tensors``: those of this process."""

    def longest(self, seconds: Sequence[float]) -> list[float]:
        """Returns the elementwise maximum over all processes."""


def virtual_ranks(sizes: SlotSizes, seconds: float, device: torch.device) -> tuple[SymmetricBuffer, ...]:
    """Allocates symmetric memory on ``device`` for each virtual rank of this process; returns the ranks' buffers."""
    parts = tuple(torch.zeros(sizes.total, dtype=torch.uint8, device=device) for _ in range(sizes.ranks))
    memories = [SharedBytes(parts=parts, index=index, close=lambda: None) for index in range(sizes.ranks)]
    return tuple(SymmetricBuffer(memory, sizes, seconds, range(sizes.ranks)) for memory in memories)


class VirtualPlace:
    """All ranks in this process, each on its own streams; on a CPU they run in turns.

    A rank has streams for kernels, collectives and copies. torch hands out 32 streams in turn, so the 24 of 8 ranks are
    distinct; a shared stream would deadlock.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.device, self.ranks = device, ranks
        self.own: Sequence[int] = range(ranks)
        board = Board(ranks)
        self.board: Board | None = board
        self._streams, sides, self._copies = ([SideStream(device) for _ in self.own] for _ in range(3))
        self._axes = [VirtualAxis(rank, board, device, sides[rank]) for rank in self.own]
        self.axes: Sequence[TensorAxis] = self._axes
        self.clock: Clock = WallClock() if is_host(device) else EventClock(device)

    def open(self, sizes: SlotSizes) -> list[SymmetricBuffer]:
        """Allocates memory for each rank."""
        buffers = virtual_ranks(sizes, SECONDS, self.device)
        for buffer, copies in zip(buffers, self._copies, strict=True):
            buffer.copies = copies
        return list(buffers)

    def programs(self, spare: int = 0) -> int | None:
        """Returns an equal share of the processors, so that all ranks' programs run at once."""
        from engine.kernels.gpu.launch_shapes import processors

        return max(1, (processors(self.device) - spare) // self.ranks)

    def together(self, works: Sequence[Turns]) -> list[Tensor]:
        """Runs the ranks in turns on the host, concurrently on the device."""
        for axis in self._axes:
            axis.begin()
        found: dict[int, Tensor] = {}
        while len(found) < len(works):
            for index, (work, stream) in enumerate(zip(works, self._streams, strict=True)):
                if index in found:
                    continue
                with stream.behind():
                    try:
                        next(work)
                    except StopIteration as end:
                        found[index] = end.value
        for stream in self._streams:
            stream.join()
        return [found[index] for index in range(len(works))]

    def of_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns ``tensors``: all ranks are in this process."""
        return list(tensors)

    def longest(self, seconds: Sequence[float]) -> list[float]:
        """Returns ``seconds``: there is one process."""
        return list(seconds)


class ProcessPlace:
    """One rank per process, as started by ``torchrun``."""

    def __init__(self, world: World) -> None:
        open_world(world)
        grid = Grid(tp=world.size, rank=world.rank)
        self._comm = Comm(grid, TorchBackend(grid, world.device))
        self.device, self.ranks = world.device, world.size
        self.own: Sequence[int] = (world.rank,)
        self.board: Board | None = None
        self.axes: Sequence[TensorAxis] = [TensorAxis(self._comm)]
        token = torch.zeros(1, device=self.device)
        host = is_host(self.device)
        self.clock: Clock = WallClock() if host else EventClock(self.device, lambda: dist.all_reduce(token))

    def open(self, sizes: SlotSizes) -> list[SymmetricBuffer]:
        """Opens memory that all processes can write.

        Raises:
            RuntimeError: the ranks share no memory.
        """
        buffer = self._comm.open_symmetric("tp", sizes, SECONDS)
        if buffer is None:
            raise RuntimeError("the ranks share no memory that all of them can write")
        return [buffer]

    def programs(self, spare: int = 0) -> int | None:
        """Returns None: all processors of the GPU."""
        return None

    def together(self, works: Sequence[Turns]) -> list[Tensor]:
        """Runs the work of this process's rank."""
        return [last_turn(work) for work in works]

    def of_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-gathers the tensor over the processes."""
        (own,) = tensors
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own.contiguous())
        return found

    def longest(self, seconds: Sequence[float]) -> list[float]:
        """Returns the elementwise maximum over the processes."""
        told = torch.tensor(seconds, dtype=torch.float32, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [float(value) for value in told.tolist()]


MakePlace = Callable[[int], Place]
"""Function that creates the ranks of a case, given their number."""
