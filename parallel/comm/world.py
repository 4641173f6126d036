"""Processes of a job: this process's rank, how it joins the other ranks, and how it leaves.

Opens the job's store, and creates and destroys process groups.

    read_world   rank and world size, from the launcher's environment
    open_store   the job's key-value store
    Rendezvous   all ranks compare their arguments, before any group is created (``meeting``)
    open_world   the process group of all ranks

The store has no password: anyone who reaches its port may read and write it. On rank 0 it listens on MASTER_ADDR only;
torchrun's agent listens on all interfaces. Protect the nodes' ports, as for gloo and NCCL, which do not encrypt.
"""

import atexit
import logging
import os
import socket
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from threading import Lock
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from engine.errors import GridError, first_line
from engine.kernels.device import ACCELERATORS, collectives_for, count_devices, find_accelerator, use_device
from engine.parallel.comm.backend import Backend
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.launcher import Place, find_place, gloo_interface, local_rank, loopback_words, read_count
from engine.parallel.comm.rendezvous import SLOW_SECONDS
from engine.parallel.grid import Grid

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class Lender:
    """Process groups and frozen parameters that an engine lends to later engines on the same grid.

    Borrowers must not write, move or free the parameters, and must end before the lender.
    """

    comm: Comm
    tensors: Mapping[str, Tensor]
    """This rank's shard, or codes and scales, of each frozen parameter outside of flat buckets, by the borrower's name.
    """
    shards: Mapping[tuple[str, ...], Tensor]
    """This rank's shard of each flat bucket of frozen parameters (ZeRO 3), by the borrower's names of its slots."""


@dataclass(frozen=True, slots=True)
class World:
    """Rank, world size, local rank and device of this process in a job, before a grid is defined."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    place: Place | None = None
    """Address of the rendezvous; None for a single process, or if the user has started the process group."""
    connect: Callable[[Grid], Backend] | None = None
    """Function that makes the backend of ranks that are not processes; None: ``torch.distributed``."""
    lender: Lender | None = None
    """Engine of the same ranks that lends groups and frozen parameters; None: the engine has its own."""
    patience: int = 600
    """Seconds until communication with another rank fails; ``TRINE_TIMEOUT_SECONDS`` overrides it."""


@cache
def _end_at_exit() -> None:
    """End the process group, the user's too, at the exit: not with an engine, since a process may have several.

    Registered once, before everything that holds a group: functions run at the exit in reverse order.
    """
    atexit.register(_end_process_group)


def _end_process_group() -> None:
    """Destroy the process group, and let nothing of torch keep it.

    A group that lives on keeps its threads. One that is about to release its last tensor when the interpreter is being
    taken down asks for the lock of Python, and the process aborts although the run has ended well.
    """
    if dist.is_initialized():
        _forget_default_groups()
        dist.destroy_process_group()


def _forget_default_groups() -> None:
    """Let functions of torch forget the group that was their default when their module was imported.

    ``torch.distributed.nn``, which torch imports by itself with the first optimizer, has ``group=group.WORLD`` in its
    signatures; None there means the same.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        if isinstance(function, FunctionType) and function.__defaults__:
            given: tuple[Any, ...] = function.__defaults__
            function.__defaults__ = tuple(None if isinstance(each, dist.ProcessGroup) else each for each in given)


def read_world() -> World:
    """Returns this process's rank, device and number of ranks, without communication.

    The ranks come from the default process group or, if there is none, from the variables of torchrun, Slurm or MPI. If
    there are none, the world is one process.

    Raises:
        GridError: the variables are incomplete, or there are more local ranks than GPUs.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        here = local_rank(os.environ, rank)
        shared = dist.get_backend() == "gloo"  # gloo ranks may share a GPU, NCCL ranks may not
        return World(rank, size, here, _device(here, shared))
    place = find_place(os.environ)
    if place is None:
        return World(0, 1, 0, _device(0, shared=False))
    return World(place.rank, place.size, place.local_rank, _device(place.local_rank, shared=False), place)


def _device(local_rank: int, shared: bool) -> torch.device:
    kind = find_accelerator()
    if kind is None:
        return torch.device("cpu")
    gpus = count_devices(kind)
    if local_rank >= gpus and not shared:
        raise GridError(
            f"local rank {local_rank} has no GPU of its own, because this node has {gpus}; start at most {gpus} "
            f"processes here, or set {ACCELERATORS[kind].hidden_by}='' to run on the CPU."
        )
    return torch.device(kind, local_rank % gpus)


def open_store(world: World) -> Store:
    """Opens the key-value store of the job: the store of the default process group, or a TCP store at ``world.place``.

    A single process gets a store in its own memory.

    Raises:
        GridError: the store cannot be reached within ``TRINE_TIMEOUT_SECONDS``; the message names the address.
    """
    if dist.is_initialized():
        return distributed_c10d._get_default_store()
    if world.place is None:
        return HashStore()
    place, began = world.place, time.monotonic()
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    slow = threading.Timer(SLOW_SECONDS, _say_slow, (place,))
    slow.daemon = True
    slow.start()
    try:
        return TCPStore(
            place.address,
            place.port,
            place.size,
            hosts,
            timedelta(seconds=timeout_seconds(world.patience)),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(place) if hosts else None,
        )
    except (RuntimeError, ValueError) as error:
        raise _rendezvous_failure(world, time.monotonic() - began, error) from error
    finally:
        slow.cancel()


def _say_slow(place: Place) -> None:
    """Logs, on one rank of a node, that the rendezvous cannot be reached yet."""
    if place.local_rank == 0:
        words = loopback_words(place, os.environ)
        at = f"{place.address}:{place.port}"
        logger.warning(
            "rank %d has not reached the rendezvous at %s for %g s%s",
            place.rank, at, SLOW_SECONDS, f"; {words}" if words else ", and tries on",
        )  # fmt: skip


def _listen(place: Place) -> int | None:
    """A socket that listens at the address of the job and nowhere else; None if that address is not of this machine.

    torch's own socket listens on all interfaces.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError:
        return None  # torch resolves the name again, and its message names the fault
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        logger.info(
            "the store of the job listens on all interfaces, because %s:%d cannot be bound here: %s",
            place.address, place.port, error.strerror,
        )  # fmt: skip
        return None
    return listener.detach()


_BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks connect at once."""


def open_world(world: World, store: Store | None = None) -> None:
    """Starts torch's default process group for ``world``, unless it exists; it is destroyed at interpreter exit.

    Args:
        store: key-value store with a key prefix that no earlier run of a restarted job has used; None: the store of the
            job.

    Raises:
        GridError: the other ranks cannot be reached; the message names address and network interface.
    """
    use_device(world.device)
    _end_at_exit()
    if dist.is_initialized():
        return
    store = open_store(world) if store is None else store
    _choose_interface(world)
    began = time.monotonic()
    backend = collectives_for(world.device)
    bound = world.device if world.device.type in ACCELERATORS else None
    try:
        with connected_when_needed(world.size):
            dist.init_process_group(
                backend,
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=timeout_seconds(world.patience)),
                device_id=bound,
            )
    except (RuntimeError, ValueError) as error:
        raise _rendezvous_failure(world, time.monotonic() - began, error) from error


def _choose_interface(world: World) -> None:
    """Sets GLOO_SOCKET_IFNAME, unless it is set, where other hosts would not reach the interface that gloo chooses."""
    if world.place is None or world.size == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if name := gloo_interface(world.place.address):
        os.environ["GLOO_SOCKET_IFNAME"] = name
        logger.info("gloo uses %s, because the name of this host resolves to an address that others do not reach", name)


def meeting_point(world: World) -> str:
    """Returns the rendezvous of ``world`` as "address:port", or "the process group" if the world has no address."""
    return "the process group" if world.place is None else f"{world.place.address}:{world.place.port}"


def prefixed(store: Store, prefix: str) -> Store:
    """Returns a view of ``store`` that puts ``prefix`` before all keys."""
    return PrefixStore(prefix, store)


@contextmanager
def connected_when_needed(ranks: int) -> Iterator[None]:
    """Returns a context in which a new gloo group connects two ranks only at their first message, if ``ranks`` > 64.

    By default gloo connects all pairs of ranks at creation.
    """
    if ranks <= ALL_WITH_ALL or _LAZILY in os.environ:
        yield
        return
    os.environ[_LAZILY] = "1"
    try:
        yield
    finally:
        del os.environ[_LAZILY]


ALL_WITH_ALL = 64
"""Largest number of ranks that gloo connects at creation of a group, which detects unreachable ranks at the start."""
_LAZILY = "TORCH_GLOO_LAZY_INIT"


class OwnedGroups:
    """Process groups created by one component of an engine; ``close`` destroys them on this rank.

    ``close`` waits at most a few seconds, since destruction can block until other ranks close too. A thread then
    completes the destruction.
    """

    def __init__(self) -> None:
        self._made: list[dist.ProcessGroup] = []
        self._process = os.getpid()
        atexit.register(self._made.clear)  # a group that outlives the process group aborts the interpreter at its exit

    def open(
        self, ranks: Sequence[int] | None, backend: str | None = None, timeout: timedelta | None = None
    ) -> dist.ProcessGroup | None:
        """Creates and returns the process group of ``ranks``, which include this rank; returns None for ``ranks`` None.

        Every rank of the world calls it, in the same order among calls that create groups. Each passes the ranks of its
        own group; a rank without a group passes None. Groups are disjoint, and only members of a group wait for each
        other. The default ``timeout`` is :func:`group_timeout`.
        """
        wait = group_timeout() if timeout is None else timeout
        made = _members_meet(ranks, backend, wait)
        if not isinstance(made, dist.ProcessGroup):
            return None
        self._made.append(made)
        if made.size() > 1 and dist.get_backend(made) == "gloo":
            # a rank that destroys the group at once would close connections that others are still making
            dist.barrier(made)
        return made

    def close(self) -> None:
        """Destroys the groups. A second call does nothing."""
        atexit.unregister(self._made.clear)
        if not self._made or os.getpid() != self._process:  # in a forked child they are the parent's
            return
        groups, ended = self._made.copy(), Lock()
        self._made.clear()
        ended.acquire()
        # threading.Thread takes locks, which may already be held when the garbage collector closes a dropped engine
        start_new_thread(_destroy, (groups, ended))
        ended.acquire(timeout=_DESTROY_SECONDS)


def _members_meet(ranks: Sequence[int] | None, backend: str | None, wait: timedelta) -> Any:
    """The new group of ``ranks``; with None what torch does for a rank that is in none.

    torch's own ``new_group`` after its preparations, with a name that all members know.
    """
    world = distributed_c10d._get_default_group()
    number = distributed_c10d._process_group_name([], use_hashed_name=False)  # counts the calls of this process
    kind, store = distributed_c10d._world.pg_map[world]
    # a rank that is in no group takes part in the split, as one outside of a group of others
    members = sorted(ranks) if ranks is not None else [(world.rank() + 1) % world.size()]
    name: Any = f"{number}.{members[0]}"
    with connected_when_needed(len(members)):
        made, _ = distributed_c10d._new_process_group_helper(
            len(members),
            members.index(world.rank()) if ranks is not None else None,
            members,
            dist.Backend(backend or kind),
            store,
            name,
            timeout=wait,
            device_id=world.bound_device_id,
        )
    if isinstance(made, dist.ProcessGroup):
        distributed_c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(members)}
    return made


def color_rounds(
    groups: Iterable[tuple[int, ...]], color: Callable[[Sequence[int]], int] | None = None
) -> list[frozenset[tuple[int, ...]]]:
    """Divides disjoint ``groups`` of ranks into rounds such that no two groups of a round have the same color.

    NCCL splits a communicator by color. ``color`` computes a group's color, by default as torch does, from a hash of
    the ranks.
    """
    rounds: list[dict[int, tuple[int, ...]]] = []
    for group in groups:
        found = (color or split_color)(group)
        free = next((each for each in rounds if found not in each), None)
        if free is None:
            rounds.append(free := {})
        free[found] = group
    return [frozenset(each.values()) for each in rounds]


def split_color(ranks: Sequence[int]) -> int:
    """Returns torch's color of ``ranks``, the key by which NCCL splits a group from the world's communicator."""
    color: int = distributed_c10d._process_group_color(list(ranks))
    return color


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


def timeout_seconds(configured: int = 600) -> int:
    """Returns the timeout of communication in seconds: ``TRINE_TIMEOUT_SECONDS``, else ``configured``."""
    return read_count(os.environ, "TRINE_TIMEOUT_SECONDS", configured)


def watchdog_seconds(configured: int = 600) -> float:
    """Returns seconds until the engine's watchdog reports a slow rank: ``TRINE_WATCHDOG_SECONDS``, else half the
    timeout.

    The timeout is ``TRINE_TIMEOUT_SECONDS``, else ``configured``.
    """
    given = read_count(os.environ, "TRINE_WATCHDOG_SECONDS", 0)
    return float(given) if given else timeout_seconds(configured) / 2


def group_timeout() -> timedelta:
    """Returns the timeout of the engine's process groups: ``TRINE_TIMEOUT_SECONDS``, else the default group's."""
    world = dist.group.WORLD
    if world is None or "TRINE_TIMEOUT_SECONDS" in os.environ:
        return timedelta(seconds=timeout_seconds())
    timeout: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout


def patience_seconds() -> float:
    """Returns the seconds between keep-alive messages of a busy rank, at most a quarter of a collective's timeout."""
    return min(_PATIENCE_SECONDS, group_timeout().total_seconds() / 4)


