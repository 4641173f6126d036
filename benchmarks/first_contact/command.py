"""Checks and times the engine on one GPU in at most nine minutes, the most important parts first.

    python -m benchmarks first_contact [--minutes 9] [--out DIR] [--device auto|cuda|cpu] [--only NAME ..] [--list]
    python -m benchmarks first_contact --only correctness      the first of two runs
    python -m benchmarks first_contact --only speed            the second
    python -m benchmarks first_contact --store DIR ..          findings of both into docs/figures

Needs torch, triton, transformers and pytest. Every part is a process with a time limit, so that a kernel that breaks
the device, hangs or does not compile fails its part alone. ``--device cpu`` runs tiny sizes, to test the command.

Writes to DIR (default $OUT, else runs/first_contact) after each part: ``part-NAME.json``, ``summary.md``, ``log.txt``,
``profile.txt``, and the files of the benchmarks kernels and overlap.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first_contact.findings import Findings, counted
from benchmarks.first_contact.parts import SLOWER_ON_CPU, Part, make_parts, select
from benchmarks.first_contact.processes import Running

MANY_CASES = 8
"""Number of cases above which a part runs in several processes on a GPU."""
AT_ONCE = {"cuda": 6, "cpu": 2}
"""Number of concurrent untimed processes by device."""
LEAST_SECONDS = 8.0
"""Minimum seconds left for the start of another process."""


class Schedule:
    """Processes of a run: untimed ones concurrently, then timed ones alone."""

    def __init__(self, parts: Sequence[Part], findings: Findings, seconds: float, at_once: int) -> None:
        self._parts, self._findings, self._seconds, self._at_once = parts, findings, seconds, at_once
        self._environment = environment(findings.device)

    def run(self, scratch: Path) -> None:
        """Runs all parts within the time budget; no process remains when it returns or raises."""
        beside = [part for part in self._parts if part.beside]
        begun = False
        for part in self._parts:
            if not part.beside:
                self._run([(part, part.names)], 1)
                self._keep(part, scratch)
            elif not begun:
                begun = True
                self._run([group for each in beside for group in self._groups(each)], self._at_once)

    def _groups(self, part: Part) -> list[tuple[Part, tuple[str, ...]]]:
        share = 3 if len(part.names) > MANY_CASES and self._findings.device != "cpu" else 1
        return [(part, part.names[place::share]) for place in range(share)]

    def _run(self, waiting: list[tuple[Part, tuple[str, ...]]], at_once: int) -> None:
        running: list[Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    self._start(*waiting.pop(0), running)
                for one in list(running):
                    if not one.ended():
                        one.write_news(self._findings)
                        continue
                    running.remove(one)
                    if left := one.settle(self._findings):
                        waiting.append((one.part, left))
                    one.close()
                time.sleep(0.2)
        finally:
            for one in running:
                one.close()

    def _start(self, part: Part, names: tuple[str, ...], running: list[Running]) -> None:
        left = self._seconds - self._findings.seconds
        if left < LEAST_SECONDS:
            for name in names or ("process",):
                self._findings.add(part.name, name, None, 0.0, why="no time left")
            return
        limit = part.seconds * (SLOWER_ON_CPU if self._findings.device == "cpu" else 1.0)
        running.append(Running(part, names, min(limit, left), self._environment))

    def _keep(self, part: Part, scratch: Path) -> None:
        for name in part.keeps:
            if (scratch / name).exists():
                shutil.copyfile(scratch / name, self._findings.folder / Path(name).name)


def environment(device: str) -> dict[str, str]:
    """Returns the environment variables of all processes."""
    own = {
        "FIRST_CONTACT_DEVICE": device, "PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN", "TRINE_TIMEOUT_SECONDS": "60",
        "OMP_NUM_THREADS": "1" if device == "cpu" else "2", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {name: value for name, value in os.environ.items() if name != "OUT"} | own | hidden


def _find_device(given: str) -> str:
    """Look for a GPU without torch, whose import takes seconds."""
    if given != "auto":
        return given
    return "cuda" if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") else "cpu"


def _parse(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks first_contact", description="First minutes of a GPU.")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts, or correctness, or speed")
    parser.add_argument("--at-once", type=int, help="processes beside each other")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--store", nargs="*", type=Path, metavar="DIR", help="findings of these runs into docs/figures")
    return parser.parse_args(command)


def main(command: Sequence[str]) -> int:
    """Runs the selected parts; returns 1 if one failed."""
    arguments = _parse(command)
    if arguments.store is not None:
        from benchmarks.first_contact.stored import store  # not on the machine with the GPU

        print(store(arguments.store))
        return 0
    device = _find_device(arguments.device)
    with tempfile.TemporaryDirectory(prefix="first_contact_") as folder:
        scratch = Path(folder)
        parts = select(make_parts(device, scratch), arguments.only)
        if arguments.list:
            for part in parts:
                print(f"{part.name:22s} {part.seconds:4.0f} s {'beside' if part.beside else 'alone':6s} {part.decides}")
            return 0
        findings = Findings(arguments.out or Path(os.environ.get("OUT", "runs/first_contact")), device)
        Schedule(parts, findings, 60 * arguments.minutes, arguments.at_once or AT_ONCE[device]).run(scratch)
    print(f"{counted(findings.rows)}; {findings.folder / 'summary.md'}")
    return int(any(row["ok"] is False for row in findings.rows))
