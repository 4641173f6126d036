"""Steps of every grid on a cluster whose links are slow, beside what the plan predicts.

    python -m tests.cluster.scaling --write-figures

Four nodes of two ranks, joined by links of 1/50 of what gloo carries between two processes of one machine. The eight
ranks share the processors of this machine, so their computation is measured while all of them compute, and the
prediction knows how many of them run at once. Exit status 1: the best grid is not the predicted one.

With ``--keep FILE`` a second run goes on where the first one ended; other numbers of nodes add to the same file.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.figures import record_cells
from benchmarks.scaling.plot import draw_record
from benchmarks.scaling.record import ScalingRecord, ScalingRow, read_record
from benchmarks.scaling.report import parts_of, table
from tests.cluster.jobs import Job
from tests.cluster.network import Cluster, missing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SLOWER = 50
"""How much slower a link is than loopback."""
JOB = """
import sys
from benchmarks.scaling.command import main
sys.exit(main(sys.argv[1:]))
"""
LOOPBACK = """
from benchmarks.scaling.ranks import joined_ranks
with joined_ranks() as ranks:
    rate = ranks.host_links().within.rate
    if ranks.first:
        print(f"rate {rate:.0f} bytes a second", flush=True)
"""
SIZES = ("--layers=8", "--width=256", "--heads=8", "--context=64", "--rows=32", "--micro=2", "--warmup=2", "--steps=3")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = _options(arguments)
    if problem := missing():
        print(problem)
        return 1
    rate = options.rate or loopback_rate() / SLOWER
    print(f"links of {rate / 1e6:.1f} MB/s", flush=True)
    if options.rounds:
        with TemporaryDirectory() as folder:
            record = run_job(Path(folder), (options.nodes, options.ranks), rate, options)
    else:
        record = read_record(Path(options.keep))
    print(table(record))
    here = [row for row in record.rows if (row.nodes, row.ranks) == (options.nodes, options.ranks)]
    rows = sorted((row for row in here if row.seconds is not None and row.predicted is not None), key=_seconds)
    best, told = rows[0], min(rows, key=_predicted)
    correlation = rank_correlation([_seconds(row) for row in rows], [_predicted(row) for row in rows])
    verdict = {
        "grids": str(len(rows)),
        "best measured": str(best.choice),
        "best predicted": str(told.choice),
        "rank correlation": f"{correlation:.2f}",
    }
    print("; ".join(f"{name}: {found}" for name, found in verdict.items()), flush=True)
    if options.write_figures:
        links = f"links of {rate / 1e6:.1f} MB/s, {options.ranks} ranks a node"
        cells = {(f"{options.nodes} nodes", name): found for name, found in verdict.items()}
        record_cells("scaling-verdict", links, cells)
        record_cells("scaling", links, dict(_cells(rows)))
        (RESULTS / "scaling.svg").write_text(draw_record(record), encoding="utf-8")
    return int(best.choice != told.choice)


def _cells(rows: Sequence[ScalingRow]) -> Iterator[tuple[tuple[str, str], str]]:
    """Of the table in the documents."""
    for row in rows:
        name, seconds, predicted = f"{row.nodes} nodes, {row.choice}", _seconds(row), _predicted(row)
        yield (name, "step, measured"), f"{seconds:.2f} s"
        yield (name, "predicted"), f"{predicted:.2f} s"
        yield (name, "off"), f"{predicted / seconds - 1:+.0%}"
        for part, took in parts_of(row):
            if part in ("computation", "bubble", "dp", "tp", "pp"):
                yield (name, f"predicted {part}"), f"{took:.2f}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.scaling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of a node")
    parser.add_argument("--rate", type=float, help="bytes a second of a link; without: 1/50 of loopback")
    parser.add_argument("--rounds", type=int, default=3, help="engines a grid; 0: judge what --keep has")
    parser.add_argument("--stages", default="1", help="ZeRO stages of grids with data ranks")
    parser.add_argument("--sizes", default=" ".join(SIZES), help="of model and batch, as the benchmark takes them")
    parser.add_argument("--keep", help="the JSON, which a second run goes on with")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    return parser.parse_args(arguments)


def _seconds(row: ScalingRow) -> float:
    assert row.seconds is not None
    return row.seconds


def _predicted(row: ScalingRow) -> float:
    assert row.predicted is not None
    return row.predicted.total


def loopback_rate() -> float:
    """Bytes a second that gloo carries each way between two processes of one node."""
    with TemporaryDirectory() as folder, Cluster(nodes=1) as cluster:
        script = Path(folder) / "loopback.py"
        script.write_text(LOOPBACK)
        with Job(cluster, sys.executable, 2, script) as job:
            (ended,) = job.end(60)
    found = re.search(r"rate (\d+) bytes", ended.text)
    assert found is not None, ended.text[-3000:]
    return float(found[1])


def run_job(folder: Path, size: tuple[int, int], rate: float, options: argparse.Namespace) -> ScalingRecord:
    """The record of one job of (nodes, ranks of a node)."""
    nodes, ranks = size
    script, out = folder / "job.py", Path(options.keep).resolve() if options.keep else folder / "scaling.json"
    script.write_text(JOB)
    told = (f"--out={out}", f"--rounds={options.rounds}", f"--stages={options.stages}", *options.sizes.split())
    with (
        Cluster(nodes, rate=f"{int(8 * rate / 1000)}kbit") as cluster,
        Job(cluster, sys.executable, ranks, script, *told) as job,
    ):
        for node in job.end(3000):
            assert node.code == 0, f"{node.text[:3000]} .. {node.text[-1000:]}"
    return read_record(out)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of numbers of which no two are equal."""
    places = [[sorted(numbers).index(number) for number in numbers] for numbers in (first, second)]
    count = len(first)
    apart = sum((a - b) * (a - b) for a, b in zip(*places, strict=True))
    return 1 - 6 * apart / (count * (count * count - 1)) if count > 1 else 1.0


if __name__ == "__main__":
    sys.exit(main())
