"""Rank, world size and address of this process, from the environment of its launcher. No torch, no communication.

    torchrun     RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK; they come first
    Open MPI     OMPI_COMM_WORLD_RANK, .._SIZE, .._LOCAL_RANK
    PMI          PMI_RANK, PMI_SIZE: MPICH, Intel MPI, Cray, and srun with such a library
    Slurm        SLURM_PROCID and SLURM_STEP_NUM_TASKS inside a step that srun has started

Only torchrun sets the rendezvous address; with the others set MASTER_ADDR and MASTER_PORT. Without them, a Slurm step
uses its first node, where task 0 runs, and a port derived from the job and step ids.

A shell is not a rank. In an sbatch script Slurm sets SLURM_PROCID=0 and SLURM_NTASKS=N for one process; in a shell of
salloc it sets SLURM_NTASKS only, or runs an "interactive step" with a reserved id. So the Slurm variables are used only
with an ordinary SLURM_STEP_ID, with the step's task count, not the job's.

With ``TRINE_LAUNCHER=none`` every process that torchrun has not started is a job of one rank.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fcntl import ioctl
from ipaddress import ip_address
from pathlib import Path

from engine.errors import GridError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """Rank, local rank and world size of this process, with the address and port of the rendezvous."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class _Task:
    """Identity that a launcher other than torchrun passes to a process."""

    launcher: str
    rank: int
    size: int
    local_rank: int


def find_place(variables: _Variables) -> Place | None:
    """Reads this process's place in the job from the launcher's environment ``variables``.

    Returns None without a launcher, or if MPI or Slurm has started only one process.

    Raises:
        GridError: the variables are incomplete or contradict each other, or lack the address of the rendezvous.
    """
    task = _find_task(variables)
    if task is None or "RANK" in variables:
        return _of_torchrun(variables)
    if task.size == 1:
        return None
    check_rank(task.rank, task.size, task.launcher)
    if read_count(variables, "WORLD_SIZE", task.size) != task.size:
        raise GridError(
            f"WORLD_SIZE={variables['WORLD_SIZE']} is set, and {task.launcher} has started {task.size} processes; "
            "unset WORLD_SIZE, or set RANK, MASTER_ADDR and MASTER_PORT too."
        )
    address, port = _meeting_point(task, variables)
    return Place(task.rank, task.size, task.local_rank, address, port)


def local_rank(variables: _Variables, rank: int) -> int:
    """Returns this process's local rank from the launcher's environment ``variables``; if they lack it, the global rank
    ``rank``.
    """
    task = _find_task(variables)
    return read_count(variables, "LOCAL_RANK", task.local_rank if task is not None else rank)


def read_count(variables: _Variables, name: str, default: int) -> int:
    """Returns the environment variable ``name`` as an integer of at least 0; ``default`` if it is unset.

    Raises:
        GridError: the value is not such a number, or has too many digits.
    """
    text = variables.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise GridError(f"{name}={text!r} is not a number of 0 or more; let torchrun set it.")
    if len(text) > _DIGITS:
        remedy = "give fewer seconds" if name.endswith("_SECONDS") else "let torchrun set it"
        raise GridError(f"{name} has {len(text)} digits, and at most {_DIGITS} are allowed; {remedy}.")
    return int(text)


_DIGITS = 9
"""Most digits of a number in the environment: as seconds these are 31 years, which every clock can add."""


def check_rank(rank: int, size: int, launcher: str) -> None:
    """Raises GridError unless ``rank`` < ``size``; ``launcher``: name for the message."""
    if rank >= size:
        raise GridError(f"RANK={rank} is outside WORLD_SIZE={size}, since ranks count from 0; let {launcher} set both.")


def _of_torchrun(variables: _Variables) -> Place | None:
    present = [name for name in RENDEZVOUS if name in variables]
    if not present:
        return None
    if len(present) < len(RENDEZVOUS):
        missing = ", ".join(name for name in RENDEZVOUS if name not in variables)
        raise GridError(
            f"{', '.join(present)} is set and {missing} is missing: a distributed job needs all four of "
            f"{', '.join(RENDEZVOUS)}, a single process none of them; start with torchrun."
        )
    rank, size = read_count(variables, "RANK", 0), read_count(variables, "WORLD_SIZE", 1)
    check_rank(rank, size, "torchrun")
    here = read_count(variables, "LOCAL_RANK", rank)
    return Place(rank, size, here, variables["MASTER_ADDR"], _port(variables))


def _port(variables: _Variables) -> int:
    port = read_count(variables, "MASTER_PORT", 0)
    if port >= 1 << 16:
        raise GridError(f"MASTER_PORT={port} is above 65535, the largest port; give an open one.")
    return port


def _find_task(variables: _Variables) -> _Task | None:
    """The rank that MPI or Slurm has given. MPI's comes first: in a Slurm job, mpirun starts its daemons with srun."""
    if variables.get("TRINE_LAUNCHER") == "none":
        return None
    slurm = _slurm_step(variables)
    if "OMPI_COMM_WORLD_RANK" in variables and "OMPI_COMM_WORLD_SIZE" in variables:
        rank, size = (read_count(variables, f"OMPI_COMM_WORLD_{name}", 0) for name in ("RANK", "SIZE"))
        return _Task("Open MPI", rank, size, read_count(variables, "OMPI_COMM_WORLD_LOCAL_RANK", rank))
    if "PMI_RANK" in variables and "PMI_SIZE" in variables:
        rank, size = read_count(variables, "PMI_RANK", 0), read_count(variables, "PMI_SIZE", 1)
        if slurm is not None and (slurm.rank, slurm.size) == (rank, size):
            return slurm  # srun with a PMI library: one launcher, two sets of variables
        local = next((name for name in _LOCAL_RANKS_OF_PMI if name in variables), "")
        return _Task("PMI", rank, size, read_count(variables, local, rank))
    return slurm


