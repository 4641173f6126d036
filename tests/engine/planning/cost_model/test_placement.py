"""Which ranks share a node: the 32 workers of the documents, and groups that cross nodes."""

import json
from itertools import pairwise

import pytest

from benchmarks.harness.figures import FOLDER
from engine.parallel.grid import Grid
from engine.planning.cost_model.placement import placement_picture, tensor_groups_cross

WORKERS = Grid(pp=4, dp=2, tp=4)
"""4 pipeline x 4 tensor x 2 data on 8 nodes of 4."""


def test_32_workers_keep_their_tensor_groups_within_nodes() -> None:
    assert [sorted({rank // 4 for rank in group}) for group in WORKERS.groups("tp")] == [[node] for node in range(8)]
    pairs = sorted(tuple(sorted({rank // 4 for rank in group})) for group in WORKERS.groups("dp"))
    assert pairs == [(node, node + 1) for node in range(0, 8, 2) for _ in range(4)]
    for line in WORKERS.groups("pp"):
        assert {there // 4 - here // 4 for here, there in pairwise(line)} == {2}


def test_the_picture_of_the_documents_is_theirs() -> None:
    kept = json.loads((FOLDER / "placement.json").read_text(encoding="utf-8"))["text"]
    assert kept == f"```\n{placement_picture(WORKERS, 4)}\n```"
    assert placement_picture(WORKERS, 4).splitlines()[2].split() == ["1", "4-7", "0", "1", "0-3"]


@pytest.mark.parametrize(("tp", "node", "crosses"), [(4, 4, False), (4, 8, False), (8, 4, True), (3, 4, True)])
def test_groups_that_cross(tp: int, node: int, crosses: bool) -> None:
    assert tensor_groups_cross(tp, node) is crosses
