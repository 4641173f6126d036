"""The benchmark of scaling over nodes: a lost node ends its job, and the next job goes on with the same file."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.scaling.record import ScalingRecord, read_record
from tests.benchmarks.scaling.test_command import TINY
from tests.cluster.jobs import Job
from tests.cluster.network import Cluster, missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.long]

JOB = """
import sys
from benchmarks.scaling.command import main
sys.exit(main(sys.argv[1:]))
"""


def wait_for_samples(out: Path, count: int, seconds: float = 120.0) -> ScalingRecord:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if out.exists():
            found = read_record(out)
            if sum(len(row.samples) for row in found.rows) >= count:
                return found
        time.sleep(0.1)
    raise AssertionError(f"no {count} samples within {seconds:g} s")


def test_a_job_that_lost_a_node_goes_on(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINE_TIMEOUT_SECONDS", "20")
    cluster, script, out = clusters(2), tmp_path / "job.py", tmp_path / "scaling.json"
    script.write_text(JOB)
    settings = (*TINY, f"--out={out}", "--rounds=2", "--stages=1")
    with Job(cluster, warm_python, 2, script, *settings) as job:
        before = wait_for_samples(out, 3)
        cluster.nodes[1].end()
        ended = job.end(120)
        assert ended[0].code not in (0, None), ended[0].text[-2000:]
    kept = wait_for_samples(out, 3)
    cluster.boot(cluster.nodes[1])
    with Job(cluster, warm_python, 2, script, *settings) as job:
        ended = job.end(180)
    assert [node.code for node in ended] == [0, 0], ended[0].text[-3000:]
    found = read_record(out)
    assert found.machines == before.machines and len(found.machines) == 2
    rounds = {(row.choice.dp, row.choice.tp, row.choice.pp): len(row.samples) for row in found.rows}
    # two blocks are too few for four stages
    assert rounds == {(4, 1, 1): 2, (1, 4, 1): 2, (2, 2, 1): 2, (2, 1, 2): 2, (1, 2, 2): 2, (1, 1, 4): 0}
    assert all(row.refused for row in found.rows if not row.samples)
    for row in kept.rows:
        again = found.row(row.key)
        assert again is not None and again.samples[: len(row.samples)] == row.samples
    made = re.findall(r"^strong (.*): .* s$", ended[0].text, flags=re.MULTILINE)  # of both jobs
    assert len(made) == sum(rounds.values()) and len(set(made)) == len(made)
