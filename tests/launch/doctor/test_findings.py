"""Every finding, each from the one thing that is wrong, and none where nothing is."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from engine.launch.doctor.doctor_command import report_lines, verdict_line
from engine.launch.doctor.examined import (
    AxisFigure,
    ClockFigure,
    Examined,
    GpuFacts,
    Hosts,
    InterfaceFacts,
    PairFigure,
    RankFacts,
)
from engine.launch.doctor.findings import find_all
from tests.launch.doctor.seen import GPU, VERSIONS, examined, host, ranks


def axis(**changes: Any) -> AxisFigure:
    fine = AxisFigure(
        axis="dp",
        ranks=(0, 1, 2, 3),
        hosts=("node0", "node1"),
        over="gloo over eth0 (10000 Mbit/s)",
        latency=2e-4,
        payload=1 << 23,
        rate=1e9,
        expected_latency=2e-4,
        expected_rate=1.25e9,
    )
    return replace(fine, **changes)


def pairs(*rates: float, expected: float | None = None) -> tuple[PairFigure, ...]:
    """(0, 1), (0, 2), (1, 2) of three hosts, or (0, 1) of two."""
    names = [("node0", "node1"), ("node0", "node2"), ("node1", "node2")]
    return tuple(
        PairFigure(hosts=pair, latency=1e-4, rate=rate, expected_rate=expected)
        for pair, rate in zip(names, rates, strict=False)
    )


def spoilt(rank: int, seen: Examined, **changes: Any) -> Examined:
    facts = [replace(one, **changes) if one.rank == rank else one for one in seen.facts]
    return replace(seen, facts=tuple(facts))


GPUS: dict[str, Any] = {"device": "cuda:0", "each": 1}
ETHERNET_DOWN = InterfaceFacts(name="eth0", addresses=("10.0.0.1",), up=False)
ERRORS: dict[str, tuple[Examined, str]] = {
    "absent": (
        examined(size=6),
        "ranks 4, 5 of 6 did not join at node0:29400 within 30 s, of node 2 counted from 0; check their output",
    ),
    "absent-unknown-node": (examined(size=5, ranks_of_node=0), "rank 4 of 5 did not join at node0:29400 within 30 s; "),
    "absent-loopback": (
        examined(host(0, route_address="127.0.0.1"), host(1), size=6, place="localhost:29400"),
        "check their output, and start them with the same command and address; localhost:29400 is a loopback address, "
        "which other nodes do not reach: start torchrun on each node with --local-addr=ADDRESS",
    ),
    "silent": (
        examined(silent=(2, 3), phase="measuring the axes"),
        "node1 (ranks 2, 3) joined but did not answer within 30 s in: measuring the axes; the host or its network",
    ),
    "silent-rank": (examined(silent=(3,), phase="x"), "rank 3 on node1 joined but did not answer within 30 s in: x; "),
    "start": (spoilt(3, examined(), problem="local rank 1 has no GPU."), "rank 3 (node1): local rank 1 has no GPU."),
    "start-all": (examined(failed=tuple((rank, "parallel: wrong.") for rank in range(4))), "parallel: wrong."),
    "torch": (
        examined(host(0), host(1), host(2, versions=VERSIONS | {"torch": "2.12.0"})),
        "torch is 2.13.0 on node0, node1 and 2.12.0 on node2; install the same on every host.",
    ),
    "trine": (examined(host(0), host(1, versions=VERSIONS | {"trine": "0.0.9"})), "0.0.9 on node1"),
    "python": (examined(host(0), host(1, versions=VERSIONS | {"python": "3.12.1"})), "3.12.1 on node1"),
    "nccl": (
        examined(*(host(i, gpus=(GPU,), versions=VERSIONS | {"nccl": f"2.2{i}"}) for i in (0, 1)), **GPUS),
        "nccl is 2.20 on node0 and 2.21 on node1",
    ),
    "gpu": (examined(host(0, gpu_problem="no driver"), host(1)), "node0 has GPUs that torch cannot use (no driver); "),
    "device": (spoilt(3, examined(), device="cuda:1"), "ranks compute on cpu on node0, node1 and cuda on node1; "),
    "gloo": (
        examined(host(0, gloo_wish="ib9"), host(1)),
        "GLOO_SOCKET_IFNAME=ib9 on node0 matches no interface; set it to one of lo, eth0.",
    ),
    "down": (examined(host(0, interfaces=(ETHERNET_DOWN,)), host(1)), "eth0 of node0, over which gloo would send, is "),
    "nccl-interface": (
        examined(host(0, gpus=(GPU,), nccl_wish="=eth"), host(1, gpus=(GPU,)), **GPUS),
        "NCCL_SOCKET_IFNAME==eth on node0 allows no interface; set it to one of lo, eth0",
    ),
    "memory": (
        examined(host(0, memory_free=1 << 20), host(1), grid={"pp": 1, "dp": 2, "tp": 2}, shared_bytes=1 << 20),
        "node0 has 1.0 MiB of free memory, but its tensor ranks share 2.0 MiB; ",
    ),
}
WARNINGS: dict[str, tuple[Examined, str]] = {
    "triton": (examined(host(0), host(1, versions=VERSIONS | {"triton": "3.6.0"})), "triton is 3.7.1 on node0 and "),
    "patch": (examined(host(0), host(1, versions=VERSIONS | {"python": "3.11.8"})), "python is 3.11.7 on node0 and "),
    "nccl-unused": (examined(host(0), host(1, versions=VERSIONS | {"nccl": "2.27"})), "nccl is not installed on node0"),
    "sources": (
        examined(host(0), host(1, digest="aaaaaaaaaaaa")),
        "the sources of the engine have digest 0123456789ab on node0 and aaaaaaaaaaaa on node1; install the same",
    ),
    "models": (
        examined(host(0, gpus=(GPU,)), host(1, gpus=(GpuFacts(name="A100", bytes=1),)), **GPUS),
        "GPUs are H100 on node0 and A100 on node1; every step waits for the slowest.",
    ),
    "mixed": (
        examined(host(0, gpus=(GPU, GpuFacts(name="A100", bytes=1))), **GPUS),
        "GPUs are H100, A100 on node0; every step waits for the slowest.",
    ),
    "counts": (examined(host(0, gpus=(GPU, GPU)), host(1, gpus=(GPU,)), **GPUS), "is 2 on node0 and 1 on node1; "),
    "loopback": (
        examined(host(0), host(1, named_addresses=("127.0.1.1",), route_address="")),
        "the name of node1 resolves to 127.0.1.1, which other hosts cannot reach; put its address into /etc/hosts, or "
        "start torchrun there with --local-addr=ADDRESS and set GLOO_SOCKET_IFNAME to one of lo, eth0.",
    ),
    "unresolved": (
        examined(host(0), host(1, named_addresses=(), route_address="")),
        "the name of node1 resolves to no address of its",
    ),
    "shm-absent": (examined(host(0), host(1, shm_bytes=None)), "/dev/shm of node1 is absent, but the watchdog of 2 "),
    "shm-full": (examined(host(0), host(1, shm_free=1000)), "/dev/shm of node1 has 1000 B free, but the watchdog"),
    "shm-small": (examined(host(0), host(1, shm_bytes=64 << 20)), "/dev/shm of node1 has 64.0 MiB in all, too little"),
    "files": (examined(host(0), host(1, open_files=100)), "a process on node1 may open 100 files, but a rank of 4 "),
    "locked": (
        examined(host(0, gpus=(GPU,), infiniband=True, locked_bytes=65536), **GPUS),
        "a process on node0 may lock 64.0 KiB of memory, but InfiniBand needs more",
    ),
    "name": (examined(host(0), host(1, name="node0")), "2 hosts have the name node0, so that reports cannot dis"),
    "clock": (
        examined(clocks=(ClockFigure(host="node1", seconds=-2.5, uncertain=1e-4),)),
        "the clock of node1 is 2.5 s behind that of rank 0",
    ),
    "wide-tensor": (
        examined(axes=(axis(axis="tp", ranks=(0, 1, 2, 3)),), grid={"pp": 1, "dp": 1, "tp": 4}),
        "tensor ranks 0, 1, 2, 3 are on several hosts (node0, node1), so that tensor parallelism waits for the network "
        "in every layer; set parallel.tensor to a divisor of 2",
    ),
    "slow-axis": (
        examined(axes=(axis(rate=6e8),)),
        "dp over ranks 0, 1, 2, 3 sends 600 MB/s of the 1250 MB/s that gloo over eth0 (10000 Mbit/s) should carry; ",
    ),
    "slow-axis-of-a-host": (
        examined(axes=(axis(rate=9e7, hosts=("node0",), over="shared memory", expected_rate=1e9),)),
        "dp over ranks 0, 1, 2, 3 sends 90 MB/s of the 1000 MB/s that shared memory should carry; ",
    ),
    "pair-of-two": (
        examined(pairs=pairs(1e8, expected=1.25e9)),
        "node0 and node1 send each other 100 MB/s of the 1250 MB/s that their interfaces should carry; check",
    ),
    "pair": (
        examined(pairs=pairs(1e9, 1e8, 1e9)),
        "node0 - node2 is the slowest pair of hosts: 100 MB/s, and the median of the other pairs is 1000 MB/s.",
    ),
    "host-of-pairs": (
        examined(pairs=pairs(1e9, 1.5e8, 1e8)),
        "node1 - node2 is the slowest pair of hosts: 100 MB/s, and the median of the other pairs is 575 MB/s; all "
        "pairs with node2 are slow (at most 150 MB/s), so check its link.",
    ),
}
FINE: dict[str, Examined] = {
    "two hosts": examined(),
    "one rank": examined(host(0), each=1),
    "a name that nobody resolves, on one host": examined(host(0, named_addresses=())),
    "the loopback, where it is asked for": examined(host(0, gloo_wish="lo"), host(1)),
    "NCCL avoids one": examined(host(0, gpus=(GPU,), nccl_wish="^lo,docker"), host(1, gpus=(GPU,)), **GPUS),
    "NCCL takes a beginning": examined(host(0, gpus=(GPU,), nccl_wish="et"), host(1, gpus=(GPU,)), **GPUS),
    "a clock that may be right": examined(clocks=(ClockFigure(host="node1", seconds=1.5, uncertain=0.6),)),
    "half of the expected": examined(axes=(axis(rate=6.3e8),), pairs=pairs(7e8, expected=1.25e9)),
    "nothing expected": examined(axes=(axis(rate=1.0, expected_rate=None),), pairs=pairs(1.0)),
    "pairs alike": examined(pairs=pairs(1e9, 6e8, 8e8)),
}


@pytest.mark.parametrize(
    ("severity", "seen", "words"),
    [pytest.param(kind, *case, id=name) for kind, table in (("error", ERRORS), ("warning", WARNINGS))
     for name, case in table.items()],
)  # fmt: skip
def test_one_thing_is_wrong(severity: str, seen: Examined, words: str) -> None:
    (found,) = find_all(seen)
    assert found.severity == severity and words in found.sentence, found
    assert found.sentence.endswith("."), "a sentence"


@pytest.mark.parametrize("seen", FINE.values(), ids=FINE)
def test_nothing_is_wrong(seen: Examined) -> None:
    assert find_all(seen) == []
    assert list(report_lines(seen, []))[-1] == "training would start"


def test_errors_come_first_and_are_counted() -> None:
    seen = examined(host(0, open_files=3), host(1, gpu_problem="no driver"))
    found = find_all(seen)
    assert [one.severity for one in found] == ["error", "warning"]
    assert verdict_line(found) == "training would not start: 1 error, 1 warning"
    assert verdict_line(found[1:]) == "training would start: 1 warning"


def test_many_ranks_that_could_not_start_are_cut_short() -> None:
    seen = examined(each=4, failed=tuple((rank, f"rank {rank} could not join.") for rank in range(8)))
    found = [one.sentence for one in find_all(seen)]
    assert found[0] == "rank 0 (node0): rank 0 could not join." and len(found) == 5
    assert found[4] == "ranks 4, 5, 6, 7 could not start either; --json writes their errors."


def test_hosts_of_one_name_are_told_apart() -> None:
    hosts = Hosts(ranks(host(0), host(1, name="node0"), host(2)))
    assert list(hosts.ranks) == ["node0 (10.0.0.1)", "node0 (10.0.0.2)", "node2"]
    assert hosts.of_rank[3] == "node0 (10.0.0.2)"


def test_the_report_shows_what_was_seen() -> None:
    shown = "\n".join(
        report_lines(
            examined(
                grid={"pp": 1, "dp": 2, "tp": 2},
                axes=(axis(), axis(axis="tp", ranks=(0, 1), hosts=("node0",), over="shared memory")),
                pairs=pairs(1e9),
                clocks=(ClockFigure(host="node1", seconds=0.0015, uncertain=1e-4),),
            ),
            [],
        )
    )
    assert shown.startswith("4 ranks of 4 on 2 hosts, 1 pipeline x 2 data x 2 tensor\n")
    for words in (
        "node1  10.0.0.2  eth0 (10000 Mbit/s)  none  8.00 GiB of 8.00 GiB  20000  any",
        "+1.50 ms",
        "3     node1  101  cpu     0         1     1",
        "dp    0,1,2,3  node0, node1    gloo over eth0 (10000 Mbit/s)  200 us",
        "tp    0,1      stays on node0  shared memory",
        "node0 - node1  100 us  1000 MB/s  -",
    ):
        assert words in shown, shown


def test_a_large_job_is_cut_short() -> None:
    shown = list(report_lines(examined(*map(host, range(20)), each=8), []))
    assert ".. and 96 more, see --json" in shown and len(shown) < 100


def test_facts_survive_json() -> None:
    for one in examined(host(0, gpus=(GPU,))).facts:
        assert RankFacts.from_json(json.loads(json.dumps(asdict(one)))) == one
