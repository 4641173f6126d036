"""What fewer bits win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.fewer_bits --write-figures

One rank a node trains a perceptron in fp32; steps of all ways are timed in turn. The plan says how many bytes a rank
sends less, and the rate of the link, with the headers of its packets, how many seconds that is. Exit status 1: a way is
further off than 15%.
"""

import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.harness.figures import record_cells
from tests.cluster.network import missing
from tests.cluster.slow_link import ALLOWED, link_seconds, read_options, run_job

JOB = """
import json, statistics, time
import torch
from torch import nn
import engine

GRADIENTS = {"zero_quantized_gradients": True}
INT4 = GRADIENTS | {"zero_quantized_gradients_bits": 4, "zero_gradient_error_feedback": True}
WEIGHTS = {"zero_quantized_weights": True}
WAYS = {
    "ZeRO 1, exact": {"stage": 1},
    "ZeRO 1, int8 gradients": {"stage": 1} | GRADIENTS,
    "ZeRO 1, int4 gradients, error feedback": {"stage": 1} | INT4,
    "ZeRO 3, exact": {"stage": 3},
    "ZeRO 3, int8 weights and gradients": {"stage": 3} | WEIGHTS | GRADIENTS,
}

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())))

found = {}
engines = {}
for name, zero in WAYS.items():
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    engines[name] = engine.initialize(model(), config, lambda out, rows: out.square().mean())

rows = torch.randn(4, 512)
times = {name: [] for name in WAYS}
for step in range(12):
    for name, eng in engines.items():
        begun = time.perf_counter()
        eng.train_batch(rows)
        if step > 1:
            times[name].append(time.perf_counter() - begun)
for name, eng in engines.items():
    sent = sum(row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if row.axis == "dp")
    found[name] = {"seconds": statistics.median(times[name]), "bytes": sent}
if engines["ZeRO 1, exact"].grid.rank == 0:
    print("found " + json.dumps(found), flush=True)
for eng in engines.values():
    eng.close()
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("fewer_bits", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    rounds = [run_job(JOB, 2, 1, options.rate) for _ in range(options.rounds)]
    cells, worst = dict[tuple[str, str], str](), 0.0
    for name, first in rounds[0].items():
        exact = f"{name.partition(',')[0]}, exact"
        seconds = median(found[name]["seconds"] for found in rounds)
        cells[name, "bytes a step and rank"] = f"{first['bytes']:,.0f}"
        cells[name, "step"] = f"{seconds:.2f} s"
        if name != exact:
            won = median(found[exact]["seconds"] - found[name]["seconds"] for found in rounds)
            planned = link_seconds(rounds[0][exact]["bytes"] - first["bytes"], options.rate)
            worst = max(worst, abs(won / planned - 1))
            cells[name, "won"], cells[name, "by the plan"] = f"{won:.2f} s", f"{planned:.2f} s"
            cells[name, "off"] = f"{won / planned - 1:+.0%}"
    print("\n".join(f"{row:42} {column:24} {text}" for (row, column), text in cells.items()), flush=True)
    if options.write_figures:
        record_cells("fewer-bits-link", f"two nodes, links of {options.rate:g} Mbit/s", cells)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
