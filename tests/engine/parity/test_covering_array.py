"""Every pair of (model, sizes of the axes, ZeRO, schedule, recomputation, precision, sequence) trains as one process.

With ``-m long`` every pair with two context ranks too.

A row trains two steps. By default, whether it is resumed is a setting of the pairs like any other; long rows all are:
they save and go on in a fresh engine, which without recomputation gets what the search has found as a written plan.
Losses, norms and weights are those of one process; what was sent and what is held is what the plan says. Pairs by
default on at most four ranks; ``-m long`` has all triples, on at most eight.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from engine.verify import Parity
from tests.covering import Row, covering_array
from tests.engine.parity.covering_rows import (
    MODELS,
    ONE_STAGE,
    SEQUENCES,
    TENSOR,
    TWO_STAGES,
    ranks_of,
    reference,
    rows_of,
    train,
)

RunRanks = Callable[..., list[Any]]
PARTS = 24
"""Tests into which the triples are split."""
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "data": (1, 2),
    "tensor": (1, 2),
    "pipeline": (1, 2, 4),
    "zero": ("0", "1", "2", "2 microbatch", "3", "3 step"),
    "schedule": (*ONE_STAGE, *TWO_STAGES),
    "recompute": ("none", "full", "selective"),
    "precision": ("fp32", "bf16"),
    "sequence": (False, True),
}
WITH_CONTEXT: Mapping[str, tuple[Any, ...]] = {**FACTORS, "model": SEQUENCES, "context": (2,)}
BOUNDS = {"fp32": (1e-6, 1e-5, 1e-5), "bf16": (2e-3, 3e-2, 1e-2)}
"""Of losses, norms and weights. A difference of rounding flips bits of bf16, so only the fp32 rows are the promise."""


def valid(row: Row, most: int) -> bool:
    """Rows that are not the same as another one, and that one machine can run."""
    stages = row["pipeline"] * (2 if row["schedule"] in TWO_STAGES else 1)
    return (
        1 < ranks_of(row) <= most
        and (row["model"] in TENSOR or row["tensor"] == 1)
        and (row["tensor"] > 1 or not row["sequence"])
        and (row["pipeline"] > 1 or row["schedule"] == "1f1b")
        and (row.get("context", 1) == 1 or row["model"] in SEQUENCES)
        and stages <= 4
    )


def check(run_ranks: RunRanks, row: Row, folder: Path) -> None:
    results = run_ranks(train, ranks_of(row), row, str(folder), seconds=300.0)
    assert not [problem for _, problems in results for problem in problems]
    parity = Parity(results[0][0], reference(row))
    assert parity.holds(*BOUNDS[row["precision"]]), str(parity)
    assert all(norm > 0.25 for norm in parity.reference.norms), "clipping must be active"


def name_of(row: Row) -> str:
    axes = " x ".join(f"{short}{row[axis]}" for short, axis in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")))
    axes += f" x cp{row['context']}" if "context" in row else ""
    words = [row["model"], axes, f"ZeRO {row['zero']}", row["schedule"], row["recompute"], row["precision"]]
    return ", ".join([*words, *(["sequence"] if row["sequence"] else []), *(["resumed"] if row.get("resumed") else [])])


def cost(row: Row) -> float:
    """About how much processor time a row takes: tensor ranks search for their plan, two families have large blocks."""
    searched = 2.0 if row["tensor"] > 1 and ranks_of(row) > 2 else 1.0
    engines = 1.8 if row.get("resumed") else 1.0
    return (1 + ranks_of(row) / 2) * searched * engines * (1.35 if row["model"] in ("llama", "t5") else 1.0)


FEW = ("decoder tied", "llama", "gpt2", "t5", "crossing")
"""Models of the pairs; decoder and nano are parts of others, and ``test_dropout_in_chains`` has dropout."""
OFTEN: Mapping[str, tuple[Any, ...]] = {
    **FACTORS, "model": FEW, "zero": ("0", "1", "2", "3"), "each": (False, True), "resumed": (False, True),
    "schedule": ("1f1b", "zb-h1", "interleaved", "dualpipe-v"),
}  # fmt: skip
"""Settings of the pairs: ``each`` reduces in each microbatch at ZeRO 2, and gathers once a step at ZeRO 3. Schedules
are one of each kind; ``parallel/pipeline/runtime/test_executor.py`` plays the others, and the triples have all."""
HOW = {"2": "2 microbatch", "3": "3 step"}
SEED = 38
"""Of the array: the cheapest one of the first 40."""


def often_valid(row: Row) -> bool:
    return valid(row, most=4) and (row["zero"] in HOW or not row["each"])


PAIRS = [
    row
    | {"zero": HOW[row["zero"]] if row["each"] else row["zero"]}
    | {"accumulation": 4, "steps": (1, 1) if row["resumed"] else (2,)}
    for row in covering_array(OFTEN, often_valid, 2, cost, SEED)
]
PAIRS.sort(key=lambda row: (row["model"], row["precision"], rows_of(row)))  # neighbours share their reference


@pytest.mark.parametrize("row", PAIRS, ids=name_of)
def test_every_pair(run_ranks: RunRanks, row: Row, tmp_path: Path) -> None:
    check(run_ranks, row, tmp_path)


@cache
def context_pairs() -> tuple[Row, ...]:
    found = covering_array(WITH_CONTEXT, partial(valid, most=8), 2, cost)
    return tuple(row | {"accumulation": 4, "steps": (1, 2)} for row in found)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(6))
def test_every_pair_with_context_ranks(run_ranks: RunRanks, tmp_path: Path, part: int) -> None:
    for number, row in enumerate(context_pairs()[part::6]):
        print(name_of(row), flush=True)
        check(run_ranks, row, tmp_path / str(number))


@cache
def triples() -> tuple[Row, ...]:
    return tuple(covering_array(FACTORS, partial(valid, most=8), 3, cost))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_triple(run_ranks: RunRanks, tmp_path: Path, part: int) -> None:
    for number, row in enumerate(triples()[part::PARTS]):
        print(name_of(row), flush=True)
        check(run_ranks, row | {"accumulation": 8, "steps": (2, 2)}, tmp_path / str(number))
