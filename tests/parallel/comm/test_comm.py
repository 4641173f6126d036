"""Collectives are counted by formula, recorded in order and named when they fail. No processes here."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.comm.backend import Channel, Link, RecordingBackend, Reduction, Wait, link_rounds, state_link
from engine.parallel.comm.comm import FLIGHT_RECORD_LENGTH, Comm, Pending
from engine.parallel.comm.traffic import Op, Record, Tally, Traffic
from engine.parallel.grid import Axis, Grid

DTYPES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.int64: 8}
dtypes_st = st.sampled_from(list(DTYPES))


def recording(pp: int = 1, dp: int = 1, tp: int = 1, rank: int = 0) -> Comm:
    """A Comm that moves nothing."""
    grid = Grid(pp=pp, dp=dp, tp=tp, rank=rank)
    return Comm(grid, RecordingBackend(grid))


def issue(comm: Comm, op: Op, full: Tensor, axis: Axis, label: str) -> Pending:
    """One collective whose shard is the own slice of ``full``."""
    own = full.view(comm.grid.size(axis), -1)[comm.grid.index(axis)]
    if op == "all_reduce":
        return comm.all_reduce(full, axis, label)
    return (
        comm.reduce_scatter(own, full, axis, label)
        if op == "reduce_scatter"
        else comm.all_gather(full, own, axis, label)
    )


# counting


@given(st.integers(2, 9), st.integers(1, 50), dtypes_st)
def test_each_collective_counts_what_a_ring_sends(ranks: int, shard: int, dtype: torch.dtype) -> None:
    comm, full = recording(dp=ranks), torch.zeros(shard * ranks, dtype=dtype)
    ops: tuple[Op, ...] = ("reduce_scatter", "all_gather", "all_reduce")
    for op in ops:
        issue(comm, op, full, "dp", op).wait()
    ring = shard * DTYPES[dtype] * (ranks - 1)  # every slice but one's own leaves once
    sent = {row.label: (row.calls, row.bytes) for row in comm.tally.rows()}
    assert sent == {"reduce_scatter": (1, ring), "all_gather": (1, ring), "all_reduce": (1, 2 * ring)}
    assert comm.tally.bytes() == 4 * ring


def test_tally_keeps_axes_and_labels_apart() -> None:
    comm = recording(pp=2, dp=3, tp=4)
    for axis, label in (("dp", "a"), ("dp", "a"), ("dp", "b"), ("tp", "a"), ("pp", "a"), ("world", "a")):
        comm.all_reduce(torch.zeros(24), axis, label)
    assert comm.tally.rows() == (
        Traffic("dp", "a", 2, 2 * 2 * 96 * 2 // 3),
        Traffic("dp", "b", 1, 2 * 96 * 2 // 3),
        Traffic("pp", "a", 1, 2 * 96 // 2),
        Traffic("tp", "a", 1, 2 * 96 * 3 // 4),
        Traffic("world", "a", 1, 2 * 96 * 23 // 24),
    )


@pytest.mark.parametrize("axis", ["dp", "tp", "pp", "world"])
def test_an_axis_of_one_rank_sends_counts_and_changes_nothing(axis: Axis) -> None:
    comm, full = recording(), torch.arange(4.0)
    ops: tuple[Op, ...] = ("reduce_scatter", "all_gather", "all_reduce")
    for op in ops:
        issue(comm, op, full, axis, "x").wait()
    assert not comm.tally.rows() and not comm.records
    assert full.tolist() == [0, 1, 2, 3]


def test_a_copied_tally_stays_and_since_gives_the_difference() -> None:
    comm, full = recording(dp=2), torch.zeros(4)
    comm.all_reduce(full, "dp", "a")
    before = comm.tally.copy()
    comm.all_reduce(full, "dp", "b")
    comm.all_reduce(full, "dp", "b")
    assert before.rows() == (Traffic("dp", "a", 1, 16),)
    assert comm.tally.since(before).rows() == (Traffic("dp", "b", 2, 32),)
    assert comm.tally.since(Tally()).bytes() == 48


# recording


def test_records_come_in_the_order_of_issue_and_name_everything() -> None:
    comm, full = recording(dp=2, tp=2), torch.zeros(8, dtype=torch.bfloat16)
    issue(comm, "reduce_scatter", full, "dp", "gradients")
    issue(comm, "all_gather", full.float(), "tp", "activations")
    issue(comm, "all_reduce", full.double(), "world", "control")
    assert list(comm.records) == [
        Record(1, "reduce_scatter", "dp", "gradients", 8, "bfloat16"),
        Record(2, "all_gather", "tp", "activations", 8, "float32"),
        Record(3, "all_reduce", "world", "control", 8, "float64"),
    ]
    assert str(comm.records[0]) == "#1 reduce_scatter 'gradients' over dp, 8 x bfloat16"


def test_only_the_last_records_are_kept_but_all_are_counted() -> None:
    comm, scalar, calls = recording(dp=2), torch.zeros(()), FLIGHT_RECORD_LENGTH + 3
    for _ in range(calls):
        comm.all_reduce(scalar, "dp", "x").wait()
    assert [comm.records[0].sequence, comm.records[-1].sequence] == [4, calls]
    assert comm.tally.rows()[0].calls == calls


@pytest.mark.parametrize("rank", [0, 3])
def test_recording_backend_places_the_own_shard(rank: int) -> None:
    comm, full, shard = recording(pp=2, dp=2, rank=rank), torch.arange(6.0), torch.zeros(3)
    index = rank % 2
    comm.reduce_scatter(shard, full, "dp", "x").wait()
    assert shard.tolist() == [3 * index, 3 * index + 1, 3 * index + 2]
    comm.all_gather(full, torch.full((3,), 9.0), "dp", "x").wait()
    assert full.view(2, 3)[index].tolist() == [9, 9, 9] and full.view(2, 3)[1 - index].max() < 9


# failing


class Failing(RecordingBackend):
    """Fails when it is called, or when it is waited for."""

    def __init__(self, grid: Grid, at_once: bool) -> None:
        super().__init__(grid)
        self._at_once = at_once

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Raise now or later."""
        if self._at_once:
            self._fail()
        return self._fail

    def _fail(self) -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.7]\nframe #0: noise")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failing_collective_is_named_with_its_ranks(at_once: bool) -> None:
    grid = Grid(dp=2, tp=2, rank=3)
    comm = Comm(grid, Failing(grid, at_once))
    comm.all_gather(torch.zeros(4), torch.zeros(2), "dp", "parameters").wait()
    with pytest.raises(EngineError) as caught:
        comm.all_reduce(torch.zeros(4), "dp", "gradients").wait()
    assert str(caught.value) == (
        "collective #2 all_reduce 'gradients' over dp, 4 x float32 between ranks (1, 3) on rank 3 failed: "
        "Connection closed by peer [10.0.0.7]. A peer has probably stopped; look for the first traceback of the job, "
        "which shows the cause."
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failure_without_words_is_named_too() -> None:
    def silent() -> None:
        raise RuntimeError

    pending = Pending(silent, lambda: "collective #1")
    with pytest.raises(EngineError, match="collective #1 failed: RuntimeError"):
        pending.wait()


def test_waiting_twice_finishes_once() -> None:
    finished: list[int] = []
    finish: Callable[[], None] = lambda: finished.append(1)  # noqa: E731
    pending = Pending(finish)
    pending.wait()
    pending.wait()
    assert finished == [1]


# groups of links


def chain(stages: int, ranks: int) -> list[Link]:
    """Both flows between neighbouring stages, placed on ranks in turn, and state to the first rank."""
    links = [state_link(rank, 0) for rank in range(1, ranks)]
    for stage in range(stages - 1):
        here, there = stage % ranks, (stage + 1) % ranks
        links.append(Link(Channel("forward", stage, stage + 1), here, there))
        links.append(Link(Channel("backward", stage + 1, stage), there, here))
    return links


@pytest.mark.parametrize(
    ("stages", "ranks", "rounds"), [(2, 2, 2), (3, 3, 4), (8, 8, 4), (64, 64, 4), (16, 8, 8), (512, 64, 32)]
)
def test_groups_of_links_are_opened_in_as_many_rounds_however_long_the_pipeline_is(
    stages: int, ranks: int, rounds: int
) -> None:
    links = chain(stages, ranks)
    found = link_rounds([*links, *links])
    assert len(found) == rounds
    assert sorted(link for each in found for link in each) == sorted(
        link for link in links if link.channel.flow != "state"
    )
    for each in found:
        ends = [end for link in each for end in (link.source, link.target)]
        assert len(ends) == len(set(ends))
