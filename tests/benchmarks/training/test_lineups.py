"""Which rows a choice of groups gives, and what they ask of Trine's configuration."""

from collections import Counter

import pytest

from benchmarks.harness.report import Baseline, Comparison
from benchmarks.peers.trine import make_config
from benchmarks.peers.workload import Workload, make_rows
from benchmarks.training.lineups import DDP, GROUPS, ONE, Group, make_lineup
from engine.config import load_config


def test_all_groups_are_one_table() -> None:
    lineup = make_lineup(ranks=4)
    names = [mode.name for mode in lineup.modes]
    assert names[0] == ONE
    assert max(Counter(names).values()) == 1
    assert {"Trine ZeRO-1", "torch DTensor tp4", "Trine tp4", "torch pipelining pp4", "Trine pp4"} < set(names)
    assert lineup.baseline == Baseline("x DDP", (DDP, f"{DDP} again (control)"))


@pytest.mark.parametrize("group", GROUPS)
def test_every_comparison_has_its_rows(group: Group) -> None:
    lineup = make_lineup(ranks=4, groups=(group,))
    names = {mode.name for mode in lineup.modes}
    assert names >= set(lineup.baseline.modes)
    for asked in lineup.comparisons:
        assert names >= {asked.mode, asked.peer, asked.control or asked.peer}
    assert {asked.mode for asked in lineup.comparisons} == {
        m.name for m in lineup.modes if m.kind == "trine" and m.watched
    }


def test_tensor_parallelism_is_held_against_dtensor_and_one_process() -> None:
    lineup = make_lineup(ranks=4, groups=("tp",))
    assert lineup.comparisons == (
        Comparison("Trine tp4", "torch DTensor tp4", limit=0.5),
        Comparison("Trine tp4", ONE),
    )
    assert lineup.baseline == Baseline("x one", (ONE,))


def test_only_data_ranks_share_the_batch() -> None:
    workload = Workload()
    for mode in make_lineup(ranks=4).modes:
        parts = [make_rows(mode, workload, 7, rank) for rank in range(mode.ranks)]
        whole = make_rows(make_lineup(4).modes[0], workload, 7, 0)
        if mode.axis == "data":
            assert sum(len(part) for part in parts) == len(whole)
        else:
            assert all(part.equal(whole) for part in parts)


def test_the_configurations_ask_for_the_grid() -> None:
    modes = {mode.name: mode for mode in make_lineup(ranks=4).modes}
    grids = {}
    for name in ("Trine ZeRO-1", "Trine tp4", "Trine pp4"):
        config = load_config(make_config(modes[name], Workload()), 4)
        grids[name] = (config.dp, config.tp, config.pp, config.micro, config.accumulation)
    assert grids == {"Trine ZeRO-1": (4, 1, 1, 4, 1), "Trine tp4": (1, 4, 1, 16, 1), "Trine pp4": (1, 1, 4, 4, 4)}
