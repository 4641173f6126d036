"""``torchrun -m engine.launch.planner.rank_measurements FILE``: the rates of this host, measured by all ranks at once.

operators     each rank runs them by itself, all ranks at the same time
collectives   ``Comm`` over the backend of training: data, tensor and pipeline ranks, by size
overlap       products beside an all-reduce: what of the collective costs nothing
engine        steps of a decoder of next to no width, less what its operators take
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from engine.launch.planner.engine_seconds import engine_seconds, first_engine
from engine.launch.planner.operator_seconds import measure_operator, measured_operators
from engine.parallel.comm.backend import state_link
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import World, open_world, read_world
from engine.parallel.grid import Axis, Grid
from engine.planning.host_step.host_rates import EngineSeconds, HostRates, SecondsTable

SENT = (1 << 8, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Bytes of a tensor that is summed, scattered or gathered."""
_LABEL = "calibrate"
_ROUNDS = 7
_CPU = torch.device("cpu")
_NOTHING = EngineSeconds(step=0.0, microbatch=0.0, operator=0.0)


class MeasuringRanks:
    """The ranks of this job; every rank makes the same calls."""

    def __init__(self) -> None:
        with first_engine() as eng:  # opens the job
            self.world: World = replace(read_world(), rank=eng.grid.rank, size=eng.grid.world_size)
        self.alone = replace(self.world, rank=0, size=1, place=None)
        open_world(self.alone)  # of a job of one rank, which the engine has not opened
        self._comm = self._connect(Grid(dp=self.world.size, rank=self.world.rank))

    def close(self) -> None:
        """Leave the other ranks."""
        self._comm.close()

    def measure(self) -> HostRates:
        """All rates; the mean over the ranks."""
        operators = {name: self._mean(measure_operator(one, self.ready)) for name, one in measured_operators()}
        several = self.world.size > 1
        bare = HostRates(
            ranks=self.world.size,
            operators=operators,
            collectives=dict(self._collectives()) if several else {},
            overlap=self._overlap() if several else 1.0,
            engine=_NOTHING,
        )
        return replace(bare, engine=engine_seconds(self, bare))

    def ready(self) -> None:
        """All ranks are here."""
        if self.world.size > 1:
            self._comm.all_reduce(torch.zeros(1), "world", _LABEL).wait()

    def mean(self, values: Sequence[float]) -> tuple[float, ...]:
        """Over the ranks, of each."""
        told = torch.tensor(values, dtype=torch.float64)
        if self.world.size > 1:
            self._comm.all_reduce(told, "world", _LABEL).wait()
        return tuple((told / self.world.size).tolist())

    def _mean(self, table: SecondsTable) -> SecondsTable:
        return replace(table, seconds=self.mean(table.seconds))

    def _connect(self, grid: Grid) -> Comm:
        return Comm(grid, TorchBackend(grid, _CPU))

    # ------------------------------------------------------------------ collectives

    def _collectives(self) -> Iterator[tuple[str, SecondsTable]]:
        ranks, rank = self.world.size, self.world.rank
        for axis, grid in (("dp", Grid(dp=ranks, rank=rank)), ("tp", Grid(tp=ranks, rank=rank))):
            comm = self._connect(grid)
            try:
                for name, call in _collective_calls(comm, axis, ranks).items():
                    yield f"{axis} {name}", self._by_size(call)
            finally:
                comm.close()
        comm = self._connect(Grid(pp=ranks, rank=rank))
        try:
            comm.link([state_link(source, source + 1) for source in range(ranks - 1)])
            comm.link([state_link(source + 1, source) for source in range(ranks - 1)])
            yield "pp send", self._by_size(_ping(comm, rank, ranks), share=0.5)
        finally:
            comm.close()

    def _by_size(self, call: Callable[[Tensor], None], share: float = 1.0) -> SecondsTable:
        seconds = []
        for size in SENT:
            data = torch.zeros(size // 4)
            count = 20 if size <= 1 << 16 else 3
            found = []
            for _ in range(_ROUNDS):
                self.ready()
                began = time.perf_counter()
                for _ in range(count):
                    call(data)
                found.append((time.perf_counter() - began) / count)
            seconds.append(share * median(found[1:]))
        return self._mean(SecondsTable(sizes=(tuple(map(float, SENT)),), seconds=tuple(seconds)))

    def _overlap(self) -> float:
        """What of a collective beside products costs nothing."""
        left, right, data = torch.rand(256, 1024), torch.rand(1024, 1024), torch.zeros(1 << 20)

        def compute() -> None:
            for _ in range(8):
                left @ right

        def together() -> None:
            pending = self._comm.all_reduce(data, "dp", _LABEL)
            compute()
            pending.wait()

        def alone() -> None:
            self._comm.all_reduce(data, "dp", _LABEL).wait()

        found: dict[str, list[float]] = {}
        for _ in range(_ROUNDS):
            for name, call in (("compute", compute), ("alone", alone), ("together", together)):
                self.ready()
                began = time.perf_counter()
                call()
                found.setdefault(name, []).append(time.perf_counter() - began)
        names = ("compute", "alone", "together")
        computed, sent, both = self.mean([median(found[name][1:]) for name in names])
        return min(1.0, max(0.0, (computed + sent - both) / min(computed, sent)))


def _collective_calls(comm: Comm, axis: str, ranks: int) -> Mapping[str, Callable[[Tensor], None]]:
    over: Axis = "tp" if axis == "tp" else "dp"

    def shard(data: Tensor) -> Tensor:
        size, index = len(data) // ranks, comm.grid.index(over)
        return data[index * size : (index + 1) * size]

    def whole(data: Tensor) -> Tensor:
        return data[: len(data) // ranks * ranks]

    return {
        "all_reduce": lambda data: comm.all_reduce(data, over, _LABEL).wait(),
        "reduce_scatter": lambda data: comm.reduce_scatter(shard(data), whole(data), over, _LABEL).wait(),
        "all_gather": lambda data: comm.all_gather(whole(data), shard(data), over, _LABEL).wait(),
    }


def _ping(comm: Comm, rank: int, ranks: int) -> Callable[[Tensor], None]:
    """A message to a neighbour and one back; the last of an odd number of ranks looks on."""
    first = rank % 2 == 0
    other = rank + 1 if first else rank - 1
    if other >= ranks:
        return lambda data: None

    def call(data: Tensor) -> None:
        there, back = state_link(rank, other), state_link(other, rank)
        if first:
            comm.send(data, there, _LABEL).wait()
            comm.receive(data, back, _LABEL).wait()
        else:
            comm.receive(data, back, _LABEL).wait()
            comm.send(data, there, _LABEL).wait()

    return call


def write_rates(arguments: Sequence[str] | None = None) -> int:
    """Measure, and let rank 0 write the rates as JSON."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("trine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks = MeasuringRanks()
    try:
        rates = ranks.measure()
    finally:
        ranks.close()
    if ranks.world.rank == 0:
        Path(path).write_text(json.dumps(rates.as_json()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(write_rates())
