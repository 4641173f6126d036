"""What fewer bits win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.fewer_bits --write-figures

One rank a node trains a perceptron in fp32; steps of all ways are timed in turn, first on a fast link, where encoding
decides, and then on the slow one. The plan says how many bytes a rank sends less, and the rates of both links, with the
headers of packets, how many seconds more that is on the slow one. Exit status 1: a way is further off than 15%.
"""

import sys
from collections.abc import Sequence
from statistics import median

from tests.cluster.network import missing
from tests.cluster.slow_link import Cells, judge, link_seconds, read_options, run_job, won_cells

FAST = 1000.0
"""Megabits a second of the fast link."""
JOB = """
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

engines = {}
for name, zero in WAYS.items():
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    engines[name] = engine.initialize(perceptron(8), config, mean_square)
rows = torch.randn(4, 512)
taken = seconds(engines, lambda eng: rows, 12)
tell(engines, {name: {"seconds": taken[name], "bytes": planned_bytes(eng, "dp")} for name, eng in engines.items()})
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("fewer_bits", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    pairs = [[run_job(JOB, 2, 1, rate) for rate in (FAST, options.rate)] for _ in range(options.rounds)]
    seconds = {name: [median(pair[i][name]["seconds"] for pair in pairs) for i in range(2)] for name in pairs[0][0]}
    cells, worst = Cells(), 0.0
    for name, first in pairs[0][0].items():
        exact = f"{name.partition(',')[0]}, exact"
        fast, slow = (whole - own for whole, own in zip(seconds[exact], seconds[name], strict=True))
        cells[name, "bytes a step and rank"] = f"{first['bytes']:,.0f}"
        cells[name, f"step at {FAST:g} Mbit/s"], cells[name, "step"] = (f"{one:.2f} s" for one in seconds[name])
        if name != exact:
            fewer = pairs[0][0][exact]["bytes"] - first["bytes"]
            planned = fast + link_seconds(fewer, options.rate) - link_seconds(fewer, FAST)
            worst = max(worst, won_cells(cells, name, slow, planned))
    return judge("fewer-bits-link", cells, worst, options)


if __name__ == "__main__":
    sys.exit(main())
