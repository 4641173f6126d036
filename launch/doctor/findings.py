"""Turns doctor results into findings: reasons that training would not start, and causes of slow links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from engine.launch.doctor.examined import AxisFigure, Examined, HostFacts, Hosts, PairFigure, RankFacts
from engine.parallel.comm.flight.layout import FILE_BYTES
from engine.parallel.comm.rendezvous import name_ranks
from engine.parallel.comm.traffic import megabytes

SKEW_SECONDS = 1.0
_SMALL_SHM = 64 << 20
"""Docker's default size of /dev/shm."""
_FILES = 128
"""Open files of a rank, without its connections to other ranks."""
_GROUPS = 4
"""Groups of a rank with separate connections: world, axes, messages between hosts."""
_LOCKED = 64 << 20
_MOST_SENTENCES = 4
"""Maximal sentences about failed starts: usually one rank is the cause, and the others have waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """Error or warning about the hosts of a job; with an error, training would not start."""

    severity: Literal["error", "warning"]
    """Severity; "error": training would not start."""
    kind: str
    """Topic of the finding in a word."""
    sentence: str


def find_all(seen: Examined) -> list[HostFinding]:
    """Returns errors and warnings about ``seen``, the result of ``trine doctor``; errors come first."""
    hosts = Hosts(seen.facts)
    found = [
        *_answers(seen, hosts),
        *_starts(seen, hosts),
        *_versions(seen.facts, hosts),
        *_devices(seen.facts, hosts),
        *(finding for name in hosts.ranks for finding in _network(name, hosts)),
        *(finding for name in hosts.ranks for finding in _limits(name, hosts, seen)),
        *_alike(hosts),
        *_clocks(seen),
        *(_warning(kind, sentence) for kind, sentence in link_findings(seen, hosts)),
    ]
    return sorted(found, key=lambda finding: finding.severity != "error")


def _error(kind: str, sentence: str) -> HostFinding:
    return HostFinding(severity="error", kind=kind, sentence=sentence)


def _warning(kind: str, sentence: str) -> HostFinding:
    return HostFinding(severity="warning", kind=kind, sentence=sentence)


def _answers(seen: Examined, hosts: Hosts) -> Iterator[HostFinding]:
    """Yields ranks that did not join, and ranks that joined and stopped answering."""
    came = {one.rank for one in seen.facts}
    if seen.met and (absent := [rank for rank in range(seen.size) if rank not in came]):
        yield _error(
            "absent",
            f"{name_ranks(absent)} of {seen.size} did not join at {seen.place} within {seen.seconds:g} s"
            f"{_node(absent, seen)}; check their output, and start them with the same command and address"
            f"{_reachable(seen, hosts)}.",
        )
    for name in dict.fromkeys(hosts.of_rank[rank] for rank in seen.silent):
        ranks = [rank for rank in seen.silent if hosts.of_rank[rank] == name]
        whole = len(ranks) == len(hosts.ranks[name])
        who = f"{name} ({name_ranks(ranks)})" if whole else f"{name_ranks(ranks)} on {name}"
        yield _error(
            "silent",
            f"{who} joined but did not answer within {seen.seconds:g} s in: {seen.phase}; the host or its network is "
            "down, or the process hangs.",
        )


def _node(absent: Sequence[int], seen: Examined) -> str:
    """Names the nodes of torchrun that would start them."""
    if not seen.ranks_of_node:
        return ""
    nodes = sorted({rank // seen.ranks_of_node for rank in absent})
    return f", of node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))} counted from 0"


def _reachable(seen: Examined, hosts: Hosts) -> str:
    """Returns the remedy if the ranks meet at an address of rank 0's node alone."""
    host = hosts.host(hosts.of_rank[0]) if 0 in hosts.of_rank else None
    loopback = host is not None and host.route_address.startswith(("127.", "::1"))
    if not loopback or not 0 < seen.ranks_of_node < seen.size:
        return ""
    return (
        f"; {seen.place} is a loopback address, which other nodes do not reach: start torchrun on each node with "
        "--local-addr=ADDRESS, an address of it that the others reach"
    )


