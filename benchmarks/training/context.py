"""Times context parallelism: a small Llama of transformers with its sequences over two and over four ranks.

    python -m benchmarks context [--ranks 2,4] [--lengths 512,2048] [--methods auto,ring] [--rounds 3] [--steps 5]
                                 [--write-figures]

Trine beside data ranks, which compute as many tokens each, beside torch's ``context_parallel``, and beside Ulysses of
DeepSpeed. The batch has as many sequences as there are ranks: a data rank computes one sequence a step, a context rank
its part of each, one sequence a microbatch. A peer that cannot run here has its error in place of its time.

Exit code 1 if losses differ. The figure keeps rows that a run does not measure.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from benchmarks.peers.workload import Mode, Workload
from benchmarks.training.cell_tables import Table, report
from benchmarks.training.comparison import Effort, make_workload, some_of
from engine.models.decoder import DecoderConfig
from engine.parallel.context.choose import Method

RANKS = (2, 4)
LENGTHS = (512, 2048)
METHODS = ("auto", *get_args(Method))
"""Methods of Trine's attention over context ranks (``parallel.context.method``): each is a row of a table."""
MEASURED = ("auto", "gather", "heads", "ring")
SUMMED = "loss divided by the ranks, since DeepSpeed sums gradients over them"
EPSILON = 1e-5
"""Eps of AdamW, large enough that rounding in near-zero gradients does not change losses."""


def tables(ranks: Sequence[int], lengths: Sequence[int], methods: Sequence[str], workload: Workload) -> Iterator[Table]:
    """Yields a table for each number of ranks and length."""
    for count in ranks:
        for length in lengths:
            sizes = replace(workload.decoder, context=length)
            modes = contenders(count, length, methods)
            yield Table(modes, replace(workload, decoder=sizes, sequences=count), tuple(mode.name for mode in modes))


def contenders(ranks: int, length: int, methods: Sequence[str] = MEASURED) -> tuple[Mode, ...]:
    """Returns the rows of a table: data ranks, each of Trine's methods, and the peers."""
    at = f"{length} tokens"
    data = Mode(f"{at}, Trine dp{ranks}", "trine", ranks)
    context = Mode(f"{at}, Trine cp{ranks}", "trine", ranks, accumulation=ranks, axis="context")
    own = [replace(context, name=f"{context.name} {method}", method=method) for method in methods]
    torch = replace(context, name=f"{at}, torch context_parallel, {ranks} ranks", kind="context_parallel")
    ulysses = replace(context, name=f"{at}, DeepSpeed Ulysses, {ranks} ranks", kind="deepspeed", note=SUMMED)
    return (data, *own, torch, ulysses)


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks context", description="Cost of sequences on ranks.")
    parser.add_argument("--ranks", type=some_of(RANKS, "{} ranks are not measured"), default=RANKS, help="some of 2,4")
    parser.add_argument(
        "--lengths", type=lambda text: tuple(map(int, text.split(","))), default=LENGTHS, help="tokens of a sequence"
    )
    parser.add_argument(
        "--methods", type=some_of(METHODS, "no method is called {}"), default=MEASURED, help="of Trine's attention"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes each")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a round and mode")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    return parser.parse_args(command)


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if losses are equal."""
    asked = _parse(command)
    sizes = DecoderConfig(layers=2, width=asked.width, heads=4)
    standard = make_workload()
    workload = replace(standard, decoder=sizes, epsilon=EPSILON, model="llama")
    every = tables(asked.ranks, asked.lengths, asked.methods, workload)
    return report("context", every, Effort(asked.rounds, asked.steps), asked.write_figures)
