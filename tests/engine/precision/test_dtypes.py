"""Which dtype is kept for what, and what the banner says about it."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.config import load_config
from engine.planning.analysis import PlanRequest
from engine.planning.plan import build_plan
from engine.precision.dtypes import Precision, Widths, make_precision
from engine.program.program import Program
from engine.reporting.banner import banner_text

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ALONE = {"enabled": True, "bf16_master_weights_and_grads": True}
RUNS: dict[str, tuple[dict[str, Any], Widths, str]] = {
    "fp32": ({}, Widths(F32, F32, None, F32), "fp32, no second copy; gradients are sent in fp32"),
    "bf16": (
        {"bf16": {"enabled": True}, "communication_data_type": "fp16"},
        Widths(BF16, F32, F32, F32),
        "bf16 with fp32 master and accumulation; gradients are sent in fp16",
    ),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
        Widths(F16, F32, F32, F32),
        "fp16 with fp32 master and accumulation, loss scale 256, dynamic; gradients are sent in fp32",
    ),
    "fp16 fixed": (
        {"fp16": {"enabled": True, "loss_scale": 128}, "keep_fp32": ["1"]},
        Widths(F16, F32, F32, F32),
        "fp16 with fp32 master and accumulation, loss scale 128, 1 module in fp32; gradients are sent in fp32",
    ),
    "bf16 alone": (
        {"bf16": ALONE, "keep_fp32": ["0", "1"]},
        Widths(BF16, BF16, None, F32),
        "bf16 without a master, moments in fp32, updates rounded stochastically, 2 modules in fp32; gradients are "
        "sent in bf16",
    ),
    "bf16 alone, all of it": (
        {"bf16": ALONE | {"bf16_optimizer_states": True}},
        Widths(BF16, BF16, None, BF16),
        "bf16 without a master, moments in bf16, updates rounded stochastically; gradients are sent in bf16",
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_widths_and_banner(run: str) -> None:
    changes, widths, line = RUNS[run]
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    config = load_config({"train_batch_size": 4} | changes, 1)
    precision = make_precision(config, model)
    narrow = str(precision.parameter("2.weight", F32)).removeprefix("torch.")
    assert precision.widths(narrow) == widths
    assert precision.widths("float32") == Widths(F32, F32, None, F32), "of islands"
    assert precision.widths("float64") == Widths(F64, F64, None, F64)
    plan = build_plan(config, PlanRequest(Program(model, None, precision, torch.device("cpu"))))
    assert f"  precision  {line}\n" in banner_text(plan, "cpu")


def test_buffers_are_rounded_only_where_the_configuration_asks_for_it() -> None:
    given = {"model.rotary.inv_freq": F32, "norm.running_mean": F32, "table": F32, "wide": F64, "half": F16}
    precision = Precision(BF16, None)
    assert all(precision.buffer(name, dtype) == dtype for name, dtype in given.items())
    assert precision.buffer("count", torch.int64) == torch.int64
    asked = Precision(BF16, None, buffers=BF16)
    assert all(asked.buffer(name, dtype) == BF16 for name, dtype in given.items())
    assert asked.buffer("count", torch.int64) == torch.int64
