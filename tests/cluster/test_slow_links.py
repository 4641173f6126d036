"""A link of a node that is slow, or becomes slow, is named; the job goes on, and nobody is blamed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.jobs import TIMEOUT, Job, copied
from tests.cluster.network import Cluster, missing

SLOW = "200kbit"
pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.long]


@pytest.mark.parametrize(
    ("nodes", "hosts", "words"),
    [
        (2, "node0 and node1", " before, with all ranks in the call"),
        (4, "node1 and node3", "where others of its kind took "),
    ],
)
def test_a_link_that_becomes_slow_is_named_and_the_job_goes_on(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, nodes: int, hosts: str, words: str
) -> None:
    cluster, script = clusters(nodes), copied("faulty.py", tmp_path)
    settings = ("link-slow", "0", str(tmp_path / "armed"), "data=2,tensor=2", str(TIMEOUT))
    with Job(cluster, warm_python, 4 // nodes, script, *settings) as job:
        job.wait_for("step 60", node=0)  # two windows without a fault
        assert "is slow" not in job.said()
        cluster.set_rate(cluster.nodes[-1], SLOW)
        line = job.wait_for_any(": dp over ranks ")
        said = job.said()
    assert line.startswith(f"trine watchdog: the link between {hosts} is slow: ") and words in line, said[-3000:]
    assert ") is slow: it computed" not in said, "no rank is called slow"
    assert line.partition("trine watchdog: ")[2] in (tmp_path / "report" / "watchdog_stragglers.jsonl").read_text()
