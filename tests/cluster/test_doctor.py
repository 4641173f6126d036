"""``trine doctor`` over nodes: a slow link, another version and a node that is cut off are named."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import ENVIRONMENT, ROOT, Job
from tests.cluster.network import Cluster, missing
from tests.selection import wide

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DOCTOR = """
import runpy
runpy.run_module("engine.launch.doctor", run_name="__main__", alter_sys=True)
"""


class Ranks:
    """As many ranks on each node, started by hand in the order of ``pythons``, killed at the end of the block."""

    def __init__(self, cluster: Cluster, pythons: Sequence[str], folder: Path, *arguments: str) -> None:
        self.cluster, self._arguments, self._folder = cluster, arguments, folder
        self._each, self._size = len(pythons) // len(cluster.nodes), len(pythons)
        self._outputs = [folder / f"{rank}.out" for rank in range(self._size)]
        self._running = [self._start(rank, python) for rank, python in enumerate(pythons)]

    def _start(self, rank: int, python: str) -> "subprocess.Popen[bytes]":
        node, local = divmod(rank, self._each)
        place = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(self._size)}
        meeting = {"MASTER_ADDR": self.cluster.nodes[0].name, "MASTER_PORT": "29500"}
        meeting["LOCAL_WORLD_SIZE"] = str(self._each)
        folder = self.folder_of(rank)
        environment: Mapping[str, str] = ENVIRONMENT | place | meeting | {"PYTHONPATH": str(folder)}
        with self._outputs[rank].open("wb") as output:
            command = [python, "-m", "engine.launch.doctor", *self._arguments]
            return self.cluster.nodes[node].start(command, environment, folder, output.fileno())

    def folder_of(self, rank: int) -> Path:
        """Where the engine of a rank lies: a copy of its own, or the one of all."""
        own = self._folder / f"engine of {rank}"
        return own if own.exists() else ROOT

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            running.kill()
            running.wait()

    def text(self, rank: int) -> str:
        """What it has printed, and what torch has."""
        return self._outputs[rank].read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        """Return once rank 0 has said ``words``."""
        deadline = time.monotonic() + seconds
        while words not in self.text(0):
            assert time.monotonic() < deadline, self.text(0)
            time.sleep(0.02)

    def end(self, seconds: float = 60.0) -> list[int]:
        """Exit statuses; a rank that hangs fails the test."""
        deadline = time.monotonic() + seconds
        return [running.wait(max(0.1, deadline - time.monotonic())) for running in self._running]


def result(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def sentences(told: Mapping[str, Any], kind: str) -> list[str]:
    return [finding["sentence"] for finding in told["findings"] if finding["kind"] == kind]


@pytest.mark.long
def test_the_pair_of_a_slow_link_is_named(clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path) -> None:
    cluster, told = clusters(3), tmp_path / "told.json"
    cluster.set_rate(cluster.nodes[2], "20mbit")
    with Ranks(cluster, [warm_python] * 3, tmp_path, "--json", str(told)) as ranks:
        assert ranks.end() == [0, 0, 0], ranks.text(0)
    seen = result(told)
    (sentence,) = sentences(seen, "pair")
    assert "node2 is the slowest pair of hosts: " in sentence, sentence
    assert "all pairs with node2 are slow" in sentence and sentence in ranks.text(0)
    fast, slow = seen["pairs"][-1], seen["pairs"][0]
    assert fast["hosts"] == ["node0", "node1"] and fast["rate"] > 10 * slow["rate"]
    (axis,) = sentences(seen, "axis")
    assert "dp over ranks 0, 1, 2 sends" in axis and "eth0 (10000 Mbit/s) should carry" in axis
    assert [clock["host"] for clock in seen["clocks"]] == ["node1", "node2"]
    assert all(abs(clock["seconds"]) < 0.5 for clock in seen["clocks"]), "namespaces have one clock"
    assert "training" not in ranks.text(1) + ranks.text(2), "only rank 0 prints"


@pytest.mark.long
def test_torchrun_of_two_nodes(clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path) -> None:
    config, script = tmp_path / "config.json", tmp_path / "doctor.py"
    config.write_text(json.dumps({"train_batch_size": 8, "parallel": {"data": 2, "tensor": 2}}))
    script.write_text(DOCTOR)
    with Job(clusters(2), warm_python, 2, script, str(config)) as job:
        ended = job.end()
    assert [node.code for node in ended] == [0, 0], ended
    shown = "".join(node.text for node in ended)
    assert "4 ranks of 4 on 2 hosts, 1 pipeline x 2 data x 2 tensor" in shown
    assert shown.count("training would start") == 1
    assert "stays on node0  shared memory" in shown and "stays on node1  shared memory" in shown
    assert shown.count("node0, node1    gloo over eth0 (10000 Mbit/s)") == 2, shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        ('__version__ = "0.2.0"', '__version__ = "0.0.9"', 1, "trine is 0.2.0 on node0 and 0.0.9 on node1; install "),
        wide('"""Trine', '"""Another Trine', 0, "the sources of the engine have digest"),
    ],
)
def test_another_version_on_one_host(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, old: str, new: str, status: int, words: str
) -> None:
    copy = tmp_path / "engine of 1" / "engine"
    shutil.copytree(ROOT / "engine", copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "__init__.py").read_text()
    assert old in text
    (copy / "__init__.py").write_text(text.replace(old, new, 1))
    told = tmp_path / "told.json"
    with Ranks(clusters(2), [warm_python, sys.executable], tmp_path, "--json", str(told)) as ranks:
        assert ranks.end() == [status, status], ranks.text(0) + ranks.text(1)
    kind = "versions" if status else "sources"
    (sentence,) = sentences(result(told), kind)
    assert words in sentence and " on node1; " in sentence


SILENT = "joined but did not answer within 3 s in: "


@pytest.mark.parametrize(
    ("phase", "each", "words"),
    [
        ("measuring the axes", 1, f"node1 (rank 1) {SILENT}measuring"),
        wide("", 1, "rank 1 of 3 did not join at node0:29500 within 3 s, of node 1 counted from 0"),
        wide("", 2, "ranks 2, 3 of 6 did not join at node0:29500 within 3 s, of node 1 counted from 0"),
        wide("starting the process group", 1, f"node1 (rank 1) {SILENT}"),
        wide("measuring pairs", 2, f"node1 (ranks 2, 3) {SILENT}measuring pairs of hosts"),
    ],
)
def test_a_node_that_is_cut_off_is_named_in_time(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, phase: str, each: int, words: str
) -> None:
    cluster = clusters(3)
    if phase:
        cluster.set_rate(cluster.nodes[2], "2mbit")  # so that what is cut off is under way for a while
    else:
        cluster.unplug(cluster.nodes[1])
    with Ranks(cluster, [warm_python] * 3 * each, tmp_path, "--timeout", "3") as ranks:
        if phase:
            ranks.wait_for(phase)
            cluster.unplug(cluster.nodes[1])
        began = time.monotonic()
        ranks.wait_for("training would", 30)
        took = time.monotonic() - began
        shown = ranks.text(0)
        assert words in shown and "\ntraining would not start: 1 error" in shown, shown
        assert took < 3 + 8, took
        assert ranks.end(40) == [1] * 3 * each
    assert f"trine doctor: rank {each} (node1): " in ranks.text(each), "it speaks for itself"
    assert "trine doctor" not in ranks.text(3 * each - 1), "it has heard rank 0"
