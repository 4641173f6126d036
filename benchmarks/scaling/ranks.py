"""Measurements inside a job: speed of the links, of computation alone, and the steps of a grid."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import engine
from benchmarks.scaling.ranking import GridChoice
from benchmarks.scaling.record import AxisMeasurement, Machine, Sample
from benchmarks.scaling.task import Mode, Task
from engine.launch.doctor.links import AxisTimes, measure_axes
from engine.models.decoder import loss_sum
from engine.parallel.comm.agreement import from_first, gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import World, open_world, read_world
from engine.parallel.grid import Axis, Grid
from engine.planning.cost_model.links import LinkSpeed
from engine.planning.step_time.prediction import Computation, HostLinks

_PATIENCE = 20.0
"""Seconds between two signs of life of rank 0, for which others wait."""
_NAME_BYTES = 64
_LONG = 4
"""Microbatches of the longer step, whose seconds less those of a step of one give those of a microbatch."""
_LEAST = 1e-9
"""Seconds of a microbatch, where the difference of two medians is lost in noise."""
_FOREVER = LinkSpeed(0.0, 1e15)
"""A link that a job of one rank or one host lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Numbers of steps and seconds per round."""

    warmup: int = 3
    """Number of untimed steps."""
    steps: int = 5
    seconds: float = 10.0
    """Approximate seconds of timed steps; at least one step is timed."""

    def count(self, seconds: float) -> int:
        """Returns the number of timed steps, if one takes ``seconds``."""
        return max(1, min(self.steps, int(self.seconds / max(seconds, 1e-9))))


class Ranks:
    """Measurements that all ranks of a job make together, with equal calls."""

    def __init__(self) -> None:
        self._log = logging.getLogger("trine")
        self._level = self._log.level
        self._log.setLevel(logging.ERROR)  # every sample opens an engine, which has its banner
        self._alone = replace(read_world(), rank=0, size=1)
        settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        job = engine.initialize(lambda: nn.Linear(1, 1), settings, lambda output, _: output.square().mean())
        with job as eng:
            self.world: World = replace(read_world(), rank=eng.grid.rank, size=eng.grid.world_size)
        open_world(self._alone)  # of a job of one rank, which the engine has not opened
        self.device = self.world.device
        self._comm = self._connect(Grid(dp=self.world.size, rank=self.world.rank))
        self.hosts = self._find_hosts()

    @property
    def nodes(self) -> int:
        """Number of hosts in the job."""
        return len(set(self.hosts))

    @property
    def of_node(self) -> int:
        """Number of ranks on each host."""
        return self.world.size // self.nodes

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.world.rank == 0

    def close(self) -> None:
        """Ends the communication with the other ranks."""
        self._comm.close()
        self._log.setLevel(self._level)

    @property
    def device_name(self) -> str:
        """Name of this rank's GPU or CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def share(self, make: Callable[[], Any]) -> Any:
        """Returns rank 0's result of ``make`` on every rank, via JSON.

        Raises:
            EngineError: ``make`` has failed.
        """
        told = from_first(lambda: json.dumps(make()).encode(), self._comm, self.device, _PATIENCE)
        return json.loads(told)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Returns the elementwise maximum over all ranks."""
        told = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        self._comm.all_reduce(told, "world", "scaling", "max").wait()
        return [float(each) for each in told.cpu()]

    def _connect(self, grid: Grid) -> Comm:
        return Comm(grid, TorchBackend(grid, self.device))

    def _find_hosts(self) -> tuple[str, ...]:
        name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        rows = gather_from_all(torch.frombuffer(bytearray(name), dtype=torch.uint8), self._comm, self.device, "hosts")
        return tuple(bytes(row.tolist()).rstrip(b"\0").decode() for row in rows)

    # ------------------------------------------------------------------ links

    def axes(self, grid: Grid) -> list[AxisMeasurement]:
        """Measures each axis of a grid alone."""
        comm = self._connect(grid.at(self.world.rank))
        try:
            found = list(measure_axes(comm, self.device))
        finally:
            comm.close()
        return [measured for axis in ("tp", "dp", "pp") if (measured := self._joined(axis, found, grid)) is not None]

    def _joined(self, axis: str, found: list[AxisTimes], grid: Grid) -> AxisMeasurement | None:
        """The slowest group of an axis; None for an axis of one rank."""
        ranks = {"tp": grid.tp, "dp": grid.dp, "pp": grid.pp}[axis]
        if ranks == 1:
            return None
        own = [times for times in found if times.axis == axis]
        latency, slowness, hosts = self.slowest(
            [
                max((times.latency for times in own), default=0.0),
                max((1 / times.rate for times in own), default=0.0),
                max((float(len({self.hosts[rank] for rank in times.ranks})) for times in own), default=0.0),
            ]
        )
        return AxisMeasurement(axis=axis, ranks=ranks, hosts=int(hosts), latency=latency, rate=1 / slowness)

    def host_links(self) -> HostLinks:
        """Measures all links with two grids: hosts as data ranks with tensor ranks inside, and hosts as stages."""
        nodes, local = self.nodes, self.of_node
        across = {axis.axis: axis for axis in self.axes(Grid(dp=nodes, tp=local))} if self.world.size > 1 else {}
        inside = {axis.axis: axis for axis in self.axes(Grid(pp=nodes, dp=local))} if local > 1 else {}
        between, within = _FOREVER, _FOREVER
        if (line := across.get("dp")) is not None:  # a ring of one rank of each host; every rank is in one
            between = LinkSpeed(line.latency / (2 * (nodes - 1)), line.rate * local)
        if (ring := inside.get("dp")) is not None:
            within = LinkSpeed(ring.latency / (2 * (local - 1)), ring.rate)
        return HostLinks(within=within, between=between)

    # ------------------------------------------------------------------ computation

    def machine(self, task: Task, effort: Effort) -> Machine:
        """Measures the inputs of the prediction: links, and a rank's computation while all compute; the slowest rank
        counts.
        """
        return Machine(
            nodes=self.nodes, ranks=self.of_node, computation=self._computed(task, effort), links=self.host_links()
        )

    def _computed(self, task: Task, effort: Effort) -> Computation:
        """What a rank computes that has the whole model, and in ``fixed`` how it compares with one that has half."""
        short, long = (self._lone_step((task, 1), effort, count) for count in (1, _LONG))
        half = [self._lone_step((task, 2), effort, count) for count in (1, _LONG)]
        whole, of_half = (max(_LEAST, (b.trained - a.trained) / (_LONG - 1)) for a, b in ((short, long), half))
        forward = min(whole, max(0.0, (long.evaluated - short.evaluated) / (_LONG - 1)))
        fixed = min(1.0, max(0.0, 2 * of_half / whole - 1))
        found = self.slowest([forward, whole - forward, fixed, max(0.0, short.trained - whole)])
        return Computation(forward=found[0], backward=found[1], fixed=found[2], update=found[3])

    def _lone_step(self, model: tuple[Task, int], effort: Effort, count: int) -> "_LoneStep":
        """A step and an evaluation of ``count`` microbatches of a model's part, in an engine of this rank alone."""
        task, parts = model
        settings = task.settings(GridChoice(dp=1, tp=1, pp=1), count)
        batches = task.batches(count * task.micro, self.world.rank, parts)
        given = task.model() if parts == 1 else task.slice(parts)
        trained, evaluated = list[float](), list[float]()
        with engine.initialize(given, settings, loss_sum, task.example(), world=self._alone) as eng:
            for _ in range(effort.warmup + effort.steps):
                trained.append(self._timed(lambda: eng.train_batch(next(batches))))
            for _ in range(1 + effort.steps):
                evaluated.append(self._timed(lambda: eng.eval_batch(next(batches))))
        return _LoneStep(median(trained[effort.warmup :]), median(evaluated[1:]))

    def _timed(self, call: Any) -> float:
        began = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    # ------------------------------------------------------------------ steps

    def steps(self, task: Task, choice: GridChoice, mode: Mode, effort: Effort) -> Sample:
        """Measures one round of a grid with a new engine: warm-up steps, then timed ones.

        Raises:
            EngineError: the grid is impossible; nothing was communicated.
        """
        rows = task.data_rows(choice, mode)
        settings = task.settings(choice, rows // task.micro)
        with engine.initialize(task.model(), settings, loss_sum, task.example()) as eng:
            batches: Iterator[Mapping[str, Tensor]] = task.batches(rows, eng.grid.coord().dp)
            warm = [self._timed(lambda: eng.train_batch(next(batches))) for _ in range(effort.warmup)]
            (slow,) = self.slowest(warm[-1:] or [0.0])  # all are here
            before, count = dict(eng.waits), effort.count(slow)
            own = [self._timed(lambda: eng.train_batch(next(batches))) for _ in range(count)]
            waited = [eng.waits.get(axis, 0.0) - before.get(axis, 0.0) for axis in before]
            sizes = {axis: eng.grid.size(axis) for axis in before}
        seconds = median(self.slowest(own))
        told = torch.tensor(waited, dtype=torch.float64, device=self.device)
        self._comm.all_reduce(told, "world", "scaling").wait()
        sums = [float(each) / count for each in told.cpu()]
        axes: list[Axis] = list(before)
        waits = {str(axis): each / self.world.size for axis, each in zip(axes, sums, strict=True) if sizes[axis] > 1}
        return Sample(seconds=seconds, waits=waits)


class _LoneStep(NamedTuple):
    """Seconds of a step and of an evaluation."""

    trained: float
    evaluated: float
