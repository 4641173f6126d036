"""Host time of a block: what is split off the seconds of two steps, and the table of it."""

import pytest

from benchmarks.training.host_time import COLUMNS, FEW, MANY, PLAIN, HostTime, cells, chosen_modes, split, table


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
    assert [found[ddp, column] for column in COLUMNS] == ["560", "+160", "1.25", "4.0"]
    assert table(found).splitlines()[2].split()[-4:] == ["560", "+160", "1.25", "4.0"]
