"""Hosts and ranks as a doctor sees them, to be spoilt."""

from dataclasses import replace
from typing import Any

from engine.launch.doctor.examined import Examined, GpuFacts, HostFacts, InterfaceFacts, RankFacts

VERSIONS = {"python": "3.11.7", "trine": "0.1.0", "torch": "2.13.0", "triton": "3.7.1"}
GPU = GpuFacts(name="H100", bytes=80 << 30)


def host(index: int, **changes: Any) -> HostFacts:
    """A healthy host with an Ethernet of 10 Gbit/s."""
    address = f"10.0.0.{1 + index}"
    loopback = InterfaceFacts(name="lo", addresses=("127.0.0.1",), loopback=True)
    healthy = HostFacts(
        name=f"node{index}",
        identity=f"identity {index}",
        versions=VERSIONS,
        digest="0123456789ab",
        interfaces=(loopback, InterfaceFacts(name="eth0", addresses=(address,), megabits=10_000)),
        named_addresses=(address,),
        route_address=address,
        shm_bytes=8 << 30,
        shm_free=8 << 30,
        memory_free=8 << 30,
        open_files=20_000,
    )
    return replace(healthy, **changes)


def ranks(*hosts: HostFacts, each: int = 2, device: str = "cpu") -> tuple[RankFacts, ...]:
    """So many ranks on each host."""
    return tuple(
        RankFacts(rank=index * each + local, local_rank=local, pid=100 + local, device=device, problem="", host=one)
        for index, one in enumerate(hosts)
        for local in range(each)
    )


def examined(*hosts: HostFacts, each: int = 2, device: str = "cpu", **changes: Any) -> Examined:
    """A job of data ranks on these hosts, two healthy ones without."""
    facts = ranks(*(hosts or (host(0), host(1))), each=each, device=device)
    seen = Examined(
        size=len(facts),
        met=True,
        facts=facts,
        grid={"pp": 1, "dp": len(facts), "tp": 1},
        place="node0:29400",
        ranks_of_node=each,
    )
    return replace(seen, **changes)
