"""Command ``trine sweep sweep.json -- train.py ...``: trials of a script's settings in one warm process per rank."""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError, LaunchError
from engine.parallel.comm.launcher import find_place
from engine.reporting.console import aligned
from engine.sweep.settings import SweepConfig, read_sweep

if TYPE_CHECKING:
    from engine.sweep.study import TrialRow


def add_sweep_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine sweep`` to the parser ``command``."""
    command.add_argument("sweep", type=Path, metavar="SWEEP", help="settings of the sweep, such as sweep.json")
    command.add_argument("script", type=Path, metavar="-- SCRIPT", help="script that calls engine.initialize")
    command.add_argument("arguments", nargs="*", metavar="ARGUMENTS", help="arguments of the script")
    ranks = "processes of this host, started by torchrun; leave it out under torchrun"
    command.add_argument("--nproc-per-node", "--nproc_per_node", type=int, metavar="N", help=ranks)
    again = "go on with the N best pruned trials from their checkpoints, and prune them no more"
    command.add_argument("--resume-pruned", type=int, default=0, metavar="N", help=again)


def run_sweep(options: Namespace) -> None:
    """Runs ``trine sweep``, a hyperparameter search: prints a line per trial, then a table of all, and the best.

    Raises:
        EngineError: the settings have a mistake, or a trial raises it. Other errors of a trial are raised too.
    """
    settings = read_sweep(options.sweep)
    if settings.metric is None:
        raise ConfigError("metric null is for a loop that calls trial.report; give loss, or metrics/NAME.")
    if not options.script.is_file():
        raise ConfigError(f"SCRIPT {options.script} does not exist; give the script that calls engine.initialize.")
    if options.nproc_per_node is not None:
        _start_ranks(options)
    from engine.launch.swept_script import sweep_script

    sweep = sweep_script(settings, options.script, options.arguments, options.resume_pruned, _print_row)
    rows, best = sweep.rows(), sweep.best()
    if not rows:
        return  # another rank than 0
    print("\n".join(_table(rows, settings)))
    continued = {row.continues for row in rows}
    updates = sum(row.updates for row in rows if row.number not in continued)
    print(f"updates    {updates:,} in {len(rows)} trials")
    print(f"best       trial {best.number}: {_words(best, settings)}" if best else "best       no trial is complete")


def _start_ranks(options: Namespace) -> None:
    """Replaces this process by torchrun, which runs the same command on each rank."""
    ranks = options.nproc_per_node
    if ranks < 1:
        raise LaunchError(f"--nproc-per-node {ranks} is not a number of processes; give at least 1.")
    if find_place(os.environ) is not None:
        raise LaunchError(
            f"--nproc-per-node {ranks} inside of a launcher, which has started this process as a rank; leave it out."
        )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "engine.launch.cli", "sweep", f"--resume-pruned={options.resume_pruned}", str(options.sweep)]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, "--", str(options.script), *options.arguments])


def _print_row(row: "TrialRow", settings: SweepConfig) -> None:
    print(f"trial {row.number}    {row.updates} updates, {row.state}: {_words(row, settings)}", flush=True)


def _words(row: "TrialRow", settings: SweepConfig) -> str:
    values = [f"{path}={shlex.quote(_shown(value))}" for path, value in row.values.items()]
    return " ".join([*values, *([f"{settings.metric} {row.value:.6g}"] if row.value is not None else [])])


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(rows: "list[TrialRow]", settings: SweepConfig) -> list[str]:
    paths = [each.path for each in settings.space]
    head = ("trial", *paths, "updates", str(settings.metric), "state")
    body = [
        (
            str(row.number),
            *(_shown(row.values.get(path, "")) for path in paths),
            str(row.updates),
            "" if row.value is None else f"{row.value:.6g}",
            row.state,
        )
        for row in rows
    ]
    return aligned([head, *body])
