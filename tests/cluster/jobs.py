"""A job of torchrun over the nodes of a cluster, as its user starts it: the same command on every node."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.launch.jobs.torchrun import ELASTIC_CONF, ELASTIC_ENVIRONMENT, JOIN_SECONDS, MAX_RESTARTS
from tests.cluster.network import Cluster, Node
from tests.warm_python import warm_torchrun

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent
TIMEOUT = 3.0
ELASTIC_OPTIONS = (
    MAX_RESTARTS,
    "--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in {**ELASTIC_CONF, "join_timeout": str(JOIN_SECONDS)}.items()),
)
"""Of every torchrun of an elastic job."""
"""Of the watchdog in jobs that go wrong (``faulty.py``), in seconds."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}


def copied(name: str, folder: Path) -> Path:
    """A script of this folder, where its job writes."""
    script = folder / name
    script.write_text((SCRIPTS / name).read_text())
    return script


@dataclass(frozen=True)
class NodeEnd:
    """How the launcher of one node has ended."""

    code: int | None
    """None: it had to be killed."""
    text: str
    """Both of its streams."""


class Job:
    """``torchrun --nnodes N --nproc-per-node R script ...`` on every node, killed at the end of the block."""

    def __init__(
        self, cluster: Cluster, python: str, ranks: int, script: Path, *arguments: str, elastic: bool = False
    ) -> None:
        """``elastic``: any number of nodes goes on, as often as it has to."""
        nodes = len(cluster.nodes)
        self._folder = script.parent
        self._environment = {**ENVIRONMENT, **ELASTIC_ENVIRONMENT} if elastic else ENVIRONMENT
        self._outputs = [script.with_name(f"{node.name}.out") for node in cluster.nodes]
        self._command = [
            *warm_torchrun(python), f"--nnodes={nodes}", f"--nproc-per-node={ranks}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.nodes[0].name}:29400", "--rdzv-id=job",
            *[f"--nnodes=1:{nodes}", *ELASTIC_OPTIONS] * elastic, str(script), *arguments,
        ]  # fmt: skip
        self._launchers = [self._start(node) for node in cluster.nodes]

    def _start(self, node: Node) -> "subprocess.Popen[bytes]":
        with self._outputs[node.index].open("ab") as output:
            return node.start(self._command, self._environment, self._folder, output.fileno())

    def start_again(self, node: Node) -> None:
        """Start the launcher of a node that was booted anew."""
        self._launchers[node.index].kill()
        self._launchers[node.index].wait()
        self._launchers[node.index] = self._start(node)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()

    def said(self) -> str:
        """Everything that the nodes have printed, one after the other."""
        return "".join(self.text(node) for node in range(len(self._outputs)))

    def wait_for_any(self, words: str, seconds: float = 60.0) -> str:
        """Return the first line with ``words`` that a node prints: which one has the hub is not known."""
        deadline = time.monotonic() + seconds
        while not (found := [line for line in self.said().splitlines() if words in line]):
            assert time.monotonic() < deadline, f"not said: {words!r}\n{self.said()[-3000:]}"
            time.sleep(0.05)
        return found[0]

    def text(self, node: int) -> str:
        """What a node has printed so far."""
        return self._outputs[node].read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = 60.0, node: int | None = None) -> None:
        """Return once every node, or this one, has printed ``words``."""
        deadline, outputs = time.monotonic() + seconds, self._outputs if node is None else [self._outputs[node]]
        while late := [path for path in outputs if words not in path.read_text(errors="replace")]:
            told = "\n".join(path.read_text(errors="replace") for path in late)
            assert time.monotonic() < deadline, f"not said: {words!r}\n{told[-3000:]}"
            time.sleep(0.05)

    def wait_for_more(self, words: str, seen: int, node: int) -> None:
        """Return once a node has printed ``words`` more than ``seen`` times."""
        deadline = time.monotonic() + 60.0
        while self._outputs[node].read_text(errors="replace").count(words) <= seen:
            assert time.monotonic() < deadline, f"not said again: {words!r}\n{self.said()[-3000:]}"
            time.sleep(0.05)

    def end(self, seconds: float = 60.0) -> list[NodeEnd]:
        """Wait for all launchers; those that hang are killed after ``seconds``."""
        deadline, found = time.monotonic() + seconds, list[NodeEnd]()
        for launcher, path in zip(self._launchers, self._outputs, strict=True):
            code: int | None
            try:
                code = launcher.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
                code = None
            found.append(NodeEnd(code, path.read_text(errors="replace")))
        return found
