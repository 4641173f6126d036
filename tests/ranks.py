"""Run a function on several gloo ranks of this machine, in well under two seconds.

Processes are forked from a server that has imported torch but has no threads, so that a rank starts
without importing it again. Ranks meet in a file, not at a port. The first failing rank's traceback
is raised; ranks that do not end are named and killed.
"""

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Never the engine or triton: they must see the environment that the test sets.
# torch._dynamo: torch imports it with the first optimizer, which costs a rank more than all the rest together.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.device_mesh", "torch._dynamo", "transformers"]


class RankError(Exception):
    """A rank raised, died or did not end."""


def start_server() -> None:
    """Choose what the fork server imports; it starts with the first ranks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)


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


def _collect(ends: list[Connection], processes: list[ForkServerProcess], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < len(ends):
        waiting = {end: rank for rank, end in enumerate(ends) if rank not in results}
        ready = wait(list(waiting), timeout=deadline - time.monotonic())
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not end within {seconds} s")
        for end in ready:
            rank = waiting[end]  # type: ignore[index]
            ok, value = _receive(end, processes[rank])  # type: ignore[arg-type]
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _receive(end: Connection, process: ForkServerProcess) -> tuple[bool, Any]:
    try:
        ok, value = pickle.loads(end.recv_bytes())
        return ok, value
    except EOFError:
        process.join()
        return False, f"it died with exit code {process.exitcode}"


def _enter(
    end: Connection, place: tuple[int, int, str], env: dict[str, str], function: Callable[..., Any], args: Any
) -> None:
    """Body of one rank."""
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    rank, world_size, file = place
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=r"engine\.")
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
        message = (True, function(*args))
        dist.barrier()
    except BaseException:
        message = (False, traceback.format_exc())
    end.send_bytes(pickle.dumps(message))
    end.close()
    os._exit(0)  # the result is out; interpreter shutdown would only cost time
