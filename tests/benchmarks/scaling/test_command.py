"""A small job of the benchmark: it fills a file, and a second one goes on where the first has ended."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.figures import ROOT
from benchmarks.scaling.command import main
from benchmarks.scaling.record import read_record, write_record

TINY = (
    "--layers=2", "--width=16", "--heads=2", "--context=8", "--vocabulary=32", "--rows=8", "--micro=2",
    "--warmup=3", "--steps=1",
)  # fmt: skip


def measure(*options: str) -> int:
    """Body of a rank."""
    return main([*TINY, *options])


@pytest.mark.long
def test_two_ranks_measure_every_grid_and_go_on(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    assert run_ranks(measure, 2, f"--out={out}", "--rounds=1", "--modes=strong,weak", "--stages=1") == [0, 0]
    first = read_record(out)
    rows = {(row.mode, str(row.choice)) for row in first.rows}
    assert rows == {(mode, grid) for mode in ("strong", "weak") for grid in ("dp2, ZeRO 1", "tp2", "pp2")}
    for row in first.rows:
        assert row.seconds is not None and row.seconds > 0 and row.predicted is not None
        assert row.predicted.total > 0 and len(row.samples) == 1
        axis = str(row.choice)[:2]
        assert [each.axis for each in row.axes] == [axis] and row.waits[axis] > 0
    weak = next(row for row in first.rows if row.mode == "weak" and row.choice.dp == 2)
    assert weak.tokens == 2 * 8 * 8
    lost = replace(first, rows=tuple(replace(row, samples=()) if row.mode == "weak" else row for row in first.rows))
    write_record(lost, out)
    assert run_ranks(measure, 2, f"--out={out}", "--rounds=1", "--modes=strong,weak", "--stages=1") == [0, 0]
    again = read_record(out)
    assert again.machines == first.machines
    for old, new in zip(first.rows, again.rows, strict=True):
        assert old.key == new.key and len(new.samples) == 1
        assert (old.samples == new.samples) is (old.mode == "strong")


def test_a_file_of_another_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scaling.json"
    out.write_text(json.dumps({"version": 2, "task": {"micro": 3}, "peak_flops": None, "machines": [], "rows": []}))
    assert main([*TINY, f"--out={out}"]) == 1
    assert "give another --out" in capsys.readouterr().err


def test_a_render_needs_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scaling.json"
    out.write_text(json.dumps({"version": 2, "task": {}, "peak_flops": None, "machines": [], "rows": []}))
    assert main(["--render", str(out), "--svg", str(tmp_path / "scaling.svg")]) == 0
    assert capsys.readouterr().out.startswith("nodes  ranks")
    assert (tmp_path / "scaling.svg").read_text().startswith("<svg")


@pytest.mark.long
def test_the_launcher_starts_it(tmp_path: Path) -> None:
    out, script = tmp_path / "scaling.json", ROOT / "benchmarks" / "scaling" / "__main__.py"
    command = [sys.executable, "-m", "engine.launch.cli", "launch", "--ranks-per-node", "2", str(script)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run(
        [*command, *TINY, f"--out={out}", "--rounds=1", "--grids=pp2"],
        env=given, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    assert [str(row.choice) for row in read_record(out).rows] == ["pp2"]
