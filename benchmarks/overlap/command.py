"""Times matmuls that communicate inside the kernel, against chunked and plain collectives and torch's async-TP.

    python -m benchmarks overlap                        one GPU: virtual ranks; no GPU: tiny sizes, interpreted
    torchrun --nproc_per_node 8 -m benchmarks overlap   a rank on each GPU, on CPUs a process each

Checks every operation, size and tile, then times the tiles and all implementations in interleaved rounds. Virtual ranks
share one GPU: each has its own memory, stream and share of the SMs, and messages stay in that GPU's memory. So they
only compare implementations; rows for ``kernels/overlap.json`` need several GPUs. Interpreted kernels are checked and
not timed.

Writes OUT/overlap.json (all figures), OUT/overlap.md (the table) and, between GPUs, OUT/overlap_winners.json.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.budget import Budget
from benchmarks.harness.interpreted import interpret
from benchmarks.harness.worker import Worker, WorkerError
from benchmarks.kernels.roofline import about, clocks
from benchmarks.overlap.cases import RANKS, OverlapCase, llama_cases, tiny_cases
from engine.kernels.device import find_accelerator, is_host

QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""Environment with a hardware queue per stream and eager module loading, so that no rank blocks another."""
START_SECONDS, GRACE_SECONDS = 90.0, 60.0
LEAST_SECONDS = 12.0
"""Minimum seconds for one case."""
TINY_RANKS = (2, 4)


@dataclass(frozen=True, slots=True)
class OverlapOrder:
    """Command-line options of an overlap run."""

    ranks: tuple[int, ...]
    quick: bool
    interpreted: bool

    @property
    def cases(self) -> list[OverlapCase]:
        """All cases of the run."""
        return (tiny_cases if self.interpreted else llama_cases)(self.ranks, self.quick)


Ask = Callable[[str, float], dict[str, Any]]
"""Function (case name, seconds) that returns the result."""


def make_virtual_desk(order: OverlapOrder) -> Callable[..., dict[str, Any]]:
    """Returns a function that measures cases of virtual ranks in the calling process."""
    if order.interpreted:
        interpret()
    from benchmarks.overlap.measure import Sampling, run_case
    from benchmarks.overlap.places import VirtualPlace

    device = torch.device("cpu") if order.interpreted else torch.device(find_accelerator() or "cpu", 0)
    place = cache(lambda ranks: VirtualPlace(ranks, device))

    def answer(name: str, seconds: float) -> dict[str, Any]:
        if name == "about":
            return about(device) | {"clocks": clocks(device)}
        case = next(case for case in order.cases if case.name == name)
        return run_case(case, place(case.ranks), seconds, Sampling())

    return answer


