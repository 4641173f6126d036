"""What shard groups inside nodes win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.shard_groups --write-figures

Two ranks a node train a perceptron in fp32; steps of all ways are timed in turn. The plan says what a rank sends over
which axis: of its bytes over all data ranks two thirds go to the ranks of the other node and cross the link, of those
inside a shard group none do, and of those across all do. Exit status 1: what a step wins is further off than 15%.
"""

import sys
from collections.abc import Sequence
from statistics import median

from tests.cluster.network import missing
from tests.cluster.slow_link import Cells, Found, judge, link_seconds, read_options, run_job, won_cells

RANKS, NODES = 2, 2
JOB = """
engines = {}
for name, zero in (("ZeRO 1", {"stage": 1}), ("ZeRO 3", {"stage": 3})):
    for words, size in (("all data ranks", None), ("groups of two", 2)):
        zero |= {"shard_size": size, "reduce_bucket_size": 300_000}  # a layer each
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": dict(zero)}
        engines[f"{name}, {words}"] = engine.initialize(perceptron(6), config, mean_square)
taken, found = seconds(engines, lambda eng: torch.randn(4, 512), 8), {}
for name, eng in engines.items():
    sent = {axis: planned_bytes(eng, axis) for axis in ("dp", "dp_shard", "dp_replicate")}
    state = sum(eng.plan.rank(eng.grid.rank).state_bytes.values())
    found[name] = sent | {"seconds": taken[name], "state": state}
tell(engines, found)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("shard_groups", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    rounds = [run_job(JOB, NODES, RANKS, options.rate) for _ in range(options.rounds)]
    cells, worst = table(rounds, options.rate)
    return judge("shard-groups-link", cells, worst, options)


def table(rounds: Sequence[Found], rate: float) -> tuple[Cells, float]:
    """(cells, the largest deviation of a win from the plan)."""
    cells, worst = Cells(), 0.0
    for name, first in rounds[0].items():
        cells[name, "bytes over all data ranks"] = f"{first['dp']:,.0f}"
        cells[name, "inside nodes"] = f"{first['dp_shard']:,.0f}"
        cells[name, "across nodes"] = f"{first['dp_replicate']:,.0f}"
        cells[name, "state"] = f"{first['state']:,.0f}"
        cells[name, "step"] = f"{median(found[name]['seconds'] for found in rounds):.2f} s"
        if first["dp_replicate"]:
            whole = f"{name.partition(',')[0]}, all data ranks"
            won = median(found[whole]["seconds"] - found[name]["seconds"] for found in rounds)
            planned = link_seconds(crossing(rounds[0][whole]) - crossing(first), rate)
            worst = max(worst, won_cells(cells, name, won, planned))
    return cells, worst


def crossing(sent: dict[str, float]) -> float:
    """Bytes that leave a node in a step, of both of its ranks."""
    others = RANKS * (NODES - 1) / (NODES * RANKS - 1)  # of the ranks that a rank sends to over all of dp
    return RANKS * (sent["dp"] * others + sent["dp_replicate"])


if __name__ == "__main__":
    sys.exit(main())
