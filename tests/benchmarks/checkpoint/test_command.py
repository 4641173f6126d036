"""The benchmark of checkpoints: a tiny run of all ways, its arithmetic, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint import command
from benchmarks.checkpoint.command import BASES, GOALS, Size, check, choose_size, conclude, measure
from benchmarks.checkpoint.formats import decoder_shapes, make_landing
from benchmarks.checkpoint.report import Goal, Sample, judge, table

TINY = Size(width=128, layers=1, vocabulary=256)


def test_a_tiny_run_has_all_rows_and_ratios(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (rounds,) = run_ranks(measure, 1, TINY, 1, tmp_path)
    text, figures, _ = conclude(rounds)
    found: dict[str, set[str]] = {part: set() for part in BASES}
    for sample in rounds[0]:
        assert sample.seconds > 0 and sample.bytes > 0 and sample.mode not in found[sample.part]
        found[sample.part].add(sample.mode)
    everyone = {"Trine", "raw", "safetensors", "torch.save", "DCP, 1 thread", "DCP, 2 threads"}
    assert found == {
        "stall": {"Trine", "memcpy", "dcp.async_save", "dcp.async_save, kept memory", "torch.save"},
        "write": everyone - {"raw"} | {"raw, buffered", "raw O_DIRECT", "Trine, image to disk"},
        "read cold": everyone | {"raw O_DIRECT"},
        "read warm": everyone,
        "rows cold": everyone,
    }
    assert all(any(line.startswith(part) for line in text.splitlines()) for part in BASES)
    assert [verdict["figure"] > 0 for verdict in figures["verdicts"][:-1]] == [True] * (len(GOALS) - 1)
    assert json.loads(json.dumps(figures)) == figures
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [_round(memcpy=1.0, trine=1.1), _round(memcpy=4.0, trine=4.8), _round(memcpy=2.0, trine=2.6)]
    slower = judge(rounds, Goal("stall", "Trine", "memcpy", at_most=1.2))
    assert slower.figure == pytest.approx(1.2) and slower.passed
    assert str(slower) == "stall: Trine takes 1.20x the time of memcpy; at most 1.2 -> pass"
    faster = judge(rounds, Goal("stall", "memcpy", "Trine", at_least=5))
    assert faster.figure == pytest.approx(1.2) and not faster.passed
    assert str(faster) == "stall: memcpy is 1.20x as fast as Trine; at least 5 -> FAIL"
    told = judge(rounds, Goal("stall", "memcpy", "Trine"))
    assert told.passed and str(told) == "stall: memcpy is 1.20x as fast as Trine; no goal"


def test_bytes_from_the_disk_are_held_against_those_that_are_wanted() -> None:
    samples = [[Sample("rows cold", "Trine", 1.0, 1.0, 100, disk)] for disk in (101, 111, 400)]
    verdict = judge(samples, Goal("rows cold", "Trine", at_most=1.1))
    assert (verdict.figure, verdict.passed) == (1.11, False)
    assert str(verdict) == "rows cold: Trine reads 1.11x the wanted bytes from the disk; at most 1.1 -> FAIL"


def test_a_table_has_the_fastest_first() -> None:
    lines = table([_round(memcpy=1.0, trine=3.0), _round(memcpy=1.0, trine=2.0)], {"stall": "memcpy"}).splitlines()
    assert [line.split()[0] for line in lines] == ["stall", "------", "memcpy", "Trine"]
    assert lines[3].split() == ["Trine", "2.500", "2.000-3.000", "0.42", "2.50", "0.833"]


def test_sizes_are_whole_layers() -> None:
    assert choose_size(0).layers == choose_size(1.3).layers == 1
    assert choose_size(3.0).layers == 3
    assert choose_size(1.3).bytes == pytest.approx(1.33e9, rel=0.01)
    assert decoder_shapes(4096, 1, 32000)["layer0_down"] == (4096, 11008)


def test_the_landing_is_aligned_and_has_the_values() -> None:
    tensors = {"a": torch.arange(5.0), "b": torch.arange(32.0).view(8, 4)}
    landing = make_landing(tensors)
    assert landing.offset(landing.tensors["a"]) == 0 and landing.offset(landing.tensors["b"]) == 64
    assert torch.frombuffer(landing.memory, dtype=torch.uint8).data_ptr() % 4096 == 0
    assert all(torch.equal(landing.tensors[name], values) for name, values in tensors.items())
    assert torch.equal(landing.rows()["b"], tensors["b"][2:4])


def test_wrong_values_are_no_result() -> None:
    with pytest.raises(AssertionError, match="has read other values"):
        check("torch.save", [(torch.zeros(2), torch.ones(2))])


def test_a_missed_goal_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    everything = [Sample(part, mode, 1.0, 1.0, 10**9, 0) for part, mode in _asked()]
    monkeypatch.setattr(command, "measure", lambda *_: [everything])
    assert command.main(["--out", str(tmp_path / "new")]) == 1  # nothing is 5 times as fast as DCP
    written = json.loads((tmp_path / "new" / "checkpoint.json").read_text())
    assert [verdict["passed"] for verdict in written["verdicts"]].count(False) == 4
    assert len(written["rounds"][0]) == len(everything)


def _asked() -> set[tuple[str, str]]:
    pairs = {(goal.part, mode) for goal in GOALS for mode in (goal.mode, goal.peer) if mode}
    return pairs | set(BASES.items())


def _round(memcpy: float, trine: float) -> list[Sample]:
    return [
        Sample("stall", "memcpy", memcpy, 1.0, 10**9, 0),
        Sample("stall", "Trine", trine, trine / 3, 10**9, 0),
    ]