_PATIENCE_SECONDS = 20.0


def shares_memory() -> bool:
    """Returns True if ranks of one host may use shared memory; ``TRINE_SHARED_MEMORY=0`` forbids it."""
    return read_count(os.environ, "TRINE_SHARED_MEMORY", 1) != 0


def leave_traceback(main: Callable[[], None]) -> None:
    """Runs ``main``; if it raises, adds the traceback to torchrun's summary of the job, and re-raises the error."""
    from torch.distributed.elastic.multiprocessing.errors import record  # slow to import, and only needed here

    record(main)()


def _rendezvous_failure(world: World, seconds: float, error: Exception) -> GridError:
    address = "of one process" if world.place is None else f"at {meeting_point(world)}"
    interfaces = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}
    hint = f"interface settings are {interfaces}" if interfaces else "no network interface is set"
    logger.debug("rank %d could not join", world.rank, exc_info=error)
    after = f"given up after {seconds:.0f} s" if seconds >= 0.5 else "which failed at once"
    if world.place is not None and (words := loopback_words(world.place, os.environ)):
        joined = f"rank {world.rank} of {world.size} could not join the job {address}"
        return GridError(f"{joined}, {after}; {words}.")
    return GridError(
        f"rank {world.rank} of {world.size} could not join the job {address}, {after} "
        f"({first_line(error)}); all nodes need the same MASTER_ADDR and an open MASTER_PORT, and {hint}: "
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME must name an interface of this machine (see `ip address`)."
    )
