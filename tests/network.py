"""Slow networks in this machine: each site in its own network namespace, behind a link of a fixed rate. Root only."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Network:
    """Sites, and this host, on one bridge."""

    address: str
    """Address at which the sites reach this host."""
    names: tuple[str, ...]
    """Namespace of each site."""
    links: tuple[str, ...] = field(repr=False)
    """End of each site's link in this host."""

    def command(self, site: int, words: Sequence[str]) -> list[str]:
        """A command that runs ``words`` on a site; signals and status are those of ``words``."""
        return ["ip", "netns", "exec", self.names[site], *words]

    def cut(self, site: int) -> None:
        """Cuts the link of a site; connections stay open and are silent."""
        _run(f"ip link set {self.links[site]} down")

    def mend(self, site: int) -> None:
        """Mends the link of a site."""
        _run(f"ip link set {self.links[site]} up")


def can_make_networks() -> bool:
    """Whether this process may make namespaces and shape links."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"tr{os.getpid()}"
    made = _run(f"ip netns add {name}", check=False) == 0
    return _run(f"ip netns del {name}", check=False) == 0 and made


@contextmanager
def network(sites: int, rate: str = "10mbit") -> Iterator[Network]:
    """Makes ``sites`` sites whose links carry ``rate`` in each direction, and removes them in any case.

    Its names contain the number of this process, so that several tests run at once; one process has one network.
    """
    number = os.getpid()
    subnet, bridge = f"10.{64 + number // 256 % 64}.{number % 256}", f"tb{number}"
    names = tuple(f"tr{number}s{site}" for site in range(sites))
    links = tuple(f"tv{number}n{site}" for site in range(sites))
    shape = f"root tbf rate {rate} burst 32kbit latency 400ms"
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip addr add {subnet}.1/24 dev {bridge}")
        _run(f"ip link set {bridge} up")
        for site, (name, link) in enumerate(zip(names, links, strict=True)):
            _run(f"ip netns add {name}")
            _run(f"ip link add {link} type veth peer name eth0 netns {name}")
            _run(f"ip link set {link} master {bridge} up")
            _run(f"ip -n {name} addr add {subnet}.{10 + site}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            _run(f"tc qdisc add dev {link} {shape}")
            _run(f"ip netns exec {name} tc qdisc add dev eth0 {shape}")
        yield Network(f"{subnet}.1", names, links)
    finally:
        for name, link in zip(names, links, strict=True):
            _run(f"ip link del {link}", check=False)
            _run(f"ip netns del {name}", check=False)
        _run(f"ip link del {bridge}", check=False)


def _run(command: str, check: bool = True) -> int:
    done = subprocess.run(shlex.split(command), check=False, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.returncode
