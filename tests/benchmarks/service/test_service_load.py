"""Load on the training service: a short run has its table, and its verdict depends on updates and memory."""

import pytest

from benchmarks.service.command import ACCEPT, ECHO, GROWTH_BYTES, RESULT_BYTES, judged, main

MIB = 1 << 20


def test_a_load_is_judged_by_its_updates_and_by_memory() -> None:
    most = GROWTH_BYTES + 20 * RESULT_BYTES
    assert judged(10, 0, (MIB, MIB + most)) == (
        True,
        f"10 updates, 0 of them lost, doubled or crossed; memory of the server: 1.0 MiB at the begin, "
        f"{1 + most / MIB:.1f} MiB at the end with 20 results retained -> pass",
    )
    for steps, wrong, growth in ((10, 1, 0), (10, 0, most + 1), (0, 0, 0)):
        assert not judged(steps, wrong, (MIB, MIB + growth))[0], (steps, wrong, growth)


def test_a_short_load_passes_and_prints_its_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--clients", "3", "--seconds", "0.5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("| 3 clients | requests | median | 95 % | 99 % | a second |") and "-> pass" in text
    assert f"| {ECHO} |" in text and f"| {ACCEPT} |" in text
