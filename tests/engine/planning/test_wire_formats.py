"""What a plan says of activations in fewer bits: formats that shorten nothing, and products that do not overlap."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.config import load_config
from engine.planning.analysis import PlanRequest
from engine.planning.plan import Plan, build_plan
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from engine.reporting.banner import banner_text

HALF: dict[str, Any] = {"bf16": {"enabled": True}}


def planned(wire: str, **changes: Any) -> Plan:
    """Of a perceptron over two tensor ranks."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    parallel = {"data": 1, "tensor": 2, "tensor_plan": {"0": "column", "2": "row"}, **changes.pop("parallel", {})}
    config = load_config({"train_batch_size": 8, "parallel": parallel, "wire": {"tensor": wire}} | changes, 2)
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    return build_plan(config, PlanRequest(program, torch.ones(2, 6, 64)))


@pytest.mark.parametrize(
    ("wire", "changes", "said"),
    [("bf16", HALF, True), ("fp16", HALF, True), ("int8", HALF, False), ("bf16", {}, False), ("exact", HALF, False)],
)
def test_a_cast_that_shortens_nothing_is_said(wire: str, changes: dict[str, Any], said: bool) -> None:
    notes = planned(wire, **changes).notes
    assert said == any(note.startswith(f"wire.tensor: {wire} makes nothing shorter that is") for note in notes)


def test_the_banner_does_not_speak_of_chunks_that_blocks_do_not_allow() -> None:
    sequence = {"sequence_parallel": True}
    chunks = "overlap    chunks of at least 1.0 MiB"
    assert chunks in banner_text(planned("exact", parallel=sequence), "cuda:0")
    text = banner_text(planned("int8", parallel=sequence), "cuda:0")
    assert (
        chunks not in text
        and "overlap    collectives for column inputs and row outputs, because encoded blocks are" in text
    )
