"""What secondary shards win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.secondary_shards --write-figures

Two ranks a node train a perceptron in fp32 at stage 3; steps of all ways are timed in turn. The plan says how many
bytes a rank sends less over all data ranks; two thirds of them, those to the ranks of the other node, cross the link.
Exit status 1: what a step wins is further off than 15%.
"""

import sys
from collections.abc import Sequence
from statistics import median

from tests.cluster.network import missing
from tests.cluster.slow_link import Cells, Found, judge, link_seconds, read_options, run_job, won_cells

RANKS, NODES = 2, 2
JOB = """
engines = {}
for microbatches in (1, 2):
    for words, size in (("over all data ranks", 1), ("within nodes", 2)):
        name = f"{microbatches} microbatch{'es' * (microbatches > 1)}, gathers {words}"
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": microbatches}
        config |= {"zero_optimization": zero}
        engines[name] = engine.initialize(perceptron(6), config, mean_square)
taken, found = seconds(engines, lambda eng: torch.randn(4 * eng.config.accumulation, 512), 8), {}
for name, eng in engines.items():
    plan = eng.plan.rank(eng.grid.rank)
    sent = {row.label: row.bytes for row in plan.traffic if row.axis == "dp"}
    found[name] = {
        "seconds": taken[name],
        "over": sent["parameters"],
        "within": sent.get("parameters within nodes", 0),
        "state": sum(plan.state_bytes.values()),
    }
tell(engines, found)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("secondary_shards", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    rounds = [run_job(JOB, NODES, RANKS, options.rate) for _ in range(options.rounds)]
    cells, worst = table(rounds, options.rate)
    return judge("secondary-shards-link", cells, worst, options)


def table(rounds: Sequence[Found], rate: float) -> tuple[Cells, float]:
    """(cells, the largest deviation of a win from the plan)."""
    cells, worst = Cells(), 0.0
    across = RANKS * (NODES - 1) * RANKS / (NODES * RANKS - 1)  # of a rank's bytes, summed over the ranks of a node
    for name, first in rounds[0].items():
        cells[name, "bytes over all data ranks"] = f"{first['over']:,.0f}"
        cells[name, "bytes within nodes"] = f"{first['within']:,.0f}"
        cells[name, "state"] = f"{first['state']:,.0f}"
        cells[name, "step"] = f"{median(found[name]['seconds'] for found in rounds):.2f} s"
        if first["within"]:
            plain = f"{name.partition(',')[0]}, gathers over all data ranks"
            won = median(found[plain]["seconds"] - found[name]["seconds"] for found in rounds)
            planned = link_seconds((rounds[0][plain]["over"] - first["over"]) * across, rate)
            worst = max(worst, won_cells(cells, name, won, planned))
    return cells, worst


if __name__ == "__main__":
    sys.exit(main())
