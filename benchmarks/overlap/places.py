"""Where the ranks of a case are: parts of this process on one device, or processes with a device each."""

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels.clock import Clock, EventClock, WallClock
from benchmarks.overlap.virtual_axis import Board, VirtualAxis
from benchmarks.overlap.virtual_ranks import virtual_ranks
from engine.kernels.device import SideStream, is_host
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.symmetric_memory import SlotSizes, SymmetricBuffer
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import World, open_world
from engine.parallel.grid import Grid
from engine.parallel.tensor.overlap.fused_sum import last_turn
from engine.parallel.tensor.tp_axis import TensorAxis

SECONDS = 5.0
"""A kernel waits so long for a signal before it says that it has not come."""
SPARE_PROCESSORS = 16
"""Left to copies between virtual ranks, which are kernels too where memory is that of the same GPU."""
Turns = Generator[None, None, Tensor]
"""The launches of a rank, which yields where the others have to launch theirs."""


class Place(Protocol):
    """The ranks of a case, some or all of which are in this process."""

    device: torch.device
    ranks: int
    own: Sequence[int]
    """The ranks in this process."""
    axes: Sequence[TensorAxis]
    """Of each of them."""
    board: Board | None
    """Of virtual ranks."""
    clock: Clock

    def open(self, sizes: SlotSizes) -> list[SymmetricBuffer]:
        """Memory of each rank in this process; every rank calls it."""

    def programs(self, spare: int = 0) -> int | None:
        """Of a kernel of one rank while all ranks run; None: one on each processor."""

    def together(self, works: Sequence[Turns]) -> list[Tensor]:
        """Run the work of the ranks in this process; their results are ready for the current stream."""

    def of_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all ranks, from those of the ranks in this process."""

    def longest(self, seconds: Sequence[float]) -> list[float]:
        """The largest over all processes, of each."""


class VirtualPlace:
    """All ranks in this process, each on a stream of its own; on a CPU they take turns.

    A rank has three streams: of its kernels, of its collectives and of its copies. torch gives out 32 streams of a
    device in turn, so those of 8 ranks, made together, are 24 different ones; a shared one would be a deadlock.
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
        """An allocation for each rank."""
        buffers = virtual_ranks(sizes, SECONDS, self.device)
        for buffer, copies in zip(buffers, self._copies, strict=True):
            buffer.copies = copies
        return list(buffers)

    def programs(self, spare: int = 0) -> int | None:
        """A share of the processors, so that the programs of all ranks run at once."""
        from engine.kernels.gpu.launch_shapes import processors

        return max(1, (processors(self.device) - spare) // self.ranks)

    def together(self, works: Sequence[Turns]) -> list[Tensor]:
        """In turns on the host, at once on the device."""
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
        """They are here."""
        return list(tensors)

    def longest(self, seconds: Sequence[float]) -> list[float]:
        """There is one process."""
        return list(seconds)


class ProcessPlace:
    """A rank in each process of the job, as ``torchrun`` has started them."""

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
        """Memory that all processes write.

        Raises:
            RuntimeError: there is none.
        """
        buffer = self._comm.open_symmetric("tp", sizes, SECONDS)
        if buffer is None:
            raise RuntimeError("the ranks share no memory that all of them can write")
        return [buffer]

    def programs(self, spare: int = 0) -> int | None:
        """All processors of its GPU."""
        return None

    def together(self, works: Sequence[Turns]) -> list[Tensor]:
        """The work of one rank, to its end."""
        return [last_turn(work) for work in works]

    def of_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gathered over the processes."""
        (own,) = tensors
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own.contiguous())
        return found

    def longest(self, seconds: Sequence[float]) -> list[float]:
        """The largest of any process."""
        told = torch.tensor(seconds, dtype=torch.float32, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [float(value) for value in told.tolist()]


MakePlace = Callable[[int], Place]
"""From a number of ranks."""
