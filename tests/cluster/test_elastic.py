"""A job goes on over the nodes that are left, takes in one that comes back, and ends as an undisturbed run does."""

import json
import os
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import ENVIRONMENT, SCRIPTS, Job, copied
from tests.cluster.network import Cluster, missing
from tests.selection import wide

STEPS = 40
PAUSE = 0.2
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def updates_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The report of each update, from when it was made last."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def losses_of_one_process(python: str, folder: Path, steps: int) -> list[float]:
    """The losses of a run that nobody disturbs."""
    command = [python, str(SCRIPTS / "elastic.py"), str(folder), str(steps)]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True)
    return [update["loss"] for update in updates_of(folder).values()]


@pytest.mark.parametrize("kept", ["memory", wide("disk")])
def test_a_job_loses_a_node_and_takes_it_in_again(
    clusters: Callable[[int], Cluster], warm_python: str, tmp_path: Path, kept: str
) -> None:
    cluster, run = clusters(2), tmp_path / "run"
    script = copied("elastic.py", tmp_path)
    with Job(cluster, warm_python, 2, script, str(run), str(STEPS), str(PAUSE), kept, elastic=True) as job:
        job.wait_for("step 10 on 4 ranks", node=0)
        # on a busy machine the first node may have begun alone, and was then ended with a checkpoint
        written, begun = {*run.glob("step-*")}, job.text(0).count("on 2 ranks")
        cluster.nodes[1].end()
        job.wait_for_more("on 2 ranks", begun, node=0)
        assert {*run.glob("step-*")} <= written or kept == "disk"
        cluster.boot(cluster.nodes[1])
        job.start_again(cluster.nodes[1])
        ended = job.end(60)
    assert [node.code for node in ended] == [0, 0], ended
    updates = [updates_of(run)[step] for step in range(1, STEPS + 1)]
    grids = [update["grid"].partition(" ")[0] for update in updates]
    changes = grids[:1] + [now for before, now in pairwise(grids) if now != before]
    assert changes[-3:] == ["4", "2", "4"] and len(changes) <= 4
    assert "the grid was 4 ranks = 1 pipeline x 4 data x 1 tensor until step" in ended[0].text
    assert "a batch still has 8 rows, 4 microbatches a data rank" in ended[0].text
    assert ("checkpoint loaded from the memory of the hosts" in ended[0].text) == (kept == "memory")
    expected = losses_of_one_process(warm_python, tmp_path / "undisturbed", STEPS)
    assert [update["loss"] for update in updates] == pytest.approx(expected, rel=1e-5)
