"""``torchrun -m benchmarks.planning.host_ranks OUT SECONDS``: rates of this host and steps of cases, in turn.

    round    every rate once, then a step of every case of as many ranks, after one that does not count

Engines and communicators stay open, so that a round takes seconds, and rates and steps meet the same machine. Rounds
end in time: none begins that would be over after SECONDS, but for the first few.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engine
from benchmarks.planning.host_cases import CASES, HostCase
from benchmarks.planning.quiet_rounds import measured_span
from engine.engine import Engine
from engine.launch.planner.calibration.rank_measurements import MeasuringRanks

LEAST_ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and let rank 0 write what was measured."""
    out, seconds = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("trine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        ranks = MeasuringRanks()
        stack.callback(ranks.close)
        running = [_open(case, stack) for case in CASES if case.world == ranks.world.size]
        told = {"rounds": _rounds(ranks, running, float(seconds))}
    if ranks.world.rank == 0:
        Path(out).write_text(json.dumps(told), encoding="utf-8")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A case that trains."""

    name: str
    engine: Engine
    batches: Iterator[dict[str, Tensor]]


def _open(case: HostCase, stack: ExitStack) -> _Running:
    opened = stack.enter_context(engine.initialize(case.model(), case.settings(), case.loss_fn, case.row()))
    running = _Running(name=case.name, engine=opened, batches=case.batches(opened.grid.coord().dp))
    opened.train_batch(next(running.batches))  # the first step reduces nothing early
    return running


def _rounds(ranks: MeasuringRanks, running: Sequence[_Running], seconds: float) -> list[dict[str, Any]]:
    began, rounds = time.perf_counter(), list[dict[str, Any]]()
    spent = longest = 0.0
    while len(rounds) < LEAST_ROUNDS or spent + longest <= seconds:
        rounds.append(_round(ranks, running))
        (now,) = ranks.mean([time.perf_counter() - began])  # all ranks end after the same round
        spent, longest = now, max(longest, now - spent)
        if ranks.world.rank == 0:
            others = f"others took {rounds[-1]['others']:.0%} of the processors"
            place = f"ranks {ranks.world.size}, round {len(rounds)}, {spent:.0f} of {seconds:.0f} s"
            print(f"{place}: {others}", flush=True)
    return rounds


def _round(ranks: MeasuringRanks, running: Sequence[_Running]) -> dict[str, Any]:
    with measured_span(ranks) as span:
        rates = ranks.sample()
    steps = {each.name: _step(ranks, each) for each in running}
    return {"rates": rates.as_json(), "others": span.others, "steps": steps}


def _step(ranks: MeasuringRanks, running: _Running) -> tuple[float, float]:
    """(seconds of a step, what others took meanwhile); the mean over the ranks."""
    running.engine.train_batch(next(running.batches))
    batch = next(running.batches)
    with measured_span(ranks) as span:
        running.engine.train_batch(batch)
    (seconds,) = ranks.mean([span.seconds])
    return seconds, span.others


if __name__ == "__main__":
    sys.exit(main())
