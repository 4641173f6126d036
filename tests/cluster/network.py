"""Nodes on one machine: each is a set of Linux namespaces, joined by a bridge.

        node0          node1          node2       own address, host name, processes, /dev/shm and /etc/hosts
          |eth0          |eth0          |eth0     a link with a rate, which can be slowed and taken down
    ======+==============+==============+======   the switch: a bridge in a namespace of its own

The folders of the machine are those of every node, as of a cluster with a shared file system. A node ends with its
first process, and with it everything that runs there; all nodes end when this process does, in any way.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Self

NEEDED = ("ip", "tc", "unshare", "nsenter", "bash", "mount")
RATE = "1gbit"
"""Of a link, each way, unless it is slowed."""
QUEUE = "burst 256kb latency 100ms"
"""Before a link: what passes at once after a pause, and how long the rest waits before it is dropped."""
LOSSLESS = "burst 32kb limit 64mb"
"""A queue that drops nothing and saves up nothing: a transfer takes its bytes by the rate, whatever went before."""
_HOLD = 'printf "ready\\n"; while true; do read -r -t 3600 || [ $? -gt 128 ] || exit; done'
"""Body of a node's first process: it ends when its input does, and takes leave of processes that nobody waits for."""


def missing() -> str:
    """Why this machine cannot hold a cluster, in a sentence; empty if it can."""
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        return f"a cluster of namespaces needs {', '.join(absent)}, which this machine does not have."
    if os.geteuid() != 0:
        return "a cluster of namespaces needs root, which this user is not."
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}."


class _Held:
    """Namespaces that live as long as their first process."""

    def __init__(self, kinds: Sequence[str], prepare: str = "") -> None:
        body = f"{prepare}\n{_HOLD}"
        command = ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "--kill-child", "bash", "-c", body]
        self._outer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._outer.stdout.readline() if self._outer.stdout is not None else ""
        assert said == "ready\n", f"a node did not start: {said}"
        self.pid = int(Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text())
        """Of the first process, seen from outside."""

    def run(self, line: str) -> None:
        """Run a command of this machine's in the network of these namespaces."""
        subprocess.run(["nsenter", f"--net=/proc/{self.pid}/ns/net", *shlex.split(line)], check=True)

    def end(self) -> None:
        """Kill everything that runs there. A second call does nothing."""
        self._outer.kill()  # --kill-child: the first process goes with it, and all others with the first
        self._outer.wait()
        for stream in (self._outer.stdin, self._outer.stdout):
            if stream is not None:
                stream.close()


class Node:
    """A machine of the cluster; made and booted by :class:`Cluster`."""

    def __init__(self, index: int, hosts: Path) -> None:
        self.index = index
        self.name = f"node{index}"
        self.address = f"10.77.{index // 200}.{1 + index % 200}"
        self._hosts = hosts
        self._held: _Held | None = None

    @property
    def held(self) -> _Held:
        """The namespaces of a node that is up."""
        assert self._held is not None, f"{self.name} is down"
        return self._held

    def boot(self, switch: _Held) -> None:
        """Start the node and plug it in."""
        prepare = f"""set -e
        hostname {self.name}
        mount --make-rprivate /
        mount -t tmpfs -o size=256m shm /dev/shm
        mount --bind {self._hosts} /etc/hosts
        set +e"""
        self._held = _Held(("net", "uts", "mount", "ipc", "pid", "mount-proc"), prepare)
        card = (
            f"02:00:00:00:{self.index // 256:02x}:{self.index % 256:02x}"  # a machine keeps it when it is booted anew
        )
        switch.run(f"ip link add {self.name} type veth peer name eth0 address {card} netns {self.held.pid}")
        switch.run(f"ip link set {self.name} master lan up")
        for line in ("ip link set lo up", f"ip address add {self.address}/16 dev eth0", "ip link set eth0 up"):
            self.held.run(line)

    def end(self) -> None:
        """Take its power away."""
        if self._held is not None:
            self._held.end()
        self._held = None

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        output: IO[bytes] | int | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start a program there; its two streams go to ``output``."""
        # before the tests beside it: how soon something is noticed is a promise of machines that have time for it
        inside = ["nice", "--10", "nsenter", "--target", str(self.held.pid)]
        inside += ["--net", "--uts", "--mount", "--ipc", "--pid"]
        return subprocess.Popen(
            [*inside, f"--wd={folder or Path.cwd()}", *command],
            env={**os.environ, **(env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


class Cluster:
    """``with Cluster(nodes=2) as cluster: cluster.nodes[0].start([...])``."""

    def __init__(self, nodes: int, rate: str = RATE, queue: str = QUEUE) -> None:
        self._folder = TemporaryDirectory()
        hosts = Path(self._folder.name) / "hosts"
        self.nodes = [Node(index, hosts) for index in range(nodes)]
        names = "".join(f"{node.address} {node.name}\n" for node in self.nodes)
        hosts.write_text(f"127.0.0.1 localhost\n{names}")
        self._rate, self._queue = rate, queue

    def __enter__(self) -> Self:
        self._switch = _Held(("net",))
        self._switch.run("ip link add lan type bridge")
        self._switch.run("ip link set lan up")
        for node in self.nodes:
            self.boot(node)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.end()
        self._switch.end()
        self._folder.cleanup()

    def boot(self, node: Node) -> None:
        """Bring a node back that was ended, or start it for the first time."""
        node.boot(self._switch)
        self.set_rate(node, self._rate)

    def set_rate(self, node: Node, rate: str) -> None:
        """How fast the link of a node is, each way, such as ``10mbit``."""
        shape = f"root tbf rate {rate} {self._queue}"
        self._switch.run(f"tc qdisc replace dev {node.name} {shape}")
        node.held.run(f"tc qdisc replace dev eth0 {shape}")

    def unplug(self, node: Node) -> None:
        """Take the link of a node down; its processes go on."""
        self._switch.run(f"ip link set {node.name} down")

    def plug(self, node: Node) -> None:
        """Take the link of a node up again."""
        self._switch.run(f"ip link set {node.name} up")
