"""Which ranks share a node: the 32 workers of the documents, and groups that cross nodes."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from benchmarks.harness.figures import FOLDER
from engine.parallel.grid import Grid, Order
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.links import Links, placement_picture, tensor_groups_cross

WORKERS = Grid(pp=4, dp=2, tp=4)
"""4 pipeline x 4 tensor x 2 data on 8 nodes of 4."""
STAGES_FIRST = Grid(**WORKERS.sizes, order="tp-pp-dp")


def test_32_workers_keep_their_tensor_groups_within_nodes() -> None:
    assert [sorted({rank // 4 for rank in group}) for group in WORKERS.groups("tp")] == [[node] for node in range(8)]
    pairs = sorted(tuple(sorted({rank // 4 for rank in group})) for group in WORKERS.groups("dp"))
    assert pairs == [(node, node + 1) for node in range(0, 8, 2) for _ in range(4)]
    for line in WORKERS.groups("pp"):
        assert {there // 4 - here // 4 for here, there in pairwise(line)} == {2}


def test_stages_of_a_replica_may_be_neighbours_and_data_ranks_the_farthest() -> None:
    assert [sorted({rank // 4 for rank in group}) for group in STAGES_FIRST.groups("tp")] == [[n] for n in range(8)]
    for line in STAGES_FIRST.groups("pp"):
        assert {there // 4 - here // 4 for here, there in pairwise(line)} == {1}
    assert {pair[1] // 4 - pair[0] // 4 for pair in STAGES_FIRST.groups("dp")} == {4}


def test_links_follow_the_order() -> None:
    """On nodes of 8, tensor 2 and pipeline 4 fill a node: stages then send inside it, and data ranks all go out."""
    layout = TrainingLayout(dp=4, tp=2, pp=4)
    near, far = (Links(replace(layout, order=order), load_gpu("h100"), 8) for order in get_args(Order))
    out = near.hop().rate  # a GPU's share of the way out
    assert near.ring("dp+cp").rate > out and near.ring("tp") == far.ring("tp")
    assert far.hop() == far.ring("tp") and far.ring("dp+cp").rate == pytest.approx(out)
    wide = Links(replace(layout, pp=8, order="tp-pp-dp"), load_gpu("h100"), 8)
    assert wide.hop().rate == pytest.approx(4 * out), "two of eight ranks share the way out of a node"


def test_the_picture_of_the_documents_is_theirs() -> None:
    kept = json.loads((FOLDER / "placement.json").read_text(encoding="utf-8"))["text"]
    assert kept == f"```\n{placement_picture(WORKERS, 4)}\n```"
    assert placement_picture(WORKERS, 4).splitlines()[2].split() == ["1", "4-7", "0", "1", "0-3"]
    kept = json.loads((FOLDER / "placement-stages.json").read_text(encoding="utf-8"))["text"]
    assert kept == f"```\n{placement_picture(STAGES_FIRST, 4)}\n```"
    assert placement_picture(STAGES_FIRST, 4).splitlines()[2].split() == ["1", "4-7", "1", "0", "0-3"]


@pytest.mark.parametrize(("tp", "node", "crosses"), [(4, 4, False), (4, 8, False), (8, 4, True), (3, 4, True)])
def test_groups_that_cross(tp: int, node: int, crosses: bool) -> None:
    assert tensor_groups_cross(tp, node) is crosses
