"""Checks and times one case: correctness of every tile, the fastest tile, seconds of every implementation.

Times are medians of interleaved rounds, the slowest process counts; interpreted kernels are not timed. Checks require
equal bits: inputs are whole numbers, whose sums are exact.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

from benchmarks.harness.budget import Budget
from benchmarks.harness.worker import last_line
from benchmarks.kernels.cases.case import short
from benchmarks.kernels.clock import nothing
from benchmarks.kernels.trial import settle
from benchmarks.overlap.cases import OverlapCase
from benchmarks.overlap.places import Place
from benchmarks.overlap.trial import OverlapTrial, Run, deviating
from engine.kernels.device import is_host
from engine.kernels.gpu.launch_shapes import Tile

Answer = TypeVar("Answer")
IN_KERNELS = ("fused", "copied")
IN_TURNS = "in turns"
"""Name of the fused implementation with both halves launched separately."""
ALLOWED = 2.0**-6
"""Maximum error relative to the largest entry, for sums in another order: two units of bf16."""
TUNED_SHARE = 0.35
"""Fraction of a case's time for the choice of a tile."""
COMMUNICATES, PLAIN = "communicating alone", "plain alone"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Numbers of timed samples per implementation, fewer if time is short."""

    rounds: int = 5
    samples: int = 7
    """Samples per round, 35 in all."""
    tuning: int = 5
    """Number of samples per tile."""


def run_case(case: OverlapCase, place: Place, seconds: float, sampling: Sampling) -> dict[str, Any]:
    """Checks, tunes and times a case; returns a JSON object.

    The first tile, the default, is always tried; others while their share of the time lasts. Interpreted kernels are
    checked in all tiles.
    """
    settle(place.device, "the case before")  # frees its memory: to make room while a rank waits would take for ever
    budget = Budget(seconds)
    try:
        trial = OverlapTrial(case, place)
    except RuntimeError as error:  # no memory that the ranks share, alike on all of them, or too little
        return describe(case) | {"error": last_line(error)}
    tuning = budget.part(TUNED_SHARE * seconds)
    host = is_host(place.device)
    found: dict[str, Any] = describe(case) | {"checks": {}, "tuned": {}}
    right: dict[str, Tile] = {}
    for number, sizes in enumerate(case.tiles):
        name, tile = name_of(sizes), Tile(*sizes, parts=2, described=False)
        if number and not host and not goes_on(place, tuning):
            found["tuned"][name] = "not tried: no time left"
            continue
        found["checks"][name] = check_ways(trial, tile, place)
        if found["checks"][name]["passed"]:
            right[name] = tile
            if not host:
                found["tuned"][name] = _tune(trial, tile, sampling)
    found["passed"] = bool(right) and not any(_is_wrong(check) for check in found["checks"].values())
    if right and not host:
        known = {name: taken for name, taken in found["tuned"].items() if isinstance(taken, float)}
        best = min(known, key=known.__getitem__, default=next(iter(right)))
        found["tile"] = next(sizes for sizes in case.tiles if name_of(sizes) == best)
        found["seconds"] = time_ways(trial, right[best], sampling, budget)
    return found


def describe(case: OverlapCase) -> dict[str, Any]:
    """Returns the description of a case as a JSON object."""
    row = asdict(case) | {"name": case.name, "dtype": short(case.dtype)}
    del row["tiles"]
    return row | {"sizes": case.sizes._asdict()}


def name_of(tile: tuple[int, int, int, int, int]) -> str:
    """Returns the name of a tile, such as "128x128x64 w8 s3"."""
    rows, columns, depth, warps, stages = tile
    return f"{rows}x{columns}x{depth} w{warps} s{stages}"


def check_ways(trial: OverlapTrial, tile: Tile, place: Place) -> dict[str, Any]:
    """Returns the largest error of every implementation; kernels must be exact."""
    trial.fill(whole_numbers=True)
    wanted = trial.expected()
    scale = max(float(one.abs().max()) for one in wanted)
    ways: dict[str, Run] = {IN_TURNS: lambda: trial.first_in_turns(tile), **trial.ways(tile)}
    rows: dict[str, Any] = {}
    for name, run in ways.items():

        def deviation(run: Run = run) -> float:
            largest = max(deviating(run(), wanted))
            trial.check()
            return largest

        answer = _guarded(trial, name, deviation)
        if isinstance(answer, float):
            (answer,) = place.longest([answer])
            rows[name] = {
                "deviation": answer,
                "passed": answer == 0.0 if _is_exact(name) else answer <= ALLOWED * scale,
            }
        else:
            rows[name] = {"error": answer, "passed": False}
    return {"ways": rows, "passed": all(row["passed"] for name, row in rows.items() if _is_exact(name))}


def _is_exact(way: str) -> bool:
    return way in (IN_TURNS, *IN_KERNELS)


def _is_wrong(check: Mapping[str, Any]) -> bool:
    """Whether a way gave a wrong result; one that did not run is a failure that is told apart."""
    return any("deviation" in row and not row["passed"] for row in check.get("ways", {}).values())


def _tune(trial: OverlapTrial, tile: Tile, sampling: Sampling) -> float | str:
    """Seconds of the fused way."""
    trial.fill(whole_numbers=False)
    run = trial.ways(tile)["fused"]

    def taken() -> float:
        samples = trial.place.clock.sample(nothing, run, sampling.tuning)
        trial.check()
        return median(samples)

    answer = _guarded(trial, "fused", taken)
    return trial.place.longest([answer])[0] if isinstance(answer, float) else answer


def time_ways(trial: OverlapTrial, tile: Tile, sampling: Sampling, budget: Budget) -> dict[str, Any]:
    """Returns the seconds of every implementation and part, equal on all ranks; the order changes each round."""
    trial.fill(whole_numbers=False)
    runs = trial.ways(tile) | trial.parts(tile) | trial.alone(tile)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    order = random.Random(0)
    for turn in range(sampling.rounds + 1):  # the first one is warm-up
        if turn > 1 and not goes_on(trial.place, budget):
            break
        for name in order.sample(list(runs), len(runs)):
            if name in errors:
                continue

            def sampled(run: Run = runs[name], count: int = sampling.samples if turn else 2) -> list[float]:
                taken = trial.place.clock.sample(nothing, run, count)
                trial.check()
                return taken

            answer = _guarded(trial, name, sampled)
            if isinstance(answer, str):
                errors[name] = answer
            elif turn:
                samples[name] += answer
    return {name: {"error": errors[name]} if name in errors else _summary(trial, samples[name]) for name in runs}


def _summary(trial: OverlapTrial, samples: list[float]) -> dict[str, Any]:
    middle, least, most = trial.place.longest([median(samples), min(samples), max(samples)])
    return {"seconds": middle, "spread": [least, most], "count": len(samples)}


def goes_on(place: Place, budget: Budget) -> bool:
    """Returns True if time is left, equal on all ranks."""
    return place.longest([float(not budget.left)]) == [0.0]


def _guarded(trial: OverlapTrial, name: str, work: Callable[[], Answer]) -> Answer | str:
    """What ``work`` gives, or its error in a line.

    Raises:
        BrokenDeviceError: the device does not answer any more.
    """
    try:
        return work()
    except Exception as error:
        told = last_line(error)
    settle(trial.place.device, name)
    return told