def _starts(seen: Examined, hosts: Hosts) -> Iterator[HostFinding]:
    """Yields the errors of training's own start, each sentence once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, sentence in (*((one.rank, one.problem) for one in seen.facts), *seen.failed):
        if sentence and rank not in ranks_of.get(sentence, ()):
            ranks_of.setdefault(sentence, []).append(rank)
    for sentence, ranks in list(ranks_of.items())[:_MOST_SENTENCES]:
        if len(ranks) == seen.size:
            yield _error("start", sentence)
        else:
            names = ", ".join(dict.fromkeys(hosts.of_rank[rank] for rank in ranks if rank in hosts.of_rank))
            yield _error("start", f"{name_ranks(ranks)}{f' ({names})' * bool(names)}: {sentence}")
    if more := sorted({rank for ranks in list(ranks_of.values())[_MOST_SENTENCES:] for rank in ranks}):
        yield _error("start", f"{name_ranks(more)} could not start either; --json writes their errors.")


def _versions(facts: Sequence[RankFacts], hosts: Hosts) -> Iterator[HostFinding]:
    gpu = any(one.device.startswith("cuda") for one in facts)
    for package in dict.fromkeys(package for one in facts for package in one.host.versions):
        by_rank = {one.rank: one.host.versions.get(package, "not installed") for one in facts}
        if len(set(by_rank.values())) > 1:
            refused = package in ("torch", "trine") or (package == "nccl" and gpu)
            if package == "python":
                refused = len({text.rpartition(".")[0] for text in by_rank.values()}) > 1
            words = f"{package} is {_by_host(by_rank, hosts)}; install the same on every host."
            yield (_error if refused else _warning)("versions", words)
    digests = {one.rank: one.host.digest for one in facts}
    if len(set(digests.values())) > 1:
        yield _warning(
            "sources",
            f"the sources of the engine have digest {_by_host(digests, hosts)}; install the same on every host.",
        )


def _by_host(values: dict[int, str], hosts: Hosts) -> str:
    """Groups hosts by value: ``1.0 on node0, node1 and 1.1 on node2``."""
    found: dict[str, dict[str, None]] = {}
    for rank, value in values.items():
        found.setdefault(value, {})[hosts.of_rank[rank]] = None
    return " and ".join(f"{value} on {_names(list(names))}" for value, names in found.items())


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)


def _devices(facts: Sequence[RankFacts], hosts: Hosts) -> Iterator[HostFinding]:
    for name, ranks in hosts.ranks.items():
        for problem in dict.fromkeys(one.host.gpu_problem for one in ranks):
            if problem:
                yield _error(
                    "gpu",
                    f"{name} has GPUs that torch cannot use ({problem}); repair the driver or install torch for its "
                    "CUDA, or set CUDA_VISIBLE_DEVICES='' on all hosts to train on CPUs.",
                )
    kinds = {one.rank: one.device.partition(":")[0] for one in facts if one.device}
    if len(set(kinds.values())) > 1:
        yield _error("device", f"ranks compute on {_by_host(kinds, hosts)}; all need the same kind of device.")
    models = {
        one.rank: ", ".join(dict.fromkeys(gpu.name for gpu in one.host.gpus)) for one in facts if one.host.gpus
    }  # fmt: skip
    if len(set(models.values())) > 1 or any(", " in model for model in models.values()):
        yield _warning("gpu", f"GPUs are {_by_host(models, hosts)}; every step waits for the slowest.")
    counts = {ranks[0].rank: str(len(ranks[0].host.gpus)) for ranks in hosts.ranks.values()}
    if len(set(counts.values())) > 1:
        yield _warning("gpu", f"the number of GPUs is {_by_host(counts, hosts)}; the grid assigns ranks in order.")


def _network(name: str, hosts: Hosts) -> Iterator[HostFinding]:
    """Yields problems if gloo or NCCL finds no interface of the host that other hosts reach."""
    host, several = hosts.host(name), len(hosts.ranks) > 1
    there = ", ".join(one.name for one in host.interfaces)
    carrier = host.carrier()
    if host.gloo_wish and carrier is None:
        yield _error(
            "interface",
            f"GLOO_SOCKET_IFNAME={host.gloo_wish} on {name} matches no interface; set it to one of {there}.",
        )
    elif carrier is not None and not carrier.up:
        yield _error("interface", f"{carrier.name} of {name}, over which gloo would send, is down; bring it up.")
    elif several and carrier is not None and carrier.loopback and not host.gloo_wish:
        yield _warning(
            "interface",
            f"the name of {name} resolves to {host.named_addresses[0]}, which other hosts cannot reach; put its "
            f"address into /etc/hosts, or start torchrun there with --local-addr=ADDRESS and set GLOO_SOCKET_IFNAME to "
            f"one of {there}.",
        )
    elif several and carrier is None:
        yield _warning(
            "interface",
            f"the name of {name} resolves to no address of its interfaces ({there}); put its address into /etc/hosts, "
            "or set GLOO_SOCKET_IFNAME.",
        )
    if hosts.ranks[name][0].device.startswith("cuda") and not _nccl_finds(host):
        yield _error(
            "interface",
            f"NCCL_SOCKET_IFNAME={host.nccl_wish} on {name} allows no interface; set it to one of {there}.",
        )


def _nccl_finds(host: HostFacts) -> bool:
    """Returns True if NCCL finds an interface, by its rules: prefixes, full names after ``=``, exclusions after
    ``^``."""
    wish = host.nccl_wish
    wanted = wish.lstrip("^=").split(",")
    whole, avoid = "=" in wish[:2], wish.startswith("^")
    hits = [any(one.name == word if whole else one.name.startswith(word) for word in wanted) for one in host.interfaces]
    return not wish or any(hit != avoid for hit in hits)


def _limits(name: str, hosts: Hosts, seen: Examined) -> Iterator[HostFinding]:
    host, ranks = hosts.host(name), hosts.ranks[name]
    flight, shared = FILE_BYTES * len(ranks), seen.shared_bytes * len(ranks)
    if host.shm_bytes is None or host.shm_free < flight:
        state = "is absent" if host.shm_bytes is None else f"has {megabytes(host.shm_free)} free"
        yield _warning(
            "shm",
            f"/dev/shm of {name} {state}, but the watchdog of {len(ranks)} ranks needs {megabytes(flight)} there; "
            "make it larger (docker run --shm-size=8g).",
        )
    elif host.shm_bytes <= _SMALL_SHM:
        yield _warning(
            "shm",
            f"/dev/shm of {name} has {megabytes(host.shm_bytes)} in all, too little for NCCL and for workers of a "
            "DataLoader; make it larger (docker run --shm-size=8g).",
        )
    if host.memory_free is not None and host.memory_free < shared:
        yield _error(
            "memory",
            f"{name} has {megabytes(host.memory_free)} of free memory, but its tensor ranks share {megabytes(shared)}; "
            "end other processes, or set TRINE_SHARED_MEMORY=0.",
        )
    needed = _FILES + _GROUPS * seen.size
    if host.open_files is not None and host.open_files < needed:
        yield _warning(
            "files",
            f"a process on {name} may open {host.open_files} files, but a rank of {seen.size} needs about {needed}; "
            "raise the limit (ulimit -n).",
        )
    if host.infiniband and host.gpus and host.locked_bytes is not None and host.locked_bytes < _LOCKED:
        yield _warning(
            "locked",
            f"a process on {name} may lock {megabytes(host.locked_bytes)} of memory, but InfiniBand needs more; raise "
            "the limit (ulimit -l unlimited).",
        )


def _alike(hosts: Hosts) -> Iterator[HostFinding]:
    names = [hosts.host(name).name for name in hosts.ranks]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield _warning(
            "name",
            f"{names.count(name)} hosts have the name {name}, so that reports cannot distinguish them; rename them.",
        )


def _clocks(seen: Examined) -> Iterator[HostFinding]:
    for clock in seen.clocks:
        if abs(clock.seconds) - clock.uncertain > SKEW_SECONDS:
            way = "ahead of" if clock.seconds > 0 else "behind"
            yield _warning(
                "clock",
                f"the clock of {clock.host} is {abs(clock.seconds):.1f} s {way} that of rank 0, but the watchdog "
                "merges reports by clocks; let NTP set it.",
            )


_SLOW = 0.5
"""Slow is below this fraction of the interface's speed, or of the median of the other pairs."""
_ROUGH = 0.1
"""Slow within a host is below this fraction of the expected rate, which is a rough figure."""


