"""Host time of a block: what is split off the seconds of two steps, and the table of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.harness.sent_bytes import RingCounter
from benchmarks.peers.registry import make_trainer
from benchmarks.peers.workload import Axis, Mode, Workload, make_rows
from benchmarks.training.host_time import (
    ALONE,
    APART,
    COLUMNS,
    FEW,
    MANY,
    PLAIN,
    HostTime,
    cells,
    chosen_modes,
    split,
    table,
)
from engine.models.decoder import DecoderConfig
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def test_the_fixed_time_of_a_step_is_told_from_that_of_its_microbatches() -> None:
    steps, layers, block, fixed = 10, 24, 500e-6, 3e-3
    for one in chosen_modes(("dp", "tp", "pp")):
        blocks = layers / (one.mode.ranks if one.mode.axis == "pipeline" else 1)
        seconds = {
            (one.mode.name, count): (fixed + count * blocks * block) * steps * one.mode.ranks for count in (FEW, MANY)
        }
        assert split(one, seconds, layers, steps) == pytest.approx((block, fixed)), one.mode.name


def test_what_is_added_is_paired_by_round() -> None:
    modes = chosen_modes(("dp",))[:2]
    plain, ddp = (one.mode.name for one in modes)
    rounds = [
        {plain: HostTime(400e-6, 1e-3), ddp: HostTime(500e-6, 4e-3)},
        {plain: HostTime(800e-6, 1e-3), ddp: HostTime(1000e-6, 4e-3)},
        {plain: HostTime(400e-6, 1e-3), ddp: HostTime(560e-6, 4e-3)},
    ]
    found = cells(modes, rounds)
    assert plain == PLAIN
    assert [found[ddp, column] for column in COLUMNS] == ["560", "+160", "1.25", "4.0", ""]
    assert table(found).splitlines()[2].split()[-4:] == ["560", "+160", "1.25", "4.0"]


def test_collectives_are_taken_off_where_they_are_measured() -> None:
    chosen = chosen_modes(("tp",))
    plain, _, trine, bare = (one.mode.name for one in chosen)
    assert bare == trine + ALONE
    times = {name: HostTime(block, 1e-3) for name, block in ((plain, 300e-6), (trine, 900e-6), (bare, 150e-6))}
    found = cells([one for one in chosen if one.mode.name in times], [times])
    assert (found[trine, "added"], found[trine, APART], found[bare, APART]) == ("+600", "+450", "")


def counted(axis: Axis) -> list[tuple[int, int]]:
    """Body of a rank: bytes and calls of a trained step and of its collectives alone."""
    workload = replace(Workload(), decoder=DecoderConfig(layers=2, width=32, heads=2, context=8), sequences=4)
    mode = Mode("", "trine, collectives alone", 2, 2, stage=3 if axis == "data" else 0, axis=axis)
    trainer = make_trainer(mode, workload)
    found = []
    for step in range(3):
        with RingCounter() as counter:
            trainer.step(make_rows(mode, workload, step, dist.get_rank()))
        found.append((counter.sent, counter.calls))
    return found[1:]


@pytest.mark.parametrize("axis", ["data", wide("tensor")])
def test_collectives_alone_are_those_of_a_step(run_ranks: RunRanks, axis: Axis) -> None:
    for trained, alone in run_ranks(counted, 2, axis):
        assert trained == alone
        assert trained[1] > 10
