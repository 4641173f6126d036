"""Which measurements of a shared machine count, and what others took of it."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.planning import quiet_rounds
from benchmarks.planning.quiet_rounds import busy_seconds, measured_span, quieter
from engine.parallel.comm.world import World


class LoneRank:
    """A job of one rank."""

    def __init__(self) -> None:
        self.world = World(0, 1, 0, torch.device("cpu"))
        self.alone = replace(self.world)
        self.met = 0

    def ready(self) -> None:
        self.met += 1

    def mean(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values)


@pytest.mark.parametrize(
    ("others", "places"),
    [
        ([0.5, 0.1, 0.4, 0.0, 0.3, 0.2], (1, 3, 5)),
        ([0.5, 0.1, 0.4, 0.0, 0.3, 0.2, 0.6], (1, 3, 4, 5)),
        ([0.3, 0.2, 0.1, 0.4], (0, 1, 2)),  # three, if there are as many
        ([0.2, 0.1], (0, 1)),
        ([0.0] * 6, (0, 1, 2)),  # the machine does not tell: the first half
    ],
)
def test_the_quieter_half_counts(others: Sequence[float], places: tuple[int, ...]) -> None:
    assert quieter(others) == places


def test_busy_seconds_are_what_is_neither_idle_nor_waits_for_a_disk(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    assert busy_seconds(stat) is None
    stat.write_text("cpu  100 20 30 9999 8888 4 5 6 7777 0\ncpu0 1 2 3 4\n")
    ticks = 100 + 20 + 30 + 4 + 5 + 6
    assert busy_seconds(stat) == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))


def test_what_others_took_is_what_was_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own, clock = iter([100.0, 103.0]), iter([10.0, 11.0]), iter([50.0, 52.0, 52.0])
    monkeypatch.setattr(quiet_rounds, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ranks = LoneRank()
    with measured_span(ranks) as span:
        pass
    assert (span.seconds, span.others, ranks.met) == (2.0, (3.0 - 1.0) / (2.0 * 2), 2)


def test_a_machine_that_tells_nothing_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_rounds, "busy_seconds", lambda: None)
    with measured_span(LoneRank()) as span:
        pass
    assert span.others == 0.0
