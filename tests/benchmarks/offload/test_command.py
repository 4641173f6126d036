"""The benchmark of updates on the host runs, and its contenders make the same update."""

from pathlib import Path

import pytest
import torch

from benchmarks.offload.command import contenders, main
from benchmarks.offload.disk import APART, MIXED, UPDATE
from benchmarks.offload.memory_limit import main as limited


@pytest.mark.long
def test_every_contender_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--elements", "4096", "--rounds", "1", "--peers", "none"]) == 0
    finally:
        torch.set_num_threads(threads)
    told = capsys.readouterr().out
    for row in (*contenders(64, "none"), "on the device", "half of it on the host"):
        assert row in told


@pytest.mark.long
def test_contenders_make_an_update() -> None:
    for name, (work, size) in contenders(256, "none").items():
        work()
        work()
        assert size >= 8, name


@pytest.mark.long
def test_updates_from_disk_are_measured_beside_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--elements", "65536", "--rounds", "1", "--disk", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    told = capsys.readouterr().out
    assert all(row in told for row in (MIXED, APART, UPDATE)) and not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_of_four_times_the_limit_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    layers = {1: "28", 2: "51"}[ranks]
    assert limited(["--ranks", str(ranks), "--layers", layers, "--steps", "2", "--folder", str(tmp_path)]) == 0
    assert "losses equal; the state is 4 times the limit" in capsys.readouterr().out
