"""The ranks of one mode in processes of their own, driven step by step and measured.

    parent                      ranks
    Team(...)      ---------->  fork, join, build model and optimizer
    startup_seconds <---------  ready
    run(5)         ---------->  barrier | 5 steps | barrier
    Block          <----------  wall and CPU seconds, bytes, loss

Between two calls the ranks of a team sleep in a pipe, so that several teams can stand side by side and
take turns of a few steps: whatever else the machine does then hits all of them alike.
"""

import gc
import multiprocessing
import os
import pickle
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks.peers import Mode, Trainer, Workload, make_rows, make_trainer
from benchmarks.profiling import profile_steps

# Not the engine: what Trine imports beyond torch is part of its start-up. The first optimizer of a process
# imports torch._dynamo, which would drown the rest.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.distributed.device_mesh", "torch.nn.parallel"]
PATIENCE_SECONDS = 300.0
SETTLE_SECONDS = 0.1
"""A thread of gloo lets go of a collective's tensors up to some milliseconds after the wait for it returns."""


class RankError(Exception):
    """A rank raised, died or hangs."""


@dataclass(frozen=True, slots=True)
class Block:
    """A few steps of one team, in total."""

    steps: int
    seconds: float
    """Wall time of the slowest rank, from one barrier to the next."""
    cpu_seconds: float
    """Processor time, user and system, of all threads of all ranks."""
    sent_bytes: int
    """Largest of the ranks, by ring convention."""
    loopback_bytes: int | None
    """Mean over ranks of what crossed the loopback interface; other jobs can only add to it."""
    loss: float
    """Global loss of the last step."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of the largest rank."""

    live_bytes: int
    """Unique storages of all tensors that Python can reach when the optimizer has just updated: parameters,
    gradients, optimizer state, and whatever else is kept. What torch holds in C++ is not among them: DDP's
    buckets are a further copy of the gradients."""
    peak_resident_bytes: int
    """Largest resident size of the process so far, libraries included."""


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    ranks: int
    rendezvous: str


def start_server() -> None:
    """Start the fork server and let it import torch, so that no team's start-up contains that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    first = context.Process(target=os.getpid)
    first.start()
    first.join()


class Team:
    """All ranks of ``mode``. A context manager that ends them.

    Raises:
        RankError: a rank failed; with its traceback.
    """

    startup_seconds: float
    """From the first fork until the last rank is ready for its first step. The fork server has imported
    torch already (see PRELOAD); the engine is imported here."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
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
        """Take ``steps`` steps, going on in the data where the last call ended."""
        before = loopback_bytes()
        answers = self._ask(("run", self._steps, steps))
        after = loopback_bytes()
        self._steps += steps
        crossed = None if before is None or after is None else (after - before) // len(self._ends)
        seconds, cpu_seconds, sent, losses = zip(*answers, strict=True)
        return Block(steps, max(seconds), sum(cpu_seconds), max(sent), crossed, losses[0])

    def footprint(self) -> Footprint:
        """What the ranks hold in one more step."""
        live, resident = zip(*self._ask(("footprint", self._steps, 1)), strict=True)
        self._steps += 1
        return Footprint(max(live), max(resident))

    def profile(self, steps: int) -> str:
        """Where rank 0 spends its time in ``steps`` steps."""
        report, *_ = self._ask(("profile", self._steps, steps))
        self._steps += steps
        return str(report)

    def close(self) -> None:
        """End all ranks."""
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
    """Bytes that have crossed the loopback interface, headers included; None where Linux does not tell."""
    table = Path("/proc/net/dev")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else ():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return None


def live_tensor_bytes() -> int:
    """Unique storages behind all tensors of this process that Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    grads = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = {storage.data_ptr(): storage for tensor in (*tensors, *grads) for storage in _storages(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def _storages(thing: object) -> Iterator[torch.UntypedStorage]:
    """What a tensor keeps in memory; a DTensor has no storage of its own but its local tensor's."""
    if is_traceable_wrapper_subclass(thing):
        for name in thing.__tensor_flatten__()[0]:
            yield from _storages(getattr(thing, name))
    elif isinstance(thing, Tensor) and thing.untyped_storage().device.type != "meta":
        yield thing.untyped_storage()


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


def _timed(trainer: Trainer, batches: list[Tensor]) -> tuple[float, float, int, float]:
    """(wall seconds, CPU seconds, sent bytes, global loss of the last step) of one rank."""
    sent, loss = trainer.sent_bytes(), None
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for rows in batches:
        loss = trainer.step(rows)
    dist.barrier()  # the threads of gloo have then done their part too
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    # A peer knows its own share only, or nothing before the last stage; averaged outside the measured time.
    total = torch.tensor([loss or 0.0, loss is not None], dtype=torch.float64)
    dist.all_reduce(total)
    return wall, cpu, trainer.sent_bytes() - sent, (total[0] / total[1]).item()


def _footprint(trainer: Trainer, batches: list[Tensor]) -> tuple[int, int]:
    """(bytes of live tensors, largest resident bytes) of one rank; one more step is taken between the two."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _live_in_step(trainer, batches[0]), resident


def _live_in_step(trainer: Trainer, rows: Tensor) -> int:
    """Bytes of live tensors at the end of the inner optimizer's update in one more step."""
    seen: list[int] = []

    def look(*_: object) -> None:
        time.sleep(SETTLE_SECONDS)
        seen.append(live_tensor_bytes())

    hook = register_optimizer_step_post_hook(look)
    try:
        trainer.step(rows)
    finally:
        hook.remove()
    return max(seen)


def _profiled(trainer: Trainer, batches: list[Tensor]) -> str | None:
    if dist.get_rank() == 0:
        return profile_steps(trainer, batches)
    for rows in batches:
        trainer.step(rows)
    return None


_TASKS: Mapping[str, Callable[[Trainer, list[Tensor]], object]] = MappingProxyType(
    {"run": _timed, "footprint": _footprint, "profile": _profiled}
)
