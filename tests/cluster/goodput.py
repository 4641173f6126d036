"""How much of its time a job trains that is killed again and again.

    python -m tests.cluster.goodput --minutes 20 --every 60 --write-figures

Two nodes train under torchrun, one rank on each: this machine has two cores, and a rank needs one of its own to start.
Every minute a rank is killed with signal 9. The agents start all ranks again, and these go on from the newest
checkpoint in the memory of the hosts; none is written to disk.

    step 41  42  43  x                   42  43  44        kept: the last time of each step
                     |--- start again ---|-- done again --|

Effective time is the time in steps that were kept, divided by the time from the first step to the last. All losses have
to be those of a job that nobody disturbs, to the bit. Exit status 1: they are not, or less than ``--least`` was
effective.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.harness.figures import record_cells
from tests.cluster.jobs import Job, copied
from tests.cluster.network import Cluster, missing
from tests.cluster.test_elastic import updates_of

NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What a job did that was disturbed."""

    kills: int
    steps: int
    seconds: float
    """From the start of the first step to the end of the last one."""
    effective: float
    """Seconds in steps that were kept."""
    pauses: tuple[float, ...]
    """Seconds from the last step that was ended before a kill to the end of the first one after it, less one step."""
    done_again: int
    """Steps that were made more than once, each time counted."""
    same_losses: bool
    """Each loss is that of a job that nobody disturbed, to the bit."""

    @property
    def share(self) -> float:
        """Effective seconds in one second."""
        return self.effective / self.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job and disturb it; prints and returns what came of it."""
    options = _options(arguments)
    if problem := missing():
        print(problem)
        return 1
    with TemporaryDirectory() as folder:
        kills = _disturbed(Path(folder) / "disturbed", options)
        found = _judge(Path(folder), kills, options.ranks)
    print(json.dumps(asdict(found) | {"share": found.share}), flush=True)
    good = found.share >= options.least and found.same_losses
    if options.write_figures:
        pauses = sorted(found.pauses)
        row = f"every {options.every:g} s for {options.minutes:g} minutes, ranks a node: {options.ranks}"
        cells = {
            "kills": str(found.kills),
            "effective time": f"{found.share:.1%}",
            "kill to first new step": f"{pauses[len(pauses) // 2]:.1f} s, at most {pauses[-1]:.1f} s",
            "steps made again": f"{found.done_again} of {found.steps}",
            "losses": "to the bit those of an undisturbed job" if found.same_losses else "differ",
        }
        record_cells("goodput", "a rank is killed", {(row, column): text for column, text in cells.items()})
    return 0 if good else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.goodput", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long the job is disturbed")
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one kill to the next")
    parser.add_argument("--least", type=float, default=0.9, help="share of effective time that has to be reached")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a node")
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step takes beside its computation")
    parser.add_argument("--write-figures", action="store_true", help="keep the row in docs/figures and show it")
    return parser.parse_args(arguments)


def _disturbed(folder: Path, options: argparse.Namespace) -> int:
    """Kill a rank of the job every now and then until its time is over, and let it end; returns the number of kills."""
    chance, kills = random.Random(0), 0
    steps = int(60 * options.minutes / options.step)  # it is still training at the last kill
    folder.mkdir()
    script = copied("elastic.py", folder)
    settings = (str(folder / "run"), str(steps), str(options.step), "memory")
    with (
        Cluster(NODES) as cluster,
        Job(cluster, sys.executable, options.ranks, script, *settings, elastic=True) as job,
    ):
        job.wait_for("step 10 on", node=0)
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() + options.every < end:
            time.sleep(options.every)
            ranks = sorted(_ranks(script))
            if not ranks:
                break
            os.kill(chance.choice(ranks), signal.SIGKILL)
            kills += 1
            print(f"killed {kills}", flush=True)
        for node in job.end(600):
            assert node.code == 0, node.text[-3000:]
    return kills


def _ranks(script: Path) -> Iterator[int]:
    """Process ids of the ranks, as this machine numbers them."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            environment = (path.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if str(script).encode() in words and any(entry.startswith(b"LOCAL_RANK=") for entry in environment):
            yield int(path.parent.name)


@dataclass(frozen=True, slots=True)
class _Made:
    """A step as a process has made it."""

    process: int
    step: int
    time: float
    """When it had ended."""


def _judge(folder: Path, kills: int, ranks: int) -> Goodput:
    run = folder / "disturbed" / "run"
    rows = [line.split() for line in (run / "times.txt").read_text().splitlines()]
    made = [_Made(int(process), int(step), float(ended)) for process, step, ended in rows]
    gaps = [now.time - before.time for before, now in pairwise(made)]
    usual = median(gaps)
    first = [now.process != before.process for before, now in pairwise(made)]
    took = [usual, *(usual if began else gap for gap, began in zip(gaps, first, strict=True))]
    kept = {each.step: seconds for each, seconds in zip(made, took, strict=True)}
    return Goodput(
        kills=kills,
        steps=made[-1].step,
        seconds=made[-1].time - made[0].time + usual,
        effective=sum(kept.values()),
        pauses=tuple(round(gap - usual, 2) for gap, began in zip(gaps, first, strict=True) if began),
        done_again=len(made) - len(kept),
        same_losses=_same(_losses(run), _undisturbed(folder / "undisturbed", made[-1].step, ranks)),
    )


def _losses(run: Path) -> dict[int, float]:
    return {step: update["loss"] for step, update in updates_of(run).items()}


def _same(disturbed: dict[int, float], expected: dict[int, float]) -> bool:
    """Whether all losses are equal. A rank that is killed in between has kept a step and not told its loss."""
    last = max(expected)
    return last in disturbed and all(expected[step] == loss for step, loss in disturbed.items())


def _undisturbed(folder: Path, steps: int, ranks: int) -> dict[int, float]:
    """The losses of the same job when nobody disturbs it and its steps take as long as their computation."""
    folder.mkdir()
    script = copied("elastic.py", folder)
    with Cluster(NODES) as cluster, Job(cluster, sys.executable, ranks, script, str(folder / "run"), str(steps)) as job:
        for node in job.end(600):
            assert node.code == 0, node.text[-3000:]
    return _losses(folder / "run")


if __name__ == "__main__":
    sys.exit(main())
