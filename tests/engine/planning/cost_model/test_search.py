"""The search: every layout once, the winner is the least, and the nearest change is one."""

import pytest

from engine.errors import PlanError
from engine.planning.cost_model.estimate import StepModel
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.search import (
    USABLE,
    SearchResult,
    Wish,
    changes,
    layouts,
    nearest,
    search_layouts,
)
from engine.planning.cost_model.workload import DecoderShape

GPU = load_gpu("h100")
WORK = DecoderShape(
    layers=80, width=8192, heads=64, kv_heads=8, vocabulary=128256, context=8192, hidden=28672, gated=True
).workload()


def searched(world: int, rows: int, memory: float = GPU.memory_bytes) -> SearchResult:
    wish = Wish(world=world, rows=rows, node=8, memory_bytes=memory)
    return search_layouts(WORK, StepModel(WORK, GPU, 8), wish)


def test_a_thousand_gpus() -> None:
    found = searched(1024, 1024)
    assert found.grids == 28  # tensor 1 to 8 x pipeline 1 to 64, data what is left
    every = list(layouts(WORK, Wish(world=1024, rows=1024, node=8, memory_bytes=1.0)))
    assert found.tried == len(every) == len(set(every))
    assert all(one.world == 1024 and one.rows == 1024 and 8 % one.tp == 0 for one in every)
    times = [one.seconds.total for one in found.ranked]
    assert times == sorted(times) and max(one.memory.total for one in found.ranked) <= USABLE * GPU.memory_bytes


def test_the_nearest_that_fits_changes_the_least() -> None:
    found = searched(64, 64)
    given = TrainingLayout(dp=8, tp=8, stage=0, micro=8, recomputation="none")
    change = nearest(found, given)
    assert change is not None
    counts = [len(changes(given, one.layout)) for one in found.ranked]
    assert len(changes(given, change.layout)) == min(counts)


def test_changes_are_named_by_setting() -> None:
    before = TrainingLayout(dp=8, micro=4, microbatches=1)
    assert changes(before, before) == {}
    assert changes(before, TrainingLayout(dp=8, micro=2, microbatches=2)) == {"microbatches": ((4, 1), (2, 2))}
    assert changes(before, TrainingLayout(dp=8, micro=4, stage=1)) == {"zero": ((0, "step"), (1, "step"))}


def test_nothing_fits_and_nothing_divides() -> None:
    assert not searched(8, 8, memory=2e9).ranked
    with pytest.raises(PlanError, match="no grid of 1024 ranks divides 7 rows"):
        searched(1024, 7)
