"""Result of a doctor as plain data, to and from JSON: facts of every rank, and measurements between ranks.

Facts of this rank and its host are collected here. Only ``with_gpus`` needs torch.
"""

import array
import os
import platform
import resource
import socket
import struct
from collections.abc import Iterator, Mapping
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
from engine.parallel.comm.launcher import route_address
from engine.parallel.grid import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """Network interface of a host."""

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
    """GPU that is visible to a rank."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Host, from the view of one of its ranks."""

    name: str
    identity: str
    """Equal for ranks that can share memory."""
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
    """Address from which it reaches the rendezvous of the job."""
    gloo_wish: str = ""
    """GLOO_SOCKET_IFNAME."""
    nccl_wish: str = ""
    """NCCL_SOCKET_IFNAME."""
    shm_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""
    shm_free: int = 0
    memory_free: int | None = None
    open_files: int | None = None
    """Limit of open files of a process; None: no limit."""
    locked_bytes: int | None = None
    """Limit of locked memory of a process; None: no limit."""
    infiniband: bool = False

    def carrier(self) -> InterfaceFacts | None:
        """Returns gloo's interface: the configured one, or the one with an address of the host's name."""
        if wanted := self.gloo_wish.split(",")[0]:
            return next((one for one in self.interfaces if one.name == wanted), None)
        for address in self.named_addresses:
            for one in self.interfaces:
                if address in one.addresses or (one.loopback and address.startswith("127.")):
                    return one
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Rank, and its host."""

    rank: int
    local_rank: int
    pid: int
    device: str
    """Device, such as ``cuda:1``; empty if the rank has none."""
    problem: str
    """Sentence with the reason why training would not start here; empty if it would."""
    host: HostFacts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "RankFacts":
        """Builds the facts from the result of ``asdict``."""
        host = dict(facts["host"])
        host["gpus"] = tuple(GpuFacts(**gpu) for gpu in host["gpus"])
        given = ({**one, "addresses": tuple(one["addresses"])} for one in host["interfaces"])
        host["interfaces"] = tuple(InterfaceFacts(**one) for one in given)
        host["named_addresses"] = tuple(host["named_addresses"])
        return cls(**{**facts, "host": HostFacts(**host)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFigure:
    """Difference between the clock of a host and the clock of rank 0."""

    host: str
    seconds: float
    uncertain: float
    """Half of the shortest round trip: the largest error of ``seconds``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFigure:
    """Measurement of one group of an axis, while all groups of the axis did the same."""

    axis: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Hosts of the group; one if the group is within a host."""
    over: str
    """Library and link, in words."""
    latency: float
    """Seconds of a call with 8 bytes."""
    payload: int
    """Bytes of the large call."""
    rate: float
    """Bytes that a rank sends per second."""
    expected_latency: float | None = None
    expected_rate: float | None = None
    """Rate that the link should reach; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigure:
    """Measurement of messages in both directions between two hosts."""

    hosts: tuple[str, str]
    latency: float
    """Seconds in one direction."""
    rate: float
    """Bytes per second in one direction."""
    expected_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """All results until the end or until the first failure."""

    size: int
    """Number of ranks of the job."""
    facts: tuple[RankFacts, ...] = ()
    """Facts of the ranks that joined, by rank."""
    met: bool = False
    """True if rank 0 reached the rendezvous and waited for the others."""
    grid: Mapping[str, int] | None = None
    """Sizes (pipeline, data, tensor); None: the configuration does not fit."""
    order: Order = "tp-dp-pp"
    """Order of the axes, from the innermost."""
    seconds: float = 30.0
    """Time limit of an answer."""
    place: str = ""
    """Rendezvous, in words."""
    shared_bytes: int = 0
    """Bytes that each tensor rank shares with the other tensor ranks of its host."""
    ranks_of_node: int = 0
    """Processes that the launcher starts on each node; 0: unknown."""
    failed: tuple[tuple[int, str], ...] = ()
    """(rank, sentence) for each failure of training's own start or of a measurement."""
    silent: tuple[int, ...] = ()
    """Ranks that joined and later did not answer."""
    phase: str = ""
    """Phase of all ranks at the failure."""
    clocks: tuple[ClockFigure, ...] = ()
    axes: tuple[AxisFigure, ...] = ()
    pairs: tuple[PairFigure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


@dataclass(slots=True)
class Hosts:
    """Names of hosts, and the ranks on each; hosts with equal names get their addresses appended."""

    facts: tuple[RankFacts, ...]
    of_rank: dict[int, str] = field(init=False)
    ranks: dict[str, list[RankFacts]] = field(init=False)
    """Ranks by name of the host, in the order of the first rank."""

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
        """Returns the facts of a host, from the view of its first rank."""
        return self.ranks[name][0].host


def host_facts(variables: Mapping[str, str], target: str) -> HostFacts:
    """Collects the facts that need no torch; ``target`` is the address of the rendezvous."""
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
    """Returns the facts with GPUs and NCCL, which torch reports; ``device``, this rank's, is tested."""
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


_FLAGS, _ADDRESS, _ETHTOOL = 0x8913, 0x8915, 0x8946
"""Requests SIOCGIFFLAGS, SIOCGIFADDR and SIOCETHTOOL of Linux."""
_UP, _LOOPBACK = 1, 8
_SETTINGS = struct.Struct("IIIHBBBBBBIIHBBI8x")
"""``struct ethtool_cmd``: the first number is the command, 1 to read; speed is in two halves."""
_UNKNOWN = 0xFFFFFFFF


def network_interfaces() -> tuple[InterfaceFacts, ...]:
    """Returns all interfaces, with the addresses and speeds that are known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return tuple(_interface(asking, name) for _, name in socket.if_nameindex())


def _interface(asking: socket.socket, name: str) -> InterfaceFacts:
    request = struct.pack("16s24x", name.encode())
    flags, addresses = 0, list[str]()
    with suppress(OSError):  # the interface has gone
        (flags,) = struct.unpack_from("H", ioctl(asking, _FLAGS, request), 16)
    with suppress(OSError):  # the interface has no address
        addresses.append(socket.inet_ntoa(ioctl(asking, _ADDRESS, request)[20:24]))
    return InterfaceFacts(
        name=name,
        addresses=(*addresses, *_addresses_6(name)),
        up=bool(flags & _UP),
        loopback=bool(flags & _LOOPBACK),
        megabits=_megabits(asking, name),
    )


def _addresses_6(name: str) -> Iterator[str]:
    with suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, device = line.split()
            if device == name:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _megabits(asking: socket.socket, name: str) -> int | None:
    answer = array.array("B", _SETTINGS.pack(1, *[0] * 15))
    try:
        ioctl(asking, _ETHTOOL, struct.pack("16sP16x", name.encode(), answer.buffer_info()[0]))
    except OSError:
        return None
    settings = _SETTINGS.unpack(answer)
    speed = int(settings[3]) | int(settings[12]) << 16
    return speed if 0 < speed < _UNKNOWN else None


def addresses_of(name: str) -> tuple[str, ...]:
    """Returns the addresses of a host's name; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(place[0]) for *_, place in found))
