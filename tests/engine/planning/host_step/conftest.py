"""Plans of a small decoder, and what they are made of."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from engine.config import load_config
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.planning.analysis import PlanRequest
from engine.planning.plan import Plan, build_plan
from engine.precision.dtypes import make_precision
from engine.program.batch import Batch
from engine.program.program import Program

STYLES = {
    "tokens": "vocabulary", "*.query": "column", "*.key": "column", "*.value": "column", "*.output": "row",
    "*.up": "column", "*.down": "row", "head": "vocabulary",
}  # fmt: skip


class Planned(NamedTuple):
    """What a prediction starts from."""

    program: Program
    plan: Plan
    row: Batch


Make = Callable[..., Planned]


@pytest.fixture
def make_planned() -> Make:
    def made(grid: Mapping[str, int], layers: int = 2, stage: int = 0, **more: Any) -> Planned:
        tensor = {"tensor_plan": STYLES, "verify_plan": False} if grid.get("tensor", 1) > 1 else {}
        settings = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "parallel": {**grid, **tensor},
            "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW"}, **more,
        }  # fmt: skip
        world = 2 if grid else 1
        config = load_config(settings, world)
        with torch.device("meta"):
            model = Decoder(DecoderConfig(vocabulary=32, layers=layers, width=64, heads=2, context=16))
        program = Program(model, loss_sum, make_precision(config, model), torch.device("cpu"))
        ids = torch.empty((2, 16), dtype=torch.int64, device="meta")
        row = {"input_ids": ids, "labels": ids}
        return Planned(program, build_plan(config, PlanRequest(program, row)), row)

    return made
