"""Run a function on several gloo ranks of this machine, in well under two seconds.

Processes are forked from a server that has imported torch and the engine but has no threads, so that a rank starts
without importing them again. Ranks meet in a file, not at a port. The first failing rank's traceback
is raised; ranks that do not end are named and killed.
"""

import gc
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PRELOAD = ("torch", "torch.distributed", "torch.distributed.device_mesh", "transformers")
# The first optimizer and the first Hugging Face model of a process import these, more than two seconds of CPU time in
# every rank; they import triton where it is installed, and a GPU must not be touched before the fork.
MODELS = ("gemma2", "gpt2", "llama", "qwen2", "qwen3", "stablelm", "t5")
LATER = ("torch._dynamo", "pytest", *(f"transformers.models.{name}.modeling_{name}" for name in MODELS))
# Another half second a rank. It sees the environment of its rank all the same: its modules read none when they are
# imported (test_architecture.py).
ENGINE = ("engine.engine", "engine.verify")
OBJECTS = 7000
"""New objects until a rank looks for garbage: ten times Python's number, since a rank lives for seconds."""
GRACE_SECONDS = 2.0
"""How long the others have to tell of it when a rank has failed."""


class RankError(Exception):
    """A rank raised, died or did not end."""


class _Answer(NamedTuple):
    """What a rank has to say at its end."""

    ok: bool
    value: Any
    """The result, or a traceback."""
    at: float
    """When, on the clock of this machine; 0 for a rank that died without a word, which the others only hear of."""


SERVER: Any = forkserver._forkserver
"""Fork server of this process; the standard library gives it no public name."""


def use_server(address: str) -> None:
    """Let this process fork its ranks from the server that another process has started, and keeps for as long."""
    SERVER._forkserver_address, SERVER._forkserver_alive_fd = address, os.pipe()[1]
    SERVER.ensure_running = resource_tracker.ensure_running


def server_address() -> str:
    """Start the server of this process; return its address."""
    start_server()
    return str(SERVER._forkserver_address)


def start_server() -> None:
    """Choose what the fork server imports, and let it begin, unless another process's is used."""
    if "ensure_running" in vars(SERVER):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    here = Path.cwd() == ROOT  # the server searches its folder first; from another one it may find another engine
    more = LATER + ENGINE if here else LATER
    preload = PRELOAD + more if interpreted or not find_spec("triton") else PRELOAD
    last = ("tests.frozen",) if here else ()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*preload, *last])
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # a fork copies an entry for each page of the server
    forkserver.ensure_running()
    del os.environ["GLIBC_TUNABLES"]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    env: Mapping[str, str] | None = None,
    seconds: float = 120.0,
) -> list[Any]:
    """Call ``function(*arguments)`` on each rank inside a gloo process group; return all results by rank.

    The function is found by its name, so it must live at module level; results are pickled.

    Raises:
        RankError: with the traceback of the first rank that failed, or the ranks that hang.
    """
    context = multiprocessing.get_context("forkserver")
    with TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes: list[ForkServerProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, world_size, str(Path(folder) / "rendezvous"))
            process = context.Process(target=_enter, args=(theirs, place, dict(env or {}), function, arguments))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, processes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def as_started_alone() -> None:
    """Let this process start others in Python's own way, as a rank of torchrun does.

    Processes of a fork server take over its way, and the first one that each of them starts would wait for a server of
    its own: a loader's workers then import torch again, for up to ten seconds where four of them do so on two cores.
    """
    multiprocessing.set_start_method(None, force=True)


def _collect(ends: list[Connection], processes: list[ForkServerProcess], seconds: float) -> list[Any]:
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + seconds
    while len(answers) < len(ends):
        waiting = {end: rank for rank, end in enumerate(ends) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for end in ready:
            rank = waiting[end]  # type: ignore[index]
            answers[rank] = _receive(end, processes[rank])  # type: ignore[arg-type]
            if not answers[rank].ok:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    failed = [rank for rank, answer in answers.items() if not answer.ok]
    if failed:
        first = min(failed, key=lambda rank: answers[rank].at)
        raise RankError(f"rank {first} failed:\n{answers[first].value}")
    if late := [rank for rank in range(len(ends)) if rank not in answers]:
        raise RankError(f"ranks {late} did not end within {seconds} s")
    return [answers[rank].value for rank in range(len(ends))]


def _receive(end: Connection, process: ForkServerProcess) -> _Answer:
    try:
        return _Answer(*pickle.loads(end.recv_bytes()))
    except EOFError:
        process.join()
        return _Answer(False, f"it died with exit code {process.exitcode}", 0.0)


def _enter(
    end: Connection, place: tuple[int, int, str], env: dict[str, str], function: Callable[..., Any], args: Any
) -> None:
    """Body of one rank."""
    os.environ.update(env)
    as_started_alone()
    import torch
    import torch.distributed as dist

    rank, world_size, file = place
    gc.freeze()  # what the server imported is not looked through again
    gc.set_threshold(OBJECTS, 20, 20)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=r"engine\.")
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
        answer = _Answer(True, function(*args), time.monotonic())
        dist.barrier()
    except BaseException:
        answer = _Answer(False, traceback.format_exc(), time.monotonic())
    end.send_bytes(pickle.dumps(tuple(answer)))
    end.close()
    os._exit(0)  # the result is out; interpreter shutdown would only cost time
