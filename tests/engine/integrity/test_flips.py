"""Flipped bits of weights, masters and moments are found within N steps, with rank, tensor and bit, on every grid."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.engine.integrity.flips import GRIDS, KINDS, MOMENTS, Flip, Setting, Told, flip_all
from tests.tables import Table

RunRanks = Callable[..., list[Any]]
FLIPS = 200


def all_flips() -> dict[Setting, list[Flip]]:
    """Every grid with every stage and precision, each with every kind of state that it has; then at random."""
    chance, found = Random(5), defaultdict[Setting, list[Flip]](list)
    settings = [
        Setting(grid, stage, bf16, (1, 2, 3, 5)[(number + stage + 2 * bf16) % 4])
        for number, grid in enumerate(GRIDS)
        for stage in range(4)
        for bf16 in (False, True)
    ]
    wanted = [(setting, kind) for setting in settings for kind in KINDS if setting.bf16 or kind != "master"]
    while len(wanted) < FLIPS:
        setting = chance.choice(settings)
        wanted.append((setting, chance.choice([kind for kind in KINDS if setting.bf16 or kind != "master"])))
    for number, (setting, kind) in enumerate(wanted):
        after, rank = chance.randrange(setting.every), chance.randrange(setting.ranks)
        found[setting].append(Flip(kind, MOMENTS[chance.randrange(2)], rank, after, number))
    return found


ALL = all_flips()
OFTEN = {("dp2", 3, True), ("dp2", 1, False)}


@pytest.fixture(scope="module")
def flips_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Flips that were found and rightly named, by grid, stage and precision."""
    table = Table("integrity", "found, of flipped bits")
    yield table
    if request.config.getoption("--write-figures"):
        table.write()


def cases() -> list[Any]:
    marks = {True: [], False: [pytest.mark.long]}
    return [
        pytest.param(setting, flips, id=f"{setting.grid}-zero{setting.stage}-{'bf16' if setting.bf16 else 'fp32'}",
                     marks=marks[(setting.grid, setting.stage, setting.bf16) in OFTEN])
        for setting, flips in ALL.items()
    ]  # fmt: skip


def test_the_set_covers_everything() -> None:
    flips = [(setting, flip) for setting, many in ALL.items() for flip in many]
    assert len(flips) == FLIPS and len(ALL) == 48
    assert {(s.grid, f.kind, s.stage) for s, f in flips} == {(g, k, z) for g in GRIDS for k in KINDS for z in range(4)}
    assert {(s.grid, f.rank) for s, f in flips} == {
        (grid, rank) for grid, axes in GRIDS.items() for rank in range(math.prod(axes.values()))
    }
    assert {(f.kind, f.moment, s.every) for s, f in flips} >= {
        (k, m, n) for k in KINDS for m in MOMENTS for n in (2, 5)
    }


@pytest.mark.parametrize(("setting", "flips"), cases())
def test_every_flip_is_found_and_named(
    run_ranks: RunRanks, tmp_path: Path, flips_table: Table, setting: Setting, flips: list[Flip]
) -> None:
    by_rank: list[list[Told]] = run_ranks(flip_all, setting.ranks, setting, flips, str(tmp_path))
    problems = []
    for flip, *told in zip(flips, *by_rank, strict=True):
        where = told[flip.rank].where
        assert where is not None, flip
        name, bit = where
        said, right = told[0].said, f"on rank {flip.rank} ("
        soon = 1 <= told[0].steps <= setting.every
        alike = {(one.steps, one.said) for one in told} == {(told[0].steps, said)}
        named = right in said and f"bit {bit} of element" in said and f"{flip.kind} {name!r}" in said
        if not (soon and alike and named and said.count(" on rank ") == 1):
            problems.append((flip, where, told))
    column = f"ZeRO {setting.stage}, {'bf16' if setting.bf16 else 'fp32'}"
    flips_table.cells[setting.grid, column] = f"{len(flips) - len(problems)} of {len(flips)}"
    assert not problems
