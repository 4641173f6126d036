"""``torchrun -m benchmarks.planning.host_ranks OUT ROUNDS``: the rates of this host, and steps of the cases of a world.

Rates are measured between the rounds of steps, since the speed of a shared machine drifts.
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

import engine
from benchmarks.planning.host_cases import CASES, HostCase
from engine.launch.planner.rank_measurements import MeasuringRanks

WARM, STEPS = 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and let rank 0 write what was measured."""
    out, rounds = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("trine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks, found, rates = MeasuringRanks(), dict[str, list[float]](), None
    try:
        for number in range(int(rounds)):
            if number == int(rounds) // 2:
                rates = ranks.measure()
            for case in CASES:
                if case.world == ranks.world.size:
                    found.setdefault(case.name, []).extend(ranks.mean(_steps(case)))
    finally:
        ranks.close()
    if ranks.world.rank == 0 and rates is not None:
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


def typical(seconds: Sequence[float]) -> float:
    """The median of all steps of all rounds."""
    return median(seconds)


if __name__ == "__main__":
    sys.exit(main())
