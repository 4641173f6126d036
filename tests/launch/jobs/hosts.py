"""Hosts with a real sshd each, in the namespaces of tests/cluster, and a desk from which ``trine launch`` reaches them.

node0, node1, ..     an sshd on port 2222, with a host key and authorized keys of its own
the last node        the desk: it runs the launcher, and no rank
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.jobs import ROOT, NodeEnd
from tests.cluster.network import Cluster, Node, missing

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
NEEDED = ("ssh", "ssh-keygen")
PORT = 2222


def no_hosts() -> str:
    """Why this machine cannot hold hosts that ssh reaches, in a sentence; empty if it can."""
    absent = [name for name in NEEDED if shutil.which(name) is None] + ["sshd"] * (SSHD is None)
    return f"hosts need {', '.join(absent)}, which this machine does not have." if absent else missing()


class Launch:
    """A running ``trine launch``."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def text(self) -> str:
        """Both of its streams so far."""
        return self._output.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send it a signal, which ``nsenter`` would keep to itself."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(child), number)

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        """Return once it has printed ``words``."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None and time.monotonic() < deadline, f"not said: {words!r}\n{self.text}"
            time.sleep(0.05)

    def end(self, seconds: float = 60.0) -> NodeEnd:
        """Wait for its end."""
        return NodeEnd(self.process.wait(seconds), self.text)


class Hosts:
    """``with Hosts(2, python, folder) as hosts: hosts.launch("script.py")``."""

    def __init__(self, count: int, warm: str, folder: Path) -> None:
        self.cluster = Cluster(count + 1)
        self.nodes: list[Node] = self.cluster.nodes[:-1]
        self._desk = self.cluster.nodes[-1]
        self._folder = folder
        self._launches: list[Launch] = []
        self._others: list[subprocess.Popen[bytes]] = []
        self.hostfile = folder / "hosts.txt"
        self.hostfile.write_text("".join(f"{node.name} slots=1\n" for node in self.nodes))
        self.python = self.interpreter("python", warm)
        self._key = folder / "key"
        for name in ("key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def interpreter(self, name: str, warm: str, first: str = "") -> Path:
        """A ``python`` that starts torchrun and its ranks warm; ``first``: a line that it runs before."""
        path = self._folder / name
        path.write_text(
            f"""#!/bin/sh
            {first}
            case "$1 $2" in "-m torch.distributed.run") PYTHON_EXEC={warm} exec {warm} "$@" ;; esac
            exec {sys.executable} "$@"
            """
        )
        path.chmod(0o700)
        return path

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        for node in self.nodes:
            self.start_sshd(node)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [*self._others, *(launch.process for launch in self._launches)]:
            process.kill()
            process.wait()
        self.cluster.__exit__(kind, error, trace)

    def start_sshd(self, node: Node) -> None:
        """Let ssh in; it ends with the node."""
        options = {
            "AuthorizedKeysFile": f"{self._key}.pub",
            "PermitRootLogin": "yes",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
        }
        given = " ".join(f"-o {name}={value}" for name, value in options.items())
        told = self._folder / f"sshd{node.index}.out"
        with told.open("wb") as output:
            line = f"mkdir -p /run/sshd && exec {SSHD} -De -f /dev/null -p {PORT} -h {self._folder}/host_key {given}"
            self._others.append(node.start(["sh", "-c", line], output=output.fileno()))
        deadline = time.monotonic() + 10
        while "listening" not in (text := told.read_text()):
            assert time.monotonic() < deadline, f"sshd does not listen: {text}"
            time.sleep(0.02)

    def hold(self, node: Node, *command: str) -> None:
        """Run a program on a node until the end."""
        self._others.append(node.start(command))

    def launch(self, *words: str, ssh: str = "", hostfile: Path | None = None) -> Launch:
        """Start ``trine launch --hostfile .. WORDS`` at the desk, in the folder of the test."""
        known = f"-o UserKnownHostsFile={self._folder}/known -o StrictHostKeyChecking=accept-new"
        command = [
            sys.executable, "-m", "engine.launch.cli", "launch", "--hostfile", str(hostfile or self.hostfile),
            "--ssh", f"ssh -p {PORT} -i {self._key} {known} {ssh}", "--export", "TRITON_INTERPRET=0",
            *(["--python", str(self.python)] if "--python" not in words else []), *words,
        ]  # fmt: skip
        path = self._folder / f"launch{len(self._launches)}.out"
        with path.open("wb") as output:
            process = self._desk.start(command, {"PYTHONPATH": str(ROOT)}, self._folder, output.fileno())
        self._launches.append(Launch(process, path))
        return self._launches[-1]

    def processes(self, node: Node, words: Sequence[str]) -> list[str]:
        """Command lines of processes of a node that have any of these words."""
        told = self._folder / f"ps{node.index}.out"
        script = 'for p in /proc/[0-9]*; do tr "\\0" " " < $p/cmdline; echo; done'
        with told.open("wb") as output:
            node.start(["sh", "-c", script], output=output.fileno()).wait(10)
        return [line for line in told.read_text().splitlines() if any(word in line for word in words)]
