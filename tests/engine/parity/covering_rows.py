"""A row of the covering array: its model and configuration, and what a rank does with them.

Ranks find their function in this file, and nothing here counts rows: an array takes a third of a second of each rank.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import nn

import engine
from engine.models.decoder import loss_sum
from engine.verify import TrainingRecord, VerifyOptions, train_alone
from tests import models
from tests.covering import Row
from tests.engine.parity.launches import differences, held_bytes
from tests.engine.parity.test_parity_axes import CHAINED, SHARED
from tests.models import take_rows

MICRO = 2
"""Rows of a microbatch."""
TENSOR = {name: SHARED[name] for name in ("decoder", "decoder tied", "llama", "gpt2")}
WIDE: dict[str, Callable[[], nn.Module]] = {"nano": partial(models.nano_wide_loss, layers=4), "t5": models.T5WideLoss}
MODELS: Mapping[str, Callable[[], nn.Module]] = TENSOR | CHAINED | WIDE
SEQUENCES = ("decoder", "decoder tied", "llama", "gpt2", "nano")
"""Models with a sequence and without dropout, whose masks depend on the number of context ranks."""
ONE_STAGE, TWO_STAGES = ("1f1b", "gpipe", "zb-h1"), ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")
"""Schedules by the stages of a rank."""


def ranks_of(row: Row) -> int:
    return prod(row.get(axis, 1) for axis in ("data", "context", "tensor", "pipeline"))


def rows_of(row: Row) -> int:
    """Rows of a global batch."""
    return int(MICRO * row["accumulation"] * row["data"])


def settings(row: Row, folder: str) -> dict[str, Any]:
    """The configuration of a row: four microbatches a data rank or eight, clipping active, a rate that moves."""
    stage, _, how = row["zero"].partition(" ")
    zero: dict[str, Any] = {"stage": int(stage), "reduce_bucket_size": 6000}
    zero |= {"gather" if stage == "3" else "reduce": how} if how else {}
    parallel = {axis: row[axis] for axis in ("data", "tensor", "pipeline")} | {"schedule": row["schedule"]}
    parallel |= {"context": row["context"]} if "context" in row else {}
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
    """Body of a rank: an engine, or two, one after the other; what came out, and what was not as planned."""
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
            if part + 1 < len(row["steps"]):
                eng.save_checkpoint()
                if eng.plan.tensor and row["recompute"] == "none":  # every rank proves what is written
                    config["parallel"] |= {"tensor_plan": dict(eng.plan.tensor.patterns)}
            else:
                weights = eng.full_state_dict()
    return TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), weights), tuple(problems)


def reference(row: Row) -> TrainingRecord:
    """One process of plain torch; rows share it that have the same model, batches and precision."""
    return _reference(row["model"], row["precision"], rows_of(row), sum(row["steps"]))


@cache
def _reference(model: str, precision: str, rows: int, steps: int) -> TrainingRecord:
    alone = {"data": 1, "tensor": 1, "pipeline": 1, "zero": "0", "schedule": "1f1b", "recompute": "none"}
    row = alone | {"precision": precision, "sequence": False, "accumulation": rows // MICRO}
    wishes = VerifyOptions(loss_sum if model.startswith("decoder") else None)
    torch.manual_seed(0)
    return train_alone(
        MODELS[model], settings(row, "nowhere"), models.batches_for(model.split()[0], rows, steps), wishes
    )
