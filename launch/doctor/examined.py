"""What a doctor has seen: facts of every rank, and what was measured between them. Plain data, as JSON and back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.parallel.grid import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """A network interface of a host."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    loopback: bool = False
    megabits: int | None = None
    """Its speed in Mbit/s; None: it does not tell."""

    def __str__(self) -> str:
        return f"{self.name} ({self.megabits} Mbit/s)" if self.megabits else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """A GPU that a rank sees."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host, as one of its ranks sees it."""

    name: str
    identity: str
    """Equal for ranks that can share memory."""
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    """Of the sources of the engine."""
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str = ""
    """Why GPUs that are there cannot be used."""
    interfaces: tuple[InterfaceFacts, ...] = ()
    named_addresses: tuple[str, ...] = ()
    """What the host's name resolves to."""
    route_address: str = ""
    """Address from which it reaches the meeting point of the job."""
    gloo_wish: str = ""
    """GLOO_SOCKET_IFNAME."""
    nccl_wish: str = ""
    """NCCL_SOCKET_IFNAME."""
    shm_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""
    shm_free: int = 0
    memory_free: int | None = None
    open_files: int | None = None
    """Most files that a process may open; None: any number."""
    locked_bytes: int | None = None
    """Most memory that a process may lock; None: any amount."""
    infiniband: bool = False

    def carrier(self) -> InterfaceFacts | None:
        """The interface over which gloo sends: the one it is told to use, or that with an address of the host's
        name."""
        if wanted := self.gloo_wish.split(",")[0]:
            return next((one for one in self.interfaces if one.name == wanted), None)
        for address in self.named_addresses:
            for one in self.interfaces:
                if address in one.addresses or (one.loopback and address.startswith("127.")):
                    return one
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """A rank, and its host."""

    rank: int
    local_rank: int
    pid: int
    device: str
    """Such as ``cuda:1``; empty if the rank has none."""
    problem: str
    """Why training would not start here, in a sentence; empty if it would."""
    host: HostFacts

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "RankFacts":
        """The inverse of ``asdict``."""
        host = dict(told["host"])
        host["gpus"] = tuple(GpuFacts(**gpu) for gpu in host["gpus"])
        given = ({**one, "addresses": tuple(one["addresses"])} for one in host["interfaces"])
        host["interfaces"] = tuple(InterfaceFacts(**one) for one in given)
        host["named_addresses"] = tuple(host["named_addresses"])
        return cls(**{**told, "host": HostFacts(**host)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFigure:
    """How far the clock of a host is ahead of that of rank 0."""

    host: str
    seconds: float
    uncertain: float
    """Half of the shortest round trip: the largest error of ``seconds``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFigure:
    """What one group of an axis of the grid has measured while all groups of the axis did the same."""

    axis: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """One: the axis stays on a host."""
    over: str
    """What carries it."""
    latency: float
    """Seconds of a call with 8 bytes."""
    payload: int
    """Bytes of the large call."""
    rate: float
    """Bytes that a rank sends in a second."""
    expected_latency: float | None = None
    expected_rate: float | None = None
    """Known of the link; None: nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigure:
    """Messages to and fro between two hosts."""

    hosts: tuple[str, str]
    latency: float
    """Seconds in one direction."""
    rate: float
    """Bytes a second in one direction."""
    expected_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Everything that was seen until the end or until something failed."""

    size: int
    """Ranks of the job."""
    facts: tuple[RankFacts, ...] = ()
    """Of the ranks that have come, by rank."""
    met: bool = False
    """Whether rank 0 was where the ranks meet, and has waited for the others."""
    grid: Mapping[str, int] | None = None
    """Sizes (pipeline, data, tensor); None: the configuration does not fit."""
    order: Order = "tp-dp-pp"
    """Which ranks are neighbours."""
    seconds: float = 30.0
    """Time that ranks were given to answer."""
    place: str = ""
    """Where they meet, in words."""
    shared_bytes: int = 0
    """Memory that each tensor rank shares with those of its host."""
    ranks_of_node: int = 0
    """Processes that the launcher starts on each node; 0: it does not tell."""
    failed: tuple[tuple[int, str], ...] = ()
    """(rank, its sentence) where training's own start or a measurement has failed."""
    silent: tuple[int, ...] = ()
    """Ranks that have come and later gave no answer."""
    phase: str = ""
    """What all ranks were in when something failed."""
    clocks: tuple[ClockFigure, ...] = ()
    axes: tuple[AxisFigure, ...] = ()
    pairs: tuple[PairFigure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(slots=True)
class Hosts:
    """Names of hosts, and which ranks run where; hosts that are called alike get their addresses beside their names."""

    facts: tuple[RankFacts, ...]
    of_rank: dict[int, str] = field(init=False)
    ranks: dict[str, list[RankFacts]] = field(init=False)
    """By name, in the order of the first rank."""

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
        """The facts of a host, as its first rank sees it."""
        return self.ranks[name][0].host
