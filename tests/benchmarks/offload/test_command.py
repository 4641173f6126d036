"""The benchmark of updates on the host runs, and its contenders make the same update."""

import pytest
import torch

from benchmarks.offload.command import contenders, main


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
