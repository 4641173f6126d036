"""``torchrun -m benchmarks.planning.host_ranks OUT ROUNDS``: the rates of this host, and steps of the cases of a world.

Rates are measured before the steps and once more after them, and their mean counts: a shared machine's speed drifts.
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import engine
from benchmarks.planning.host_cases import CASES, HostCase
from engine.launch.planner.rank_measurements import MeasuringRanks
from engine.planning.host_step.host_rates import EngineSeconds, HostRates, SecondsTable

WARM, STEPS = 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and let rank 0 write what was measured."""
    out, rounds = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("trine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks, found = MeasuringRanks(), dict[str, list[float]]()
    try:
        before = ranks.measure()
        for _ in range(int(rounds)):
            for case in CASES:
                if case.world == ranks.world.size:
                    found.setdefault(case.name, []).extend(ranks.mean(_steps(case)))
        rates = mean_rates(before, ranks.measure())
    finally:
        ranks.close()
    if ranks.world.rank == 0:
        told = {"rates": rates.as_json(), "steps": found}
        Path(out).write_text(json.dumps(told), encoding="utf-8")
    return 0


def _steps(case: HostCase) -> list[float]:
    seconds = []
    with engine.initialize(case.model(), case.settings(), case.loss_fn, case.row()) as eng:
        batches = case.batches(eng.grid.coord().dp)
        for _ in range(WARM + STEPS):
            batch = next(batches)
            began = time.perf_counter()
            eng.train_batch(batch)
            seconds.append(time.perf_counter() - began)
    return seconds[WARM:]


def mean_rates(one: HostRates, other: HostRates) -> HostRates:
    """The mean of two measurements of the same tables."""

    def table(first: SecondsTable, second: SecondsTable) -> SecondsTable:
        seconds = tuple((a + b) / 2 for a, b in zip(first.seconds, second.seconds, strict=True))
        return replace(first, seconds=seconds)

    names = ("step", "microbatch", "operator", "handover", "gather")
    return replace(
        one,
        operators={name: table(known, other.operators[name]) for name, known in one.operators.items()},
        collectives={name: table(known, other.collectives[name]) for name, known in one.collectives.items()},
        overlap=(one.overlap + other.overlap) / 2,
        engine=EngineSeconds(**{name: (getattr(one.engine, name) + getattr(other.engine, name)) / 2 for name in names}),
    )


def typical(seconds: Sequence[float]) -> float:
    """The median of all steps of all rounds."""
    return median(seconds)


if __name__ == "__main__":
    sys.exit(main())
