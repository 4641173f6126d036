"""Seconds of collectives between the ranks of this host by axis and size, over the backend of training: one sample a
round.

call       after a product, as a step meets it: others come earlier or later, and sleep meanwhile. What the product
           takes of its processor is taken off
overlap    products beside an all-reduce: what of the collective costs nothing
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

from engine.launch.planner.calibration.operator_samples import Measuring
from engine.parallel.comm.backend import state_link
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.grid import Axis, Grid
from engine.planning.host_step.host_rates import SecondsTable

SENT = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Bytes of a tensor that is summed, scattered or gathered."""
SAMPLE_BYTES = 1 << 23
"""About, of the calls of a sample."""
MOST_CALLS = 8
OVERLAPS = 3
"""Measurements of products beside a collective in a sample."""
LABEL = "calibrate"
_Call = Callable[[Tensor], None]


def connect(grid: Grid) -> Comm:
    """Communication between the ranks of this host."""
    return Comm(grid, TorchBackend(grid, torch.device("cpu")))


class CollectiveSamples:
    """Communicators of all ranks as data, as tensor and as pipeline ranks, ready to be sampled round by round."""

    def __init__(self, ranks: Measuring) -> None:
        self._ranks, size, rank = ranks, ranks.world.size, ranks.world.rank
        self._data, self._tensor = connect(Grid(dp=size, rank=rank)), connect(Grid(tp=size, rank=rank))
        self._pipeline = connect(Grid(pp=size, rank=rank))
        self._pipeline.link([state_link(source, source + 1) for source in range(size - 1)])
        self._pipeline.link([state_link(source + 1, source) for source in range(size - 1)])
        self._sent = {count: torch.zeros(count // 4) for count in SENT}
        self._factors = torch.rand(256, 1024), torch.rand(1024, 1024)

    def close(self) -> None:
        """Leave the other ranks."""
        for comm in (self._data, self._tensor, self._pipeline):
            comm.close()

    def sample(self) -> dict[str, SecondsTable]:
        """By axis and operation; the mean over the ranks."""
        size, found = self._ranks.world.size, {}
        for axis, comm in (("dp", self._data), ("tp", self._tensor)):
            for name, call in _collective_calls(comm, axis, size).items():
                found[f"{axis} {name}"] = self._by_size(call)
        found["pp send"] = self._by_size(_ping(self._pipeline, self._ranks.world.rank, size), share=0.5)
        return found

    def _by_size(self, call: _Call, share: float = 1.0) -> SecondsTable:
        seconds = []
        for size, data in self._sent.items():
            count = max(1, min(MOST_CALLS, SAMPLE_BYTES // size))
            call(data)
            self._ranks.ready()
            spent, began = 0.0, time.perf_counter()
            for _ in range(count):
                spent += self._product()
                call(data)
            waited = time.perf_counter() - began - spent
            seconds.append(share * max(1e-7, waited / count))
        return SecondsTable(sizes=(tuple(map(float, SENT)),), seconds=self._ranks.mean(seconds))

    def _product(self) -> float:
        """Seconds of this processor."""
        left, right = self._factors
        began = time.thread_time()
        left @ right
        return time.thread_time() - began

    def overlap(self) -> float:
        """What of a collective beside products costs nothing."""
        found: dict[str, list[float]] = {"compute": [], "alone": [], "together": []}
        calls = (self._compute, self._reduce, self._reduce_beside)
        for _ in range(OVERLAPS):
            for seconds, call in zip(found.values(), calls, strict=True):
                self._ranks.ready()
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)
        computed, sent, both = self._ranks.mean([median(seconds) for seconds in found.values()])
        return min(1.0, max(0.0, (computed + sent - both) / min(computed, sent)))

    def _compute(self) -> None:
        left, right = self._factors
        for _ in range(8):
            left @ right

    def _reduce(self) -> None:
        self._data.all_reduce(self._sent[1 << 22], "dp", LABEL).wait()

    def _reduce_beside(self) -> None:
        pending = self._data.all_reduce(self._sent[1 << 22], "dp", LABEL)
        self._compute()
        pending.wait()


def _collective_calls(comm: Comm, axis: str, ranks: int) -> Mapping[str, _Call]:
    over: Axis = "tp" if axis == "tp" else "dp"

    def shard(data: Tensor) -> Tensor:
        size, index = len(data) // ranks, comm.grid.index(over)
        return data[index * size : (index + 1) * size]

    def whole(data: Tensor) -> Tensor:
        return data[: len(data) // ranks * ranks]

    return {
        "all_reduce": lambda data: comm.all_reduce(data, over, LABEL).wait(),
        "reduce_scatter": lambda data: comm.reduce_scatter(shard(data), whole(data), over, LABEL).wait(),
        "all_gather": lambda data: comm.all_gather(whole(data), shard(data), over, LABEL).wait(),
    }


def _ping(comm: Comm, rank: int, ranks: int) -> _Call:
    """A message to a neighbour and one back; the last of an odd number of ranks looks on."""
    first = rank % 2 == 0
    other = rank + 1 if first else rank - 1
    if other >= ranks:
        return lambda data: None

    def call(data: Tensor) -> None:
        there, back = state_link(rank, other), state_link(other, rank)
        if first:
            comm.send(data, there, LABEL).wait()
            comm.receive(data, back, LABEL).wait()
        else:
            comm.receive(data, back, LABEL).wait()
            comm.send(data, there, LABEL).wait()

    return call