class VirtualDesk:
    """Client of a measuring process, which is restarted after a crash."""

    def __init__(self, order: OverlapOrder) -> None:
        self._order = order
        self._worker: Worker | None = None

    def __call__(self, name: str, seconds: float) -> dict[str, Any]:
        """What was found, or {"error": ..}."""
        try:
            if self._worker is None:
                self._worker = Worker(make_virtual_desk, (self._order,))
            answer: dict[str, Any] = self._worker.ask((name, seconds), seconds + GRACE_SECONDS)
        except WorkerError as error:
            self.close()
            return {"error": str(error)}
        return answer

    def close(self) -> None:
        """Ends the worker process."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def measure_overlap(cases: Sequence[OverlapCase], budget: Budget, ask: Ask) -> list[dict[str, Any]]:
    """Measures every case, each with an equal share of the remaining time."""
    from benchmarks.overlap.measure import describe

    found = []
    for number, case in enumerate(cases):
        seconds = budget.left / (len(cases) - number)
        late = seconds < LEAST_SECONDS and case.of != "tiny"
        answer = {"error": "not measured: no time left"} if late else ask(case.name, max(seconds, 1.0))
        found.append(describe(case) | answer)
    return found


def conclude_overlap(found: dict[str, Any]) -> str:
    """Formats the results as Markdown: place, table, verdicts, failures."""
    from benchmarks.overlap.report import check_table, judge_overlap, overlap_failures, overlap_table

    cases = found["cases"]
    judged = [] if found["interpreted"] else cases
    verdicts = [str(verdict) for case in judged for verdict in judge_overlap(case)]
    parts = {} if found["interpreted"] else {"Goals": verdicts}
    parts["Failures"] = overlap_failures(cases)
    told = [f"## {title}\n\n" + ("\n".join(f"- {line}" for line in lines) or "none") for title, lines in parts.items()]
    tables = [check_table(cases)] if found["interpreted"] else [overlap_table(cases), check_table(cases)]
    return "\n\n".join([_head(found), *tables, *told]) + "\n"


def _head(found: dict[str, Any]) -> str:
    lines = [f"# Overlap on {found['about'].get('device', 'an unknown device')}", "", found["where"]]
    if found["interpreted"]:
        lines.append("**Interpreted on a CPU with tiny sizes: times would mean nothing, so none are taken.**")
    else:
        lines.append(
            "Medians of interleaved rounds, L2 flushed. hidden: (gated product + transfer - ours) / the shorter of the "
            "two; from host: rows of others lie in pinned memory and come over the link of the GPU; gated / plain: one "
            "rank alone, all rows there, over the plain product in the same tile (for a scatter: the product that "
            "sends over the plain one). Ways of many launches suffer where one process launches for many ranks."
        )
    return "\n".join([*lines, "", f"The run took {found['seconds']:.0f} s."])


def main(command: Sequence[str] | None = None) -> int:
    """Checks, measures, prints and writes results; returns 0 if every case was correct."""
    arguments = _parse(command)
    for name, value in QUEUES.items():
        os.environ.setdefault(name, value)  # before anything asks for a GPU
    interpreted = find_accelerator() is None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _between_processes(arguments, interpreted)
    ranks = tuple(arguments.ranks or (TINY_RANKS if interpreted else RANKS))
    order = OverlapOrder(ranks, arguments.quick, interpreted)
    budget = Budget(60 * arguments.minutes)
    where = f"{', '.join(map(str, ranks))} virtual ranks of one process on one device, by turns on a CPU."
    if interpreted:
        return _finish(arguments, order, budget, make_virtual_desk(order), where)
    desk = VirtualDesk(order)
    try:
        return _finish(arguments, order, budget, desk, f"{where} What they send goes through its memory, no link.")
    finally:
        desk.close()


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks overlap", description="Products that communicate.")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the results; benchmarks/results, or without a GPU runs/benchmarks",
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="in all; what does not fit is not measured")
    parser.add_argument("--quick", action="store_true", help="one model, or without a GPU one dtype")
    parser.add_argument("--ranks", type=int, nargs="+", help="virtual ranks; 2 4 8, without a GPU 2 4")
    return parser.parse_args(command)


def _between_processes(arguments: argparse.Namespace, interpreted: bool) -> int:
    if interpreted:
        interpret()
    from benchmarks.overlap.measure import Sampling, run_case
    from benchmarks.overlap.places import ProcessPlace
    from engine.parallel.comm.world import read_world

    world = read_world()
    place = ProcessPlace(world)
    order = OverlapOrder((world.size,), arguments.quick, is_host(world.device))
    budget = Budget(60 * arguments.minutes)
    cases = {case.name: case for case in order.cases}

    def ask(name: str, seconds: float) -> dict[str, Any]:
        if name == "about":
            return about(world.device) | {"clocks": clocks(world.device)}
        (alike,) = place.longest([seconds])  # every rank has as much time
        return run_case(cases[name], place, alike, Sampling())

    where = f"{world.size} processes, {'a GPU each' if not order.interpreted else 'gloo and shared memory'}."
    return _finish(arguments, order, budget, ask, where, world.rank)


def _finish(
    arguments: argparse.Namespace, order: OverlapOrder, budget: Budget, ask: Ask, where: str, rank: int = 0
) -> int:
    found: dict[str, Any] = {"interpreted": order.interpreted, "where": where}
    found["about"] = ask("about", START_SECONDS)
    found["cases"] = measure_overlap(order.cases, budget, ask)
    found["seconds"] = budget.spent
    if rank == 0:
        _write(arguments.out or Path("runs/benchmarks" if order.interpreted else "benchmarks/results"), found)
    return 0 if all(case.get("passed") for case in found["cases"]) else 1


def _write(folder: Path, found: dict[str, Any]) -> None:
    from benchmarks.kernels.winners import winners_json
    from benchmarks.overlap.winners import propose_overlap
    from engine.kernels.overlap import shipped_overlap

    text = conclude_overlap(found)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overlap.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "overlap.md").write_text(text, encoding="utf-8")
    if "a GPU each" in found["where"]:
        rows = propose_overlap(found["cases"], found["about"]["device"], shipped_overlap())
        (folder / "overlap_winners.json").write_text(winners_json(rows), encoding="utf-8")
    print(text)
