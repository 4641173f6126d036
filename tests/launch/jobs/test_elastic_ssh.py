"""An elastic job over ssh: it goes on without a host, takes it in again, and moves the store when its host is lost."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.jobs import copied
from tests.launch.jobs.hosts import Hosts
from tests.launch.jobs.test_ssh import QUICK, survivors

STEPS = {"power": 120, "cable": 300}
"""A host that is cut off has the store and trains on alone, until its guard ends it after 30 s without a word from the
launcher; then there are some left for the others."""


def grids(run: Path) -> list[str]:
    """Numbers of ranks that trained one after the other, as the updates tell them that were made last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = [line["grid"].partition(" ")[0] for line in {line["step"]: line for line in lines}.values()]
    return ranks[:1] + [now for before, now in pairwise(ranks) if now != before]


@pytest.mark.long
@pytest.mark.parametrize(("lost", "fault"), [(0, "power"), (1, "power"), (0, "cable")])
def test_a_host_is_lost_and_comes_back(hosts: Callable[[int], Hosts], tmp_path: Path, lost: int, fault: str) -> None:
    made, run = hosts(2), tmp_path / "run"
    copied("elastic.py", tmp_path)
    node = made.nodes[lost]
    launch = made.launch("--elastic", "1:2", "elastic.py", str(run), str(STEPS[fault]), "0.2", ssh=QUICK)
    launch.wait_for("step 10 on 2 ranks")
    if fault == "power":
        node.end()
    else:
        made.cluster.unplug(node)
    launch.wait_for(f"trine launch: {node.name} was lost (")
    launch.wait_for("on 1 ranks", 60)
    if fault == "power":
        made.cluster.boot(node)
        made.start_sshd(node)
    else:
        made.cluster.plug(node)  # what was cut off still runs there, and gives way
    launch.wait_for(f"trine launch: {node.name} answers again; torchrun starts there.", 20)
    ended = launch.end(90)
    assert ended.code == 0, ended.text
    assert ("node1 has the store now; torchrun starts anew on 1 hosts" in ended.text) is (lost == 0), ended.text
    assert grids(run) == ["2", "1", "2"] and not survivors(made)


@pytest.mark.long
def test_too_few_hosts_end_the_job(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    made = hosts(2)
    copied("elastic.py", tmp_path)
    launch = made.launch("--elastic", "2:2", "elastic.py", str(tmp_path / "run"), "1000", "0.1", ssh=QUICK)
    launch.wait_for("step 10 on 2 ranks")
    made.nodes.pop().end()
    ended = launch.end(40)
    assert ended.code == 255, ended.text
    assert ", and of 2 hosts or more only 1 are left; the job has ended on all hosts." in ended.text
    assert not survivors(made)
