"""What fewer bits win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.fewer_bits --write-figures

One rank a node trains a perceptron in fp32; steps of all ways are timed in turn. The plan says how many bytes a rank
sends less in gathers and in exchanges, and the rates of plain ones, timed between the steps, how many seconds that
is: at stage 1 one at a time of 4 MB, at stage 3 two at a time of 512 KB, as the engine has them. (Gloo has one
connection for a pair of ranks, on which what announces a message waits behind the message before, so two ranks that
send at once take up to twice what the rate of the link says.) Exit status 1: a way is further off than 15%.
"""

import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.harness.figures import record_cells
from tests.cluster.network import missing
from tests.cluster.slow_link import ALLOWED, Found, read_options, run_job

JOB = """
import json, statistics, time
from collections import deque
import torch
import torch.distributed as dist
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

def rate(call, elements, count, ahead):  # bytes a second that a rank sends, while the other one sends as many
    given, outs, begun = torch.zeros(2 * elements), torch.zeros(ahead, 2 * elements), deque()
    dist.barrier()
    start = time.perf_counter()
    for number in range(count):
        if len(begun) == ahead:
            begun.popleft().wait()
        begun.append(call(outs[number % ahead], given))
    for work in begun:
        work.wait()
    return count * 4 * elements / (time.perf_counter() - start)


CALLS = {
    "parameters": lambda out, given: dist.all_gather_into_tensor(out, given[: len(given) // 2], async_op=True),
    "gradients": lambda out, given: dist.all_to_all_single(out, given, async_op=True),
}
ISSUED = {"ZeRO 1": (2**20, 2, 1), "ZeRO 3": (2**17, 8, 2)}


def collective_rates():
    return {f"{stage} {label}": rate(call, *how) for stage, how in ISSUED.items() for label, call in CALLS.items()}


rows = torch.randn(4, 512)
times, rates = {name: [] for name in WAYS}, []
for step in range(14):
    rates.append(collective_rates())
    for name, eng in engines.items():
        begun = time.perf_counter()
        eng.train_batch(rows)
        if step > 1:
            times[name].append(time.perf_counter() - begun)
for name, eng in engines.items():
    sent = {row.label: row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if row.axis == "dp"}
    found[name] = {"seconds": statistics.mean(times[name])} | sent
found["rates"] = {label: statistics.harmonic_mean([one[label] for one in rates[2:]]) for label in rates[0]}
if engines["ZeRO 1, exact"].grid.rank == 0:
    print("found " + json.dumps(found), flush=True)
for eng in engines.values():
    eng.close()
"""


def _sent(found: Found, name: str) -> dict[str, float]:
    """Bytes by label."""
    return {label: count for label, count in found[name].items() if label != "seconds"}


def _planned(found: Found, name: str) -> float:
    """Seconds of the plan's bytes, at the rates that collectives of their kind have on this link."""
    stage = name.partition(",")[0]
    return sum(count / found["rates"][f"{stage} {label}"] for label, count in _sent(found, name).items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("fewer_bits", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    rounds = [run_job(JOB, 2, 1, options.rate) for _ in range(options.rounds)]
    cells, worst = dict[tuple[str, str], str](), 0.0
    for name in rounds[0]:
        if name == "rates":
            continue
        exact = f"{name.partition(',')[0]}, exact"
        seconds = median(found[name]["seconds"] for found in rounds)
        cells[name, "bytes a step and rank"] = f"{sum(_sent(rounds[0], name).values()):,.0f}"
        cells[name, "step"] = f"{seconds:.2f} s"
        if name != exact:
            won = median(found[exact]["seconds"] - found[name]["seconds"] for found in rounds)
            planned = median(_planned(found, exact) - _planned(found, name) for found in rounds)
            worst = max(worst, abs(won / planned - 1))
            cells[name, "won"], cells[name, "by the plan"] = f"{won:.2f} s", f"{planned:.2f} s"
            cells[name, "off"] = f"{won / planned - 1:+.0%}"
    for label, rate in rounds[0]["rates"].items():
        print(f"{label}: {rate * 8e-6:.1f} Mbit/s each way")
    print("\n".join(f"{row:42} {column:24} {text}" for (row, column), text in cells.items()), flush=True)
    if options.write_figures:
        record_cells("fewer-bits-link", f"two nodes, links of {options.rate:g} Mbit/s", cells)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
