"""Does the watchdog leave a job alone that is slow but sound?

    python -m tests.cluster.soak --minutes 30 --write-figures

Two nodes of two ranks train 2 data x 2 pipeline ranks. In one step of eight, one rank or all of them stand for up to
0.8 of the watchdog's timeout in a forward, a loss, a hook of the backward, the data or an evaluation, while the others
wait. Exit status 1: the job was ended, or a report was written.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.figures import record_cells
from tests.cluster.jobs import Job, copied
from tests.cluster.network import Cluster, missing

TIMEOUT, SHARE = 5.0, 0.8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and say whether it was left alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the job trains")
    parser.add_argument("--write-figures", action="store_true", help="keep the row in docs/figures and show it")
    options = parser.parse_args(arguments)
    if problem := missing():
        print(problem)
        return 1
    alarms, told = _alarms(options.minutes)
    print(told)
    if options.write_figures:
        row = f"{options.minutes:g} minutes, timeout {TIMEOUT:g} s, ranks up to {SHARE:g} of it late"
        record_cells("soak", "a slow job", {(row, "job"): told, (row, "false alarms"): str(alarms)})
    return int(alarms > 0)


def _alarms(minutes: float) -> tuple[int, str]:
    """How often the job was stopped or reported, and its last line."""
    with TemporaryDirectory() as folder, Cluster(nodes=2) as cluster:
        run = Path(folder) / "run"
        script = copied("slow_steps.py", Path(folder))
        settings = (str(60 * minutes), str(TIMEOUT), str(SHARE), str(run))
        with Job(cluster, sys.executable, 2, script, *settings) as job:
            ended = job.end(120 * minutes + 60)
        reports = list(run.glob("watchdog_*"))
        failed = [node for node in ended if node.code != 0]
        told = [line for line in ended[0].text.splitlines() if " steps, the last one" in line]
        return len(reports) + len(failed), told[-1] if told and not failed else failed[0].text[-3000:]


if __name__ == "__main__":
    sys.exit(main())