_LOCAL_RANKS_OF_PMI = ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID")
"""Of MPICH and Intel MPI, and of Cray."""
_RESERVED_STEPS = 0xFFFFFFF0
"""Step numbers from here on are shells and daemons: the batch script, salloc's interactive step, prolog and epilog."""


def _slurm_step(variables: _Variables) -> _Task | None:
    step = variables.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= _RESERVED_STEPS:
        return None
    if "SLURM_PROCID" not in variables or "SLURM_STEP_NUM_TASKS" not in variables:
        return None
    rank, size = read_count(variables, "SLURM_PROCID", 0), read_count(variables, "SLURM_STEP_NUM_TASKS", 1)
    bound = "SLURM_GPUS_PER_TASK" in variables  # then a task sees its own GPUs only, and counts them from 0
    return _Task("Slurm", rank, size, 0 if bound else read_count(variables, "SLURM_LOCALID", rank))


def _meeting_point(task: _Task, variables: _Variables) -> tuple[str, int]:
    """Returns address and port of the rendezvous without torchrun: as set, or the first node of a Slurm step."""
    address = variables.get("MASTER_ADDR") or _first_node(task, variables)
    port = _port(variables) if "MASTER_PORT" in variables else _slurm_port(task, variables)
    if address is None or port is None:
        command = _COMMANDS[task.launcher].format(size=task.size)
        raise GridError(
            f"rank {task.rank} of {task.size} was started by {task.launcher}, and no address of a rendezvous is set; "
            f"start with `{command}`, or with torchrun on every node, or set TRINE_LAUNCHER=none for {task.size} runs "
            "of one process."
        )
    return address, port


_COMMANDS = {
    "Open MPI": "mpirun -n {size} -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 python train.py",
    "PMI": "mpiexec -n {size} -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500 python train.py",
    "Slurm": "MASTER_ADDR=HOST_OF_TASK_0 MASTER_PORT=29500 srun -n {size} python train.py",
}


def _first_node(task: _Task, variables: _Variables) -> str | None:
    """The node of task 0: the first one of the step, unless a file of hosts has put the tasks anywhere."""
    if task.launcher != "Slurm" or "arbitrary" in variables.get("SLURM_DISTRIBUTION", ""):
        return None
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    return first_host(nodes) or None


def _slurm_port(task: _Task, variables: _Variables) -> int | None:
    """Returns a port below the ephemeral range of systems; jobs and steps that share a node get different ones."""
    if task.launcher != "Slurm" or "SLURM_JOB_ID" not in variables:
        return None
    job, step = read_count(variables, "SLURM_JOB_ID", 0), read_count(variables, "SLURM_STEP_ID", 0)
    return 10_000 + (job * 61 + step) % 20_000


def end_with_agent(variables: _Variables) -> None:
    """Makes the kernel send SIGTERM to this rank when torchrun's agent, its parent process, ends.

    Does nothing if torchrun did not start this process.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        with contextlib.suppress(OSError, AttributeError):  # no Linux
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


_SET_PARENT_DEATH_SIGNAL = 1


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: ``a07-x1`` for ``a[07-09,12]-x[1-2],b3``."""
    host, rest = "", nodes
    while rest and rest[0] != ",":
        if rest[0] == "[":
            choices, _, rest = rest[1:].partition("]")
            host += choices.split(",")[0].split("-")[0]
        else:
            host, rest = host + rest[0], rest[1:]
    return host


def route_address(target: str) -> str:
    """Returns this host's IP address on the route to host ``target``; '' without a route."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def addresses_of(name: str) -> tuple[str, ...]:
    """Returns the addresses of a host name; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(place[0]) for *_, place in found))


def interface_addresses(name: str) -> tuple[str, ...]:
    """Returns the IP addresses of this host's network interface ``name``."""
    return (*_addresses_4(name), *_addresses_6(name))


_ADDRESS = 0x8915
"""Linux ioctl request SIOCGIFADDR."""


def _addresses_4(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        yield socket.inet_ntoa(ioctl(asking, _ADDRESS, struct.pack("16s24x", name.encode()))[20:24])


def _addresses_6(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, device = line.split()
            if device == name:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def gloo_interface(target: str) -> str:
    """Returns the network interface on the route to host ``target`` if gloo would listen on the loopback interface, as
    it does where this host's name resolves to 127.x or to no address of this host; otherwise ''.
    """
    route = route_address(target)
    if not route or _is_loopback(route):
        return ""
    held = {name: interface_addresses(name) for _, name in socket.if_nameindex()}
    for address in addresses_of(socket.gethostname()):
        if _is_loopback(address):
            break
        if any(address in addresses for addresses in held.values()):
            return ""
    return next((name for name, addresses in held.items() if route in addresses), "")


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def loopback_words(place: Place, variables: _Variables) -> str:
    """Returns an error text with cause and remedy if a multi-node job has a loopback rendezvous address; otherwise ''.

    ``variables``: environment of the launcher.
    """
    here = read_count(variables, "LOCAL_WORLD_SIZE", place.size)
    if not 0 < here < place.size:
        return ""
    found = addresses_of(place.address)
    if not found or not all(map(_is_loopback, found)):
        return ""
    return (
        f"{place.address} is {min(found)} here, an address of this node alone, but the job has {place.size // here} "
        "nodes: start torchrun on each node with --local-addr=ADDRESS, an address of it that the others reach"
    )


def own_address() -> str:
    """Returns this host's IP address on its route to MASTER_ADDR."""
    return route_address(os.environ.get("MASTER_ADDR") or "localhost") or "127.0.0.1"