def link_findings(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, str]]:
    """Yields (topic in a word, sentence) for each problem with the links between ranks."""
    yield from _wide_tensor(seen, hosts)
    yield from _slow_axes(seen)
    yield from _slowest_pair(seen.pairs)


def in_megabytes(rate: float) -> str:
    """Formats a rate in bytes per second as MB/s, or GB/s from 10 GB/s on."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e10 else f"{rate / 1e6:.{0 if rate >= 1e7 else 1}f} MB/s"


def _wide_tensor(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, str]]:
    wide = [figure for figure in seen.axes if figure.axis == "tp" and len(figure.hosts) > 1]
    if wide:
        most = min(len(ranks) for ranks in hosts.ranks.values())
        yield (
            "axis",
            f"tensor {name_ranks(wide[0].ranks)} are on several hosts ({', '.join(wide[0].hosts)}), so that tensor "
            f"parallelism waits for the network in every layer; set parallel.tensor to a divisor of {most}, the number "
            "of ranks of a host.",
        )


def _slow_axes(seen: Examined) -> Iterator[tuple[str, str]]:
    """Yields the slowest group of each axis, if it is slow."""
    for axis in dict.fromkeys(figure.axis for figure in seen.axes):
        slowest = min((figure for figure in seen.axes if figure.axis == axis), key=_share)
        if slowest.expected_rate and _share(slowest) < (_SLOW if len(slowest.hosts) > 1 else _ROUGH):
            yield (
                "axis",
                f"{axis} over {name_ranks(slowest.ranks)} sends {in_megabytes(slowest.rate)} of the "
                f"{in_megabytes(slowest.expected_rate)} that {slowest.over} should carry; look for other traffic, a "
                "slower link between, or busy processors.",
            )


def _share(figure: AxisFigure) -> float:
    return figure.rate / figure.expected_rate if figure.expected_rate else float("inf")


def _slowest_pair(pairs: tuple[PairFigure, ...]) -> Iterator[tuple[str, str]]:
    """Compares the slowest pair with the other pairs, or with the speed of the interface if it is the only one."""
    if not pairs:
        return
    slowest = min(pairs, key=lambda pair: pair.rate)
    others = [pair.rate for pair in pairs if pair is not slowest]
    usual = median(others) if others else slowest.expected_rate
    if usual is None or slowest.rate >= _SLOW * usual:
        return
    first, second = slowest.hosts
    if not others:
        rates = f"{in_megabytes(slowest.rate)} of the {in_megabytes(usual)} that their interfaces should carry"
        yield "pair", f"{first} and {second} send each other {rates}; check the link between them."
        return
    yield (
        "pair",
        f"{first} - {second} is the slowest pair of hosts: {in_megabytes(slowest.rate)}, and the median of the other "
        f"pairs is {in_megabytes(usual)}{_common(slowest, pairs)}.",
    )


def _common(slowest: PairFigure, pairs: tuple[PairFigure, ...]) -> str:
    """Names the host of the slowest pair if all of its other pairs are slow too; usually its link is the cause."""
    fastest = max(pair.rate for pair in pairs)
    for host in slowest.hosts:
        own = [pair.rate for pair in pairs if host in pair.hosts]
        if len(pairs) > len(own) > 1 and max(own) < _SLOW * fastest:
            return f"; all pairs with {host} are slow (at most {in_megabytes(max(own))}), so check its link"
    return ""
