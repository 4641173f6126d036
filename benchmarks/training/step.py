"""Times one training step on the CPU over gloo: Trine and the torch features for the same parallelism.

    python -m benchmarks step [--rows dp,tp,pp] [--ranks 4] [--rounds 7] [--steps 10] [--accumulation 1] [--out FOLDER]
    python -m benchmarks step --rows watchdog
    python -m benchmarks step --profile "Trine tp4" [--steps 10]

Exit code 1 when Trine exceeds its peer's CPU seconds by more than the limit, or when losses differ. Wall time of a
shared machine depends on other load.

Sent bytes are of the rank that sends most, as in ring algorithms, counted in an untimed step (``sent_bytes``).
"""

import argparse
from collections.abc import Sequence

from benchmarks.harness.figures import record_text
from benchmarks.peers.workload import Workload
from benchmarks.training.comparison import add_options, check_options, make_workload, profile, run, runnable, some_of
from benchmarks.training.lineups import BESIDE_PEERS, GROUPS, make_lineup


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks step", description="Cost of one training step.")
    parser.add_argument(
        "--rows", type=some_of(GROUPS, "no rows are called {}"), default=BESIDE_PEERS,
        help="some of dp,tp,pp, which are the default, and watchdog: what it costs to be watched",
    )  # fmt: skip
    add_options(parser)
    arguments = parser.parse_args(command)
    workload, ranks = Workload(), arguments.ranks
    check_options(parser, arguments, make_lineup(ranks, arguments.accumulation, arguments.rows).modes)
    if "tp" in arguments.rows and workload.decoder.heads % ranks:
        parser.error(f"ranks must divide the {workload.decoder.heads} heads for tp; leave tp out of --rows")
    if "pp" in arguments.rows and ranks > workload.decoder.layers:
        parser.error(f"pp has at most one rank for each of {workload.decoder.layers} layers; leave pp out of --rows")
    return arguments


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if every check passed."""
    arguments = _parse(command)
    workload = make_workload(arguments.bucket, arguments.adamw)
    if arguments.profile:
        modes = make_lineup(arguments.ranks, arguments.accumulation, arguments.rows).modes
        print(profile(modes, arguments.profile, workload, arguments.steps))
        return 0
    lineup = runnable(make_lineup(arguments.ranks, arguments.accumulation, arguments.rows), arguments.peers)
    text, passed = run("step", arguments, lineup, workload)
    if arguments.write_figures:
        record_text("watchdog-cost" if arguments.rows == ("watchdog",) else "step", f"```\n{text}\n```")
    return 0 if passed else 1
