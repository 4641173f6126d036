"""The processes of a job: which one this is, how it joins the others, and how it leaves.

One of three files that use ``torch.distributed``; it creates and destroys process groups and sends nothing.
"""

import atexit
import logging
import os
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

import torch
import torch.distributed as dist

from engine.errors import GridError, first_line

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class World:
    """This process among the processes of the job, before a grid is laid over them."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def read_world() -> World:
    """Find this rank and its device without communicating: from the process group or torchrun's variables, else alone.

    Raises:
        GridError: torchrun's variables are incomplete, or there are more local ranks than GPUs.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = _variable("LOCAL_RANK", rank)
        shared = dist.get_backend() == "gloo"  # gloo ranks may share a GPU, NCCL ranks may not
        return World(rank, size, local_rank, _device(local_rank, shared))
    present = [name for name in _RENDEZVOUS if name in os.environ]
    if present and len(present) < len(_RENDEZVOUS):
        missing = ", ".join(name for name in _RENDEZVOUS if name not in os.environ)
        raise GridError(
            f"{', '.join(present)} is set and {missing} is missing: a distributed job needs all four of "
            f"{', '.join(_RENDEZVOUS)}, a single process none of them; start with torchrun."
        )
    rank, size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    if rank >= size:
        raise GridError(f"RANK={rank} is outside WORLD_SIZE={size}, since ranks count from 0; let torchrun set both.")
    local_rank = _variable("LOCAL_RANK", rank)
    return World(rank, size, local_rank, _device(local_rank, shared=False))


_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise GridError(f"{name}={text!r} is not a number of 0 or more; let torchrun set it.")
    return int(text)


def _device(local_rank: int, shared: bool) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus and not shared:
        raise GridError(
            f"local rank {local_rank} has no GPU of its own, because this node has {gpus}; start at most {gpus} "
            "processes here, or set CUDA_VISIBLE_DEVICES='' to run on the CPU."
        )
    return torch.device("cuda", local_rank % gpus)


def open_world(world: World) -> None:
    """Start the process group that ``read_world`` described; it ends when the interpreter exits.

    ``TRINE_TIMEOUT_SECONDS`` (default 600) is the timeout of the rendezvous and of every collective.

    Raises:
        GridError: the other ranks cannot be reached; names the address and the network interface.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if dist.is_initialized():
        return
    seconds = timeout_seconds()
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    bound = world.device if world.device.type == "cuda" else None
    try:
        dist.init_process_group(
            backend,
            store=None if "RANK" in os.environ else dist.HashStore(),  # type: ignore[attr-defined]
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=seconds),
            device_id=bound,
        )
    except (RuntimeError, ValueError) as error:
        raise _rendezvous_failure(world, seconds, error) from error
    atexit.register(_end_process_group)  # at exit and not with an engine: a process may have several engines


class OwnedGroups:
    """The process groups that one part of an engine creates; ``close`` destroys them on this rank.

    With gloo each rank destroys a group by itself. The destructor waits for collectives that are still queued, so one
    that another rank never joins would block it until its timeout.

    With NCCL, torch documents ``destroy_process_group`` as a call that all ranks make in the same order when no work is
    pending: NCCL frees a communicator once all of its ranks on the node have asked for it.

    So a thread destroys the groups, the newest first, and ``close`` waits for it for a few seconds. If all ranks close,
    at whatever time, every group is destroyed. If another rank closes much later or never, this rank continues, and the
    remaining groups end with that rank or with the process.
    """

    def __init__(self) -> None:
        self._made: list[dist.ProcessGroup] = []
        self._process = os.getpid()
        atexit.register(self._made.clear)  # a group that outlives the process group aborts the interpreter at its exit

    def open(
        self, ranks: Sequence[int] | None = None, backend: str | None = None, timeout: timedelta | None = None
    ) -> dist.ProcessGroup | None:
        """Create the group of ``ranks`` (None: of all); every rank of the world calls it. None on a rank outside the
        group.

        Without ``timeout`` the group waits for :func:`group_timeout`; torch's own default is half an hour.

        Groups are numbered, because torch names the NCCL groups of a ``DeviceMesh`` by how many there are, and once
        groups are destroyed that number is neither unique nor the same on all ranks.
        """
        wait = group_timeout() if timeout is None else timeout
        made = dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=wait)
        if not isinstance(made, dist.ProcessGroup):
            return None
        self._made.append(made)
        return made

    def close(self) -> None:
        """Destroy the groups, which their owner no longer uses. A second call does nothing."""
        atexit.unregister(self._made.clear)
        if not self._made or os.getpid() != self._process:  # in a forked child they are the parent's
            return
        groups, ended = self._made.copy(), Lock()
        self._made.clear()
        ended.acquire()
        # threading.Thread takes locks, which may already be held when the garbage collector closes a dropped engine
        start_new_thread(_destroy, (groups, ended))
        ended.acquire(timeout=_DESTROY_SECONDS)


_DESTROY_SECONDS = 5.0
"""Timeout of waiting for groups to end: they take milliseconds with gloo, up to a second with NCCL."""


def _destroy(groups: list[dist.ProcessGroup], ended: Lock) -> None:
    """Destroy ``groups``, the last first, and drop the references to them, which ends their threads."""
    try:
        while groups:
            group = groups.pop()
            try:
                with suppress(ValueError):  # the default process group was destroyed before, and all groups with it
                    dist.destroy_process_group(group)
            except RuntimeError as error:
                logger.warning("a process group was not destroyed: %s", first_line(error))
            del group
    finally:
        ended.release()


def timeout_seconds() -> int:
    """Timeout of any communication between ranks: ``TRINE_TIMEOUT_SECONDS``, by default 600."""
    return _variable("TRINE_TIMEOUT_SECONDS", 600)


def group_timeout() -> timedelta:
    """Timeout of the groups that an engine creates: ``TRINE_TIMEOUT_SECONDS``, else that of the process group.

    So the axes of a grid wait as long as the world, also in a process group that the user has started.
    """
    world = dist.group.WORLD
    if world is None or "TRINE_TIMEOUT_SECONDS" in os.environ:
        return timedelta(seconds=timeout_seconds())
    timeout: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout


def shares_memory() -> bool:
    """True if ranks of one host may communicate through shared memory; ``TRINE_SHARED_MEMORY=0`` forbids it."""
    return _variable("TRINE_SHARED_MEMORY", 1) != 0


def leave_traceback(main: Callable[[], None]) -> None:
    """Run ``main`` so that torchrun's summary of a failed job ends with this process's traceback."""
    from torch.distributed.elastic.multiprocessing.errors import record  # slow to import, and only needed here

    record(main)()


def _rendezvous_failure(world: World, seconds: int, error: Exception) -> GridError:
    alone = "MASTER_ADDR" not in os.environ
    address = "of one process" if alone else f"at {os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
    interfaces = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
    hint = f"interface settings are {interfaces}" if interfaces else "no network interface is set"
    cause = first_line(error)
    return GridError(
        f"rank {world.rank} of {world.size} could not join the job {address} within {seconds} s ({cause}); "
        f"all nodes need the same MASTER_ADDR and an open MASTER_PORT, and {hint}: GLOO_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME must name an interface of this machine (see `ip address`)."
    )
