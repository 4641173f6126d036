"""Times expert parallelism on several ranks: dispatch of rows, one layer, and a step of a small mixture.

    python -m benchmarks expert [--rows rows,layer,step] [--ranks 2,4] [--rounds 3] [--steps 10] [--write-figures]

*rows*: dispatch and combine of a layer whose experts only weigh rows, forward and backward, beside calls of
``all_to_all_single`` with equal bytes. Routing is even, or experts of the first rank are chosen 8 times as often.
*layer*: a step of one layer of experts between an embedding and a head; ``parallel.expert`` beside ``parallel.tensor``,
which computes the same tokens, and beside ``MoE`` of DeepSpeed. *step*: a step of Qwen3-MoE with 8 experts, 2 a token;
``parallel.expert`` beside data ranks that hold all experts, and beside a dense model with the parameters that one token
uses.

Exit code 1 if the losses of equal models differ. The figure keeps rows that a run does not measure.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.peers.workload import Mode, Workload
from benchmarks.training.cell_tables import Table, report
from benchmarks.training.comparison import Effort, make_workload, some_of
from engine.models.decoder import DecoderConfig

RANKS = (2, 4)
GROUPS = ("rows", "layer", "step")
UNEVEN = 8
EPSILON = 1e-5
"""Eps of AdamW, large enough that rounding in near-zero gradients does not change losses."""


def tables(group: str, ranks: int, workload: Workload) -> Iterator[Table]:
    """Yields the tables of a group on ``ranks`` ranks."""
    of, ep = f", {ranks} ranks", f"Trine ep{ranks}"
    if group == "rows":
        for uneven in (1, UNEVEN):
            how = f"{'even' if uneven == 1 else f'{uneven}:1'}{of}"
            modes = Mode(f"all_to_all_single, {how}", "rows", ranks), Mode(f"Trine, {how}", "trine, dispatch", ranks)
            yield Table(modes, replace(workload, uneven=uneven))
    elif group == "layer":
        tensor = Mode(f"one layer, Trine tp{ranks}", "trine", ranks, axis="tensor")
        expert = Mode(f"one layer, {ep}", "trine", ranks, axis="expert")
        peer = Mode(f"one layer, DeepSpeed MoE{of}", "deepspeed", ranks, axis="expert")
        yield Table((tensor, expert, peer), replace(workload, model="experts"), (tensor.name, expert.name))
    else:
        data = Mode(f"mixture, Trine dp{ranks}", "trine", ranks)
        expert = Mode(f"mixture, {ep}", "trine", ranks, axis="expert")
        dense = Mode(f"dense, Trine dp{ranks}", "trine", ranks, model="dense")
        yield Table((data, expert, dense), replace(workload, model="mixture"), (data.name, expert.name))


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks expert", description="Cost of experts on ranks.")
    parser.add_argument("--rows", type=some_of(GROUPS, "no rows are called {}"), default=GROUPS, help="some of them")
    parser.add_argument("--ranks", type=some_of(RANKS, "{} ranks are not measured"), default=RANKS, help="some of 2,4")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=8, help="of 128 tokens: the batch")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes each")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round and mode")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    return parser.parse_args(command)


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if losses of equal models are equal."""
    asked = _parse(command)
    sizes = DecoderConfig(layers=2, width=asked.width, heads=4, context=128)
    standard = make_workload()
    workload = replace(standard, decoder=sizes, sequences=asked.sequences, epsilon=EPSILON)
    every = (table for group in asked.rows for ranks in asked.ranks for table in tables(group, ranks, workload))
    return report("expert", every, Effort(asked.rounds, asked.steps), asked.write_figures)
