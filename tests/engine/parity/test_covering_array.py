"""Every pair of (model, sizes of the axes, ZeRO, schedule, recomputation, precision, sequence) trains as one process.

Each row trains a step or two, saves, and goes on in a fresh engine, which is given as a written plan what the search
has found. Losses, norms and weights are those of one process; what was sent and what is held is what the plan
says. Pairs by default on at most four ranks; ``-m long`` has all triples, on at most eight.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.models.decoder import loss_sum
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests import models
from tests.covering import Row, covering_array
from tests.engine.parity.launches import differences, held_bytes
from tests.engine.parity.test_parity_axes import CHAINED, SHARED
from tests.models import take_rows

RunRanks = Callable[..., list[Any]]
MICRO = 2
"""Rows of a microbatch."""
TENSOR = {name: SHARED[name] for name in ("decoder", "decoder tied", "llama", "gpt2")}
WIDE: dict[str, Callable[[], nn.Module]] = {"nano": partial(models.nano_wide_loss, layers=4), "t5": models.T5WideLoss}
MODELS: dict[str, Callable[[], nn.Module]] = TENSOR | CHAINED | WIDE
PARTS = 24
"""Tests into which the triples are split."""
ONE_STAGE, TWO_STAGES = ("1f1b", "gpipe", "zb-h1"), ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")
"""Schedules by the stages of a rank."""
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
BOUNDS = {"fp32": (1e-6, 1e-5, 1e-5), "bf16": (2e-3, 3e-2, 1e-2)}
"""Of losses, norms and weights. A difference of rounding flips bits of bf16, so only the fp32 rows are the promise."""


def ranks_of(row: Row) -> int:
    return prod(row[axis] for axis in ("data", "tensor", "pipeline"))


def rows_of(row: Row) -> int:
    """Rows of a global batch."""
    return int(MICRO * row["accumulation"] * row["data"])


def valid(row: Row, most: int) -> bool:
    """Rows that are not the same as another one, and that one machine can run."""
    stages = row["pipeline"] * (2 if row["schedule"] in TWO_STAGES else 1)
    return (
        1 < ranks_of(row) <= most
        and (row["model"] in TENSOR or row["tensor"] == 1)
        and (row["tensor"] > 1 or not row["sequence"])
        and (row["pipeline"] > 1 or row["schedule"] == "1f1b")
        and stages <= 4
    )


def settings(row: Row, folder: str) -> dict[str, Any]:
    """The configuration of a row: four microbatches a data rank or eight, clipping active, a rate that moves."""
    stage, _, how = row["zero"].partition(" ")
    zero: dict[str, Any] = {"stage": int(stage), "reduce_bucket_size": 6000}
    zero |= {"gather" if stage == "3" else "reduce": how} if how else {}
    parallel = {axis: row[axis] for axis in ("data", "tensor", "pipeline")} | {"schedule": row["schedule"]}
    parallel |= {"virtual_stages": 2} if row["schedule"] in TWO_STAGES else {}
    parallel |= {"sequence_parallel": True} if row["sequence"] else {}
    return {
        "train_batch_size": rows_of(row),
        "train_micro_batch_size_per_gpu": MICRO,
        "parallel": parallel,
        "zero_optimization": zero,
        "activation_checkpointing": {"mode": row["recompute"]},
        "bf16": {"enabled": row["precision"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
        "gradient_clipping": 0.25,
        "checkpoint": {"folder": folder},
    }


def train(row: Row, folder: str) -> tuple[TrainingRecord, tuple[str, ...]]:
    """Body of a rank: two engines, one after the other; what came out, and what was not as planned."""
    config = settings(row, folder)
    reports: list[engine.StepReport] = []
    problems: list[str] = []
    wishes = loss_sum if row["model"].startswith("decoder") else None
    batches = models.batches_for(row["model"].split()[0], rows_of(row), sum(row["steps"]))
    for part, steps in enumerate(row["steps"]):
        eng = engine.initialize(MODELS[row["model"]], config, wishes, take_rows(batches[0], 0, MICRO))
        with eng:
            if part:
                eng.load_checkpoint()
                assert eng.step_count == row["steps"][0]
            rows, rank = eng.config.micro * eng.config.accumulation, eng.grid.coord().dp
            mine = [take_rows(batch, rank * rows, rows) for batch in batches[len(reports) : len(reports) + steps]]
            reports.append(eng.train_batch(mine[0]))  # the plan is checked in the first step, which sends
            before = eng.sent
            reports += [eng.train_batch(batch) for batch in mine[1:]]
            problems += differences(eng, before, steps - 1)
            held, planned = held_bytes(eng), sum(eng.plan.rank(eng.grid.rank).state_bytes.values())
            problems += [f"rank {eng.grid.rank} holds {held} bytes, planned {planned}"] if held != planned else []
            if part == 0:
                eng.save_checkpoint()
                tensor = eng.plan.tensor
                config["parallel"] |= {"tensor_plan": dict(tensor.patterns)} if tensor else {}
            else:
                weights = eng.full_state_dict()
    return TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), weights), tuple(problems)


def train_both(row: Row, folder: str) -> tuple[Parity | None, tuple[str, ...]]:
    """Body of a rank: on the grid, and on rank 0 alone too."""
    run, problems = train(row, folder)
    if not run.weights:
        return None, problems
    wishes = VerifyOptions(loss_sum if row["model"].startswith("decoder") else None)
    batches = models.batches_for(row["model"].split()[0], rows_of(row), sum(row["steps"]))
    torch.manual_seed(0)
    return Parity(run, train_alone(MODELS[row["model"]], settings(row, folder), batches, wishes)), problems


def check(run_ranks: RunRanks, row: Row, folder: Path) -> None:
    results = run_ranks(train_both, ranks_of(row), row, str(folder), seconds=300.0)
    assert not [problem for _, problems in results for problem in problems]
    parity = results[0][0]
    assert parity.holds(*BOUNDS[row["precision"]]), str(parity)
    assert all(norm > 0.25 for norm in parity.reference.norms), "clipping must be active"


def name_of(row: Row) -> str:
    axes = " x ".join(f"{short}{row[axis]}" for short, axis in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")))
    words = [row["model"], axes, f"ZeRO {row['zero']}", row["schedule"], row["recompute"], row["precision"]]
    return ", ".join([*words, *(["sequence"] if row["sequence"] else [])])


def cost(row: Row) -> float:
    """About how much processor time a row takes: tensor ranks search for their plan, two families have large blocks."""
    searched = 2.0 if row["tensor"] > 1 and ranks_of(row) > 2 else 1.0
    return (1 + ranks_of(row) / 2) * searched * (1.35 if row["model"] in ("llama", "t5") else 1.0)


FEW = ("decoder tied", "decoder dropout", "llama", "gpt2", "t5", "crossing")
"""Models of the pairs; decoder and nano are parts of others."""
PAIRS = [
    row | {"accumulation": 4, "steps": (2, 1) if number % 2 else (1, 2)}
    for number, row in enumerate(covering_array({**FACTORS, "model": FEW}, partial(valid, most=4), 2, cost))
]
"""Three steps, of which a row takes two before the save, and the next row one."""


@pytest.mark.parametrize("row", PAIRS, ids=name_of)
def test_every_pair(run_ranks: RunRanks, row: Row, tmp_path: Path) -> None:
    check(run_ranks, row, tmp_path)


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
