"""What messages of fewer bits between stages win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.stage_messages --write-figures

One stage a node trains a perceptron in fp32 with all forwards before all backwards (gpipe), so that the link carries
values one way, and then gradients the other way, with nothing beside them. The plan says how many bytes both stages
send less, and the rate of the link, with the headers of its packets, how many seconds that is. Exit status 1: a way is
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

WAYS = {
    "exact": {},
    "bf16": {"pipeline": "bf16"},
    "int8": {"pipeline": "int8"},
    "int4, error feedback": {"pipeline": "int4", "error_feedback": True},
}
ROWS, WIDTH, COUNT = 512, 512, 4

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

engines = {}
for name, wire in WAYS.items():
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": COUNT, "wire": wire}
    config |= {"parallel": {"pipeline": 2, "schedule": "gpipe"}}
    engines[name] = engine.initialize(model(), config, lambda out, rows: out.square().mean())
rows = torch.randn(COUNT * ROWS, WIDTH)
times = {name: [] for name in WAYS}
for step in range(8):
    for name, eng in engines.items():
        begun = time.perf_counter()
        eng.train_batch(rows)
        if step > 1:
            times[name].append(time.perf_counter() - begun)
found = {}
for name, eng in engines.items():
    sent = [sum(row.bytes for row in eng.plan.rank(rank).traffic if row.axis == "pp") for rank in range(2)]
    found[name] = {"seconds": statistics.median(times[name]), "bytes": sum(sent)}
if eng.grid.rank == 0:
    print("found " + json.dumps(found), flush=True)
for eng in engines.values():
    eng.close()
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("stage_messages", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    rounds = [run_job(JOB, 2, 1, options.rate) for _ in range(options.rounds)]
    cells, worst = dict[tuple[str, str], str](), 0.0
    for name, first in rounds[0].items():
        cells[name, "bytes a step, both stages"] = f"{first['bytes']:,.0f}"
        cells[name, "step"] = f"{median(found[name]['seconds'] for found in rounds):.2f} s"
        if name != "exact":
            won = median(found["exact"]["seconds"] - found[name]["seconds"] for found in rounds)
            planned = link_seconds(rounds[0]["exact"]["bytes"] - first["bytes"], options.rate)
            worst = max(worst, abs(won / planned - 1))
            cells[name, "won"], cells[name, "by the plan"] = f"{won:.2f} s", f"{planned:.2f} s"
            cells[name, "off"] = f"{won / planned - 1:+.0%}"
    print("\n".join(f"{row:42} {column:28} {text}" for (row, column), text in cells.items()), flush=True)
    if options.write_figures:
        record_cells("stage-messages-link", f"two nodes, links of {options.rate:g} Mbit/s", cells)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
