"""Runs the ranks of one mode in forked processes, step by step, and measures them.

    parent                      ranks
    Team(...)      ---------->  fork, join, build model and optimizer
    startup_seconds <---------  ready
    run(5)         ---------->  barrier | 5 steps | barrier
    Block          <----------  wall and CPU seconds, bytes, losses

Between two calls the ranks wait on a pipe without using CPU, so that several teams take turns of a few steps and other
load on the machine affects all of them equally.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.footprint import FOOTPRINT_STEPS, Footprint, largest, measure_footprint
from benchmarks.harness.profiling import profile_steps
from benchmarks.peers.registry import make_trainer
from benchmarks.peers.workload import Legible, Mode, Trainer, Workload, make_rows

# Not the engine: what Trine imports beyond torch is part of its start-up. The first optimizer of a process
# imports torch._dynamo, which would drown the rest.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.nn.parallel",
    "torch.profiler",
]
PATIENCE_SECONDS = 300.0


class RankError(Exception):
    """Error of a rank that raised, died or hangs."""


@dataclass(frozen=True, slots=True)
class Block:
    """Measurement of a few steps of one team."""

    steps: int
    seconds: float
    """Wall seconds of the slowest rank between two barriers."""
    cpu_seconds: float
    """CPU seconds, user and system, of all threads of all ranks."""
    loopback_bytes: int | None
    """Mean bytes per rank over the loopback interface; an upper bound with other jobs. None if unknown."""
    losses: tuple[float, ...]
    """Global loss of each step."""


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    ranks: int
    rendezvous: str


def start_server() -> None:
    """Starts the fork server with torch imported, so that start-up times exclude the import."""
    for name, level in (("KINETO_LOG_LEVEL", "6"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, level)  # torch's profiler would tell of itself in every rank
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    first = context.Process(target=os.getpid)
    first.start()
    first.join()


class Team:
    """All ranks of ``mode`` in processes; a context manager ends them.

    Raises:
        RankError: a rank failed; with its traceback.
    """

    startup_seconds: float
    """Seconds from the first fork until all ranks are ready for their first step, without torch's import (see PRELOAD)
    and with the engine's.
    """

    def __init__(self, mode: Mode, workload: Workload) -> None:
        self.mode = mode
        self._steps = 0
        self._folder = TemporaryDirectory()
        self._context = multiprocessing.get_context("forkserver")
        started = time.perf_counter()
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        members = [self._start(_Place(rank, mode.ranks, rendezvous), mode, workload) for rank in range(mode.ranks)]
        self._ends = [end for end, _ in members]
        self._processes = [process for _, process in members]
        try:
            self._receive()
        except BaseException:
            self.close()
            raise
        self.startup_seconds = time.perf_counter() - started

    def run(self, steps: int) -> Block:
        """Trains ``steps`` steps on the data after the last call's."""
        before = loopback_bytes()
        answers = self._ask(("run", self._steps, steps))
        after = loopback_bytes()
        self._steps += steps
        crossed = None if before is None or after is None else (after - before) // len(self._ends)
        seconds, cpu_seconds, losses = zip(*answers, strict=True)
        return Block(steps, max(seconds), sum(cpu_seconds), crossed, losses[0])

    def footprint(self) -> Footprint:
        """Returns memory and traffic of the largest rank, from a few more steps."""
        found = self._ask(("footprint", self._steps, FOOTPRINT_STEPS))
        self._steps += FOOTPRINT_STEPS
        return largest(found)

    def weights(self) -> dict[str, Tensor]:
        """Returns the whole model's weights by name."""
        found: dict[str, Tensor] = {}
        for part in self._ask(("weights", self._steps, 0)):
            found |= part
        return found

    def profile(self, steps: int) -> str:
        """Profiles ``steps`` steps of rank 0; returns the report."""
        report, *_ = self._ask(("profile", self._steps, steps))
        self._steps += steps
        return str(report)

    def close(self) -> None:
        """Ends the processes of all ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, place: _Place, mode: Mode, workload: Workload) -> tuple[Connection, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, place, mode, workload), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _ask(self, request: tuple[Any, ...]) -> list[Any]:
        for end in self._ends:
            end.send(request)
        return self._receive()

    def _receive(self) -> list[Any]:
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(PATIENCE_SECONDS):
                raise RankError(f"rank {rank} did not answer within {PATIENCE_SECONDS:.0f} s")
            try:
                ok, answer = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{answer}")
            answers.append(answer)
        return answers


def loopback_bytes() -> int | None:
    """Returns the bytes sent over the loopback interface, headers included; None if Linux does not report them."""
    table = Path("/proc/net/dev")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else ():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return None


def _serve(end: Connection, place: _Place, mode: Mode, workload: Workload) -> None:
    """Body of one rank: build, then answer requests until the parent kills it or is gone."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{place.rendezvous}", rank=place.rank, world_size=place.ranks
        )
        trainer = make_trainer(mode, workload)
        _answer(end, None)
        while True:
            task, first, steps = end.recv()
            batches = [make_rows(mode, workload, first + index, place.rank) for index in range(steps)]
            _answer(end, _TASKS[task](trainer, batches))
    except EOFError:
        os._exit(0)
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)


def _answer(end: Connection, value: object) -> None:
    end.send_bytes(pickle.dumps((True, value)))


def _timed(trainer: Trainer, batches: list[Tensor]) -> tuple[float, float, tuple[float, ...]]:
    """(wall seconds, CPU seconds, global losses) of one rank."""
    losses = []
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for rows in batches:
        losses.append(trainer.step(rows))
    dist.barrier()  # the threads of gloo have then done their part too
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, _global_means(losses)


def _global_means(losses: Sequence[float | None]) -> tuple[float, ...]:
    """The mean over those ranks that know it; a peer knows its own share only, or nothing before the last stage."""
    total = torch.tensor([[loss or 0.0, loss is not None] for loss in losses], dtype=torch.float64)
    dist.all_reduce(total)
    return tuple((total[:, 0] / total[:, 1]).tolist())


def _footprint(trainer: Trainer, batches: list[Tensor]) -> Footprint:
    return measure_footprint(trainer.step, batches)


def _weights(trainer: Trainer, _: list[Tensor]) -> dict[str, Tensor]:
    assert isinstance(trainer, Legible)
    return trainer.weights()


def _profiled(trainer: Trainer, batches: list[Tensor]) -> str | None:
    if dist.get_rank() == 0:
        return profile_steps(trainer, batches)
    for rows in batches:
        trainer.step(rows)
    return None


_TASKS: Mapping[str, Callable[[Trainer, list[Tensor]], object]] = MappingProxyType(
    {"run": _timed, "footprint": _footprint, "weights": _weights, "profile": _profiled}
)
