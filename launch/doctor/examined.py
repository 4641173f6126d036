"""Result of a doctor as plain data, to and from JSON: facts of every rank, and measurements between ranks.

Facts of this rank and its host are collected here. Only ``with_gpus`` needs torch.
"""

import array
import os
import platform
import resource
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fcntl import ioctl
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import engine
from engine.errors import first_line
from engine.launch.jobs.probe import sources_digest
from engine.parallel.comm.host_barrier import NO_HOST, host_identity
from engine.parallel.comm.launcher import addresses_of, interface_addresses, route_address
from engine.parallel.grid import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """Network interface of a host, with its addresses and speed."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    loopback: bool = False
    megabits: int | None = None
    """Speed in Mbit/s; None: unknown."""

    def __str__(self) -> str:
        return f"{self.name} ({self.megabits} Mbit/s)" if self.megabits else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """GPU that a rank can use: its name and its memory in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts about a host: software versions, GPUs, network interfaces, system limits."""

    name: str
    identity: str
    """Identity of the host, equal for ranks that can share memory."""
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    """Digest of the engine's sources."""
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str = ""
    """Reason why existing GPUs cannot be used."""
    interfaces: tuple[InterfaceFacts, ...] = ()
    named_addresses: tuple[str, ...] = ()
    """Addresses that the host's name resolves to."""
    route_address: str = ""
    """Local address of the route to the rendezvous."""
    gloo_wish: str = ""
    """Value of GLOO_SOCKET_IFNAME."""
    nccl_wish: str = ""
    """Value of NCCL_SOCKET_IFNAME."""
    shm_bytes: int | None = None
    """Bytes of /dev/shm; None: it is missing."""
    shm_free: int = 0
    memory_free: int | None = None
    open_files: int | None = None
    """Limit of a process's open files; None: unlimited."""
    locked_bytes: int | None = None
    """Limit of a process's locked memory in bytes; None: unlimited."""
    infiniband: bool = False

    def carrier(self) -> InterfaceFacts | None:
        """Returns the network interface that gloo uses; None if there is no such interface.

        GLOO_SOCKET_IFNAME names it; without this variable, gloo uses the interface with an address to which the host's
        name resolves, and the engine sets the variable to the interface of the route if that is the loopback interface.
        """
        if wanted := self.gloo_wish.split(",")[0]:
            return next((one for one in self.interfaces if one.name == wanted), None)
        named = next(filter(None, map(self._interface_of, self.named_addresses)), None)
        routed = self._interface_of(self.route_address)
        return routed if routed is not None and (named is None or named.loopback) else named

    def _interface_of(self, address: str) -> InterfaceFacts | None:
        for one in self.interfaces:
            if address in one.addresses or (one.loopback and address.startswith("127.")):
                return one
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Facts about a rank: its host, its device, and the reason why training would not start on it, if any."""

    rank: int
    local_rank: int
    pid: int
    device: str
    """Device, such as ``cuda:1``; empty if the rank has none."""
    problem: str
    """Reason why training would not start on this rank; empty if it would."""
    host: HostFacts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "RankFacts":
        """Converts ``facts``, a :class:`RankFacts` as a JSON object, back to a :class:`RankFacts`."""
        host = dict(facts["host"])
        host["gpus"] = tuple(GpuFacts(**gpu) for gpu in host["gpus"])
        given = ({**one, "addresses": tuple(one["addresses"])} for one in host["interfaces"])
        host["interfaces"] = tuple(InterfaceFacts(**one) for one in given)
        host["named_addresses"] = tuple(host["named_addresses"])
        return cls(**{**facts, "host": HostFacts(**host)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFigure:
    """Clock difference between a host and the host of rank 0, in seconds."""

    host: str
    seconds: float
    uncertain: float
    """Maximum error of ``seconds``: half of the shortest round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFigure:
    """Measured latency and bandwidth of communication in one group of ranks along a grid axis."""

    axis: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Names of the group's hosts; one for a group within a host."""
    over: str
    """Description of library and link."""
    latency: float
    """Seconds of a call with 8 bytes."""
    payload: int
    """Bytes of the large message."""
    rate: float
    """Bytes per second that a rank sends."""
    expected_latency: float | None = None
    expected_rate: float | None = None
    """Expected bytes per second of the link; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigure:
    """Measured message latency and bandwidth between two hosts."""

    hosts: tuple[str, str]
    latency: float
    """Latency of a message in one direction, in seconds."""
    rate: float
    """Bytes per second in one direction."""
    expected_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Result of ``trine doctor``: facts about all ranks that joined, and measurements before the first failed phase."""

    size: int
    """Number of ranks of the job."""
    facts: tuple[RankFacts, ...] = ()
    """Facts about the ranks that joined, by rank."""
    met: bool = False
    """True if rank 0 reached the rendezvous and waited for all other ranks."""
    grid: Mapping[str, int] | None = None
    """Sizes of the grid by axis noun; None: the configuration does not fit the ranks."""
    order: Order = "tp-dp-pp"
    """Order of the axes, from the fastest-varying with the rank."""
    seconds: float = 30.0
    """Timeout of every wait in seconds."""
    place: str = ""
    """Description of the rendezvous."""
    shared_bytes: int = 0
    """Bytes that each tensor rank shares with the other tensor ranks of its host."""
    ranks_of_node: int = 0
    """Number of processes per node from the launcher; 0: unknown."""
    failed: tuple[tuple[int, str], ...] = ()
    """Pairs (rank, error sentence) of failures in training's start or in a measurement."""
    silent: tuple[int, ...] = ()
    """Ranks that joined but later did not answer."""
    phase: str = ""
    """Name of the phase in which the examination failed."""
    clocks: tuple[ClockFigure, ...] = ()
    axes: tuple[AxisFigure, ...] = ()
    pairs: tuple[PairFigure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the results as a JSON object."""
        return asdict(self)


@dataclass(slots=True)
class Hosts:
    """Display names of the job's hosts, with the ranks on each; an address is appended to names that are not unique."""

    facts: tuple[RankFacts, ...]
    of_rank: dict[int, str] = field(init=False)
    ranks: dict[str, list[RankFacts]] = field(init=False)
    """Ranks by host name, ordered by first rank."""

    def __post_init__(self) -> None:
        first = {one.host.identity: one.host for one in reversed(self.facts)}
        names = [host.name for host in first.values()]
        shown = {
            key: host.name if names.count(host.name) == 1 else f"{host.name} ({host.route_address or key[:8]})"
            for key, host in first.items()
        }
        self.of_rank = {one.rank: shown[one.host.identity] for one in self.facts}
        self.ranks = {}
        for one in sorted(self.facts, key=lambda one: one.rank):
            self.ranks.setdefault(self.of_rank[one.rank], []).append(one)

    def host(self, name: str) -> HostFacts:
        """Returns the facts about the host with the display name ``name``."""
        return self.ranks[name][0].host


def host_facts(variables: Mapping[str, str], target: str) -> HostFacts:
    """Collects the facts about this host that do not need torch; :func:`with_gpus` adds the GPUs.

    ``variables``: environment variables. ``target``: address of the rendezvous.
    """
    name, identity = socket.gethostname(), host_identity()
    size, free = _shared_memory()
    return HostFacts(
        name=name,
        identity=name if identity == NO_HOST else identity.hex(),
        versions={"python": platform.python_version(), "trine": engine.__version__}
        | {package: _version(package) for package in ("torch", "triton")},
        digest=sources_digest(Path(engine.__file__).parent),
        interfaces=network_interfaces(),
        named_addresses=addresses_of(name),
        route_address=route_address(target),
        gloo_wish=variables.get("GLOO_SOCKET_IFNAME", ""),
        nccl_wish=variables.get("NCCL_SOCKET_IFNAME", ""),
        shm_bytes=size,
        shm_free=free,
        memory_free=_memory_free(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=Path("/sys/class/infiniband").exists(),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _limit(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _shared_memory() -> tuple[int | None, int]:
    try:
        file_system = os.statvfs("/dev/shm")
    except OSError:
        return None, 0
    return file_system.f_blocks * file_system.f_frsize, file_system.f_bavail * file_system.f_frsize


def _memory_free() -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def with_gpus(host: HostFacts, variables: Mapping[str, str], device: str) -> HostFacts:
    """Returns a copy of ``host``, facts about this host, with its GPUs and the NCCL version.

    If ``device`` is not empty, it also runs a small kernel on this GPU. The copy's ``gpu_problem`` describes a
    failure.
    """
    import torch

    if not torch.cuda.is_available():
        return replace(host, gpu_problem=_unavailable(variables))
    problem, gpus = "", list[GpuFacts]()
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(GpuFacts(name=properties.name, bytes=properties.total_memory))
        if device:
            torch.ones(8, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        problem = f"{device or 'a GPU'} does not compute: {first_line(error)}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return replace(host, gpus=tuple(gpus), gpu_problem=problem, versions={**host.versions, "nccl": nccl})


def _unavailable(variables: Mapping[str, str]) -> str:
    """Returns the reason why torch uses no GPU of this host; empty if there is none or the variables hide it."""
    import torch

    if variables.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "none") or not _has_gpu():
        return ""
    if torch.version.cuda is None:
        return "the installed torch is its CPU build"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch.cuda.is_available() is False"


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*"))


_FLAGS, _ETHTOOL = 0x8913, 0x8946
"""Linux ioctl requests SIOCGIFFLAGS and SIOCETHTOOL."""
_UP, _LOOPBACK = 1, 8
_SETTINGS = struct.Struct("IIIHBBBBBBIIHBBI8x")
"""``struct ethtool_cmd``: the first number is the command, 1 to read; speed is in two halves."""
_UNKNOWN = 0xFFFFFFFF


def network_interfaces() -> tuple[InterfaceFacts, ...]:
    """Returns all network interfaces of this host, with addresses and speeds where known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return tuple(_interface(asking, name) for _, name in socket.if_nameindex())


def _interface(asking: socket.socket, name: str) -> InterfaceFacts:
    request = struct.pack("16s24x", name.encode())
    flags = 0
    with suppress(OSError):  # the interface has gone
        (flags,) = struct.unpack_from("H", ioctl(asking, _FLAGS, request), 16)
    return InterfaceFacts(
        name=name,
        addresses=interface_addresses(name),
        up=bool(flags & _UP),
        loopback=bool(flags & _LOOPBACK),
        megabits=_megabits(asking, name),
    )


def _megabits(asking: socket.socket, name: str) -> int | None:
    answer = array.array("B", _SETTINGS.pack(1, *[0] * 15))
    try:
        ioctl(asking, _ETHTOOL, struct.pack("16sP16x", name.encode(), answer.buffer_info()[0]))
    except OSError:
        return None
    settings = _SETTINGS.unpack(answer)
    speed = int(settings[3]) | int(settings[12]) << 16
    return speed if 0 < speed < _UNKNOWN else None
