"""Every triple of (axes, ZeRO, shard groups, schedule, recomputation, precision, feature) beside shared experts."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
from torch import nn

from tests.covering import Row, covering_array
from tests.engine.parity.expert_runs import Run, assert_equal, mixture, run

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "data": (2, 4),
    "expert": (2, 4),
    "tensor": (1, 2),
    "pipeline": (1, 2),
    "zero": ("0", "1", "2", "2 microbatch", "3", "3 step"),
    "shards": (None, 2),
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v"),
    "recompute": ("none", "full", "selective", "offload"),
    "precision": ("fp32", "bf16", "bf16 alone", "fp16"),
    "feature": (
        "none", "sequence", "tied", "frozen experts", "ema", "integrity", "load", "optimizer on host",
        "weights on host",
    ),
}  # fmt: skip
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 alone": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "ema": {"ema": {"decay": 0.9}},
    "integrity": {"integrity": {"every": 1}},
    "load": {"monitor": {"expert_load": True}},
}
PARTS = 84
"""Tests into which the triples are split."""
TWO_STAGES = ("interleaved", "zb-v")
NARROW = {"loss": 2e-3, "norm": 3e-2, "weight": 4e-2}
"""A difference of rounding flips bits of 16-bit weights, so only the fp32 rows are the promise."""


def valid(row: Row) -> bool:
    """Rows that differ from others, and that the configuration admits."""
    stage, feature = int(row["zero"][0]), row["feature"]
    return (
        row["expert"] <= row["data"]
        and row["data"] * row["tensor"] * row["pipeline"] <= 8
        and (row["pipeline"] > 1 or row["schedule"] == "1f1b")
        and (row["shards"] is None or (stage > 0 and row["data"] == 4))
        and (feature != "sequence" or row["tensor"] > 1)
        and (feature != "weights on host" or stage == 3)
        and (feature != "optimizer on host" or row["precision"] != "bf16 alone")
        and (feature != "integrity" or row["precision"] != "bf16 alone")
    )


def changes_of(row: Row) -> dict[str, Any]:
    """The keys of a row beside its axes."""
    stage, _, how = row["zero"].partition(" ")
    zero: dict[str, Any] = {"stage": int(stage), "shard_size": row["shards"]}
    zero |= {"gather" if stage == "3" else "reduce": how} if how else {}
    zero |= {"offload_optimizer": {"device": "cpu"}} if row["feature"] == "optimizer on host" else {}
    zero |= {"offload_param": {"device": "cpu"}} if row["feature"] == "weights on host" else {}
    precise, more = CHANGES[row["precision"]], CHANGES.get(row["feature"], {})
    return {"zero_optimization": zero, "activation_checkpointing": {"mode": row["recompute"]}, **precise, **more}


def parallel_of(row: Row) -> dict[str, Any]:
    """The axes of a row, and their schedule."""
    found = {axis: row[axis] for axis in ("data", "expert", "tensor", "pipeline", "schedule")}
    found |= {"virtual_stages": 2} if row["schedule"] in TWO_STAGES else {}
    return found | ({"sequence_parallel": True} if row["feature"] == "sequence" else {})


def made(layers: int, feature: str) -> nn.Module:
    """The model of a row."""
    model = mixture(num_hidden_layers=layers, tie_word_embeddings=feature == "tied")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(feature != "frozen experts" or "experts" not in name)
    return model


@cache
def reference(layers: int, feature: str, precision: str) -> Run:
    """One process; rows share it that have the same model and precision."""
    return run({"data": 1}, CHANGES[precision], partial(made, layers, feature))


@cache
def triples() -> list[Row]:
    """The rows, which take seconds to choose."""
    return covering_array(FACTORS, valid, 3)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_triple_trains_as_one_process(part: int) -> None:
    wrong = []
    for row in triples()[part::PARTS]:
        layers = 4 if row["schedule"] in TWO_STAGES else 2
        kind = row["feature"] if row["feature"] in ("tied", "frozen experts") else "none"
        bounds = {} if row["precision"] == "fp32" else NARROW
        try:
            found = run(parallel_of(row), changes_of(row), partial(made, layers, kind))
            assert_equal(found, reference(layers, kind, row["precision"]), **bounds)
        except Exception as error:  # all wrong rows of a part are named
            wrong.append(f"{row}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)
