"""Jobs over several nodes: they train as one process does, and a node or a network that fails is named."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.jobs import TIMEOUT, Job, copied
from tests.cluster.network import Cluster, missing
from tests.selection import wide
from tests.tables import Table

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
"""The one thing that a test asks of a machine and that no package installs."""


def faulty(fault: str, victim: int, folder: Path, grid: str) -> list[str]:
    """What ``faulty.py`` is told."""
    return [fault, str(victim), str(folder / "armed"), grid, str(TIMEOUT)]


@pytest.mark.parametrize(
    ("nodes", "ranks", "grid", "stage"),
    [
        (2, 2, "data=2,tensor=2", 1),
        wide(2, 2, "pipeline=2,tensor=2", 0),
        wide(2, 2, "data=4", 3),
        wide(4, 2, "pipeline=2,data=2,tensor=2", 1),
        wide(4, 2, "data=4,tensor=2", 0),
        wide(8, 4, "pipeline=4,data=2,tensor=4", 1),
    ],
)
def test_a_job_over_nodes_trains_as_one_process(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, nodes: int, ranks: int, grid: str, stage: int
) -> None:
    with Job(clusters(nodes), warm_python, ranks, copied("parity.py", tmp_path), grid, str(stage)) as job:
        ended = job.end(120)
    assert [node.code for node in ended] == [0] * nodes, ended
    assert "holds" in ended[0].text, ended[0].text[-2000:]


@pytest.mark.parametrize(
    ("fault", "about"), [("power", "its node loses power"), wide("cable", "the link of its node is down")]
)
def test_a_node_that_is_gone_is_named(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, fault: str, about: str, faults_table: Table
) -> None:
    cluster, words = clusters(2), "node1 with ranks 2, 3 of 4 has not answered for"
    with Job(cluster, warm_python, 2, copied("faulty.py", tmp_path), *faulty("none", 0, tmp_path, "data=4")) as job:
        job.wait_for("trains")
        time.sleep(4.0)  # the monitors know each other, on a busy machine too
        began = time.monotonic()
        if fault == "power":
            cluster.nodes[1].end()
        else:
            cluster.unplug(cluster.nodes[1])
        job.wait_for(words, 3 * TIMEOUT + 3, node=0)
        took = time.monotonic() - began
        ended = job.end(10)
        assert took < TIMEOUT + 1 and ended[0].code not in (0, None), (took, ended[0].text[-2000:])
    faults_table.cells[about, "4 data ranks on 2 nodes"] = f"{took:.1f} s"
    # a node that is cut off hears nothing, and torchrun there waits for its store; its ranks must not train on
    assert fault == "power" or "node0 with ranks 0, 1 of 4 has not answered for" in ended[1].text


@pytest.mark.long
@pytest.mark.parametrize("victim", [3, wide(0)])
@pytest.mark.parametrize("fault", ["forward-stop", wide("hook-loop"), wide("forward-kill"), wide("loss-raise")])
def test_a_rank_of_another_node_is_named(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, fault: str, victim: int
) -> None:
    grid = "data=2,pipeline=2" if fault.startswith("forward") else "data=4"  # losses are of the last stage
    with Job(clusters(2), warm_python, 2, copied("faulty.py", tmp_path), *faulty(fault, victim, tmp_path, grid)) as job:
        job.wait_for("trains")
        time.sleep(4.0)
        (tmp_path / "armed").touch()
        ended = job.end(30)
    assert all(node.code not in (0, None) for node in ended), ended
    assert f"trine watchdog: rank {victim} (node{victim // 2}, pid " in "".join(node.text for node in ended)


def goes_on(job: Job) -> None:
    """The job makes more steps, and nobody was blamed."""
    before = job.text(0).count("step ")
    time.sleep(TIMEOUT)
    assert job.text(0).count("step ") > before, "it trains on"
    assert not [node for node in (0, 1) if "trine watchdog" in job.text(node)]


@pytest.mark.long
def test_a_link_that_comes_back_in_time_is_forgiven(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path
) -> None:
    cluster = clusters(2)
    with Job(cluster, warm_python, 2, copied("faulty.py", tmp_path), *faulty("none", 0, tmp_path, "data=4")) as job:
        job.wait_for("trains")
        time.sleep(4.0)
        for _ in range(3):
            before = job.text(0).count("step ")
            cluster.unplug(cluster.nodes[1])
            time.sleep(TIMEOUT / 3)  # TCP tries again after twice the time that has passed, and so is back in time
            assert job.text(0).count("step ") <= before + 1, "nothing passes"
            cluster.plug(cluster.nodes[1])
            time.sleep(TIMEOUT / 3)
            goes_on(job)


@pytest.mark.long
@pytest.mark.parametrize("rate", ["10mbit", "1mbit"])
def test_a_slow_link_is_nobodys_fault(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, rate: str
) -> None:
    """A hundredth and a thousandth of its rate: steps take longer, and no rank waits for the whole timeout."""
    cluster = clusters(2)
    with Job(cluster, warm_python, 2, copied("faulty.py", tmp_path), *faulty("none", 0, tmp_path, "data=4")) as job:
        job.wait_for("trains")
        time.sleep(4.0)
        cluster.set_rate(cluster.nodes[1], rate)
        for _ in range(3):
            goes_on(job)
