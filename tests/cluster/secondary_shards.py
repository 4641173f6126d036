"""What secondary shards win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.secondary_shards --write-figures

Two ranks a node train a perceptron in fp32 at stage 3; steps of all ways are timed in turn. The plan says how many
bytes a rank sends less over all data ranks; two thirds of them, those to the ranks of the other node, cross the link.
Exit status 1: what a step wins is further off than 15%.
"""

import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.harness.figures import record_cells
from tests.cluster.network import missing
from tests.cluster.slow_link import ALLOWED, Found, link_seconds, read_options, run_job

RANKS, NODES = 2, 2
JOB = """
import json, statistics, time
import torch
from torch import nn
import engine

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))

engines = {}
for microbatches in (1, 2):
    for words, size in (("over all data ranks", 1), ("within nodes", 2)):
        name = f"{microbatches} microbatch{'es' * (microbatches > 1)}, gathers {words}"
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": microbatches}
        config |= {"zero_optimization": zero}
        engines[name] = engine.initialize(model(), config, lambda out, rows: out.square().mean())
times = {name: [] for name in engines}
for step in range(8):
    for name, eng in engines.items():
        rows = torch.randn(4 * eng.config.accumulation, 512)
        begun = time.perf_counter()
        eng.train_batch(rows)
        if step > 1:
            times[name].append(time.perf_counter() - begun)
found = {}
for name, eng in engines.items():
    plan = eng.plan.rank(eng.grid.rank)
    sent = {row.label: row.bytes for row in plan.traffic if row.axis == "dp"}
    found[name] = {
        "seconds": statistics.median(times[name]),
        "over": sent["parameters"],
        "within": sent.get("parameters within nodes", 0),
        "state": sum(plan.state_bytes.values()),
    }
if eng.grid.rank == 0:
    print("found " + json.dumps(found), flush=True)
for eng in engines.values():
    eng.close()
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("secondary_shards", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    rounds = [run_job(JOB, NODES, RANKS, options.rate) for _ in range(options.rounds)]
    cells, worst = table(rounds, options.rate)
    print("\n".join(f"{row:42} {column:32} {text}" for (row, column), text in cells.items()), flush=True)
    if options.write_figures:
        record_cells("secondary-shards-link", f"two nodes, links of {options.rate:g} Mbit/s", cells)
    return int(worst > ALLOWED)


def table(rounds: Sequence[Found], rate: float) -> tuple[dict[tuple[str, str], str], float]:
    """(cells, the largest deviation of a win from the plan)."""
    cells, worst = dict[tuple[str, str], str](), 0.0
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
            worst = max(worst, abs(won / planned - 1))
            cells[name, "won"], cells[name, "by the plan"] = f"{won:.2f} s", f"{planned:.2f} s"
            cells[name, "off"] = f"{won / planned - 1:+.0%}"
    return cells, worst


if __name__ == "__main__":
    sys.exit(main())
