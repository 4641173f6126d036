"""The banner says how products of tensor ranks overlap, and which layers communicate in kernels."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.kernels.overlap import OverlapChoice, OverlapChoices
from engine.planning.analysis import PlanRequest
from engine.planning.fused_layers import fused_layers, measured_overlap
from engine.planning.plan import Plan, build_plan
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from engine.reporting.banner import banner_text

WIDTH, INNER, TP = 8, 32, 2
STYLES = {"layers.*.up": "column", "layers.*.down": "row"}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Perceptron() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def planned(overlap: str, sequence: bool) -> Plan:
    parallel = {"data": 1, "tensor": TP, "tensor_plan": STYLES, "overlap": overlap, "sequence_parallel": sequence}
    config = load_config({"train_batch_size": 8, "parallel": parallel}, TP)
    model = Two()
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    return build_plan(config, PlanRequest(program, torch.ones(2, 6, WIDTH)))


def choice(operation: Any, columns: int, depth: int, way: Any = "fused", rows: int = 64) -> OverlapChoice:
    return OverlapChoice(
        operation=operation, device="*", dtype="float32", ranks=TP, rows=rows, columns=columns, depth=depth,
        way=way, speedup=1.2,
    )  # fmt: skip


MEASURED = OverlapChoices(
    [
        choice("gather_product", INNER // TP, WIDTH),
        choice("gather_product", INNER // TP, WIDTH, "copied", rows=128),
        choice("product_scatter", WIDTH, INNER // TP, "chunks"),
        choice("product_sum", WIDTH, INNER // TP, rows=32),
    ]
)
ROWS = "column inputs and row outputs"
LINES = [
    ("auto", True, "cpu", None, "collectives for everything, on CPUs"),
    ("auto", True, "cuda:0", None, f"chunks of at least 1.0 MiB for {ROWS}; collectives for the rest"),
    (
        "auto", True, "cuda:0", MEASURED,
        f"fused for layers.*.up from 64 rows; chunks of at least 1.0 MiB for other {ROWS}; collectives for the rest",
    ),
    (
        "auto", False, "cuda:0", MEASURED,
        "fused for layers.*.down from 32 rows; collectives for the rest; from 1.0 MiB on input gradients are summed "
        "while weight gradients are computed",
    ),
    ("off", True, "cuda:0", None, "off: computation waits for every collective"),
    ("chunks", True, "cpu", None, f"chunks for {ROWS}; collectives for the rest"),
    ("chunks", False, "cpu", None, "input gradients are summed while weight gradients are computed"),
    ("fused", True, "cpu", None, f"fused for {ROWS} of at most 16.0 MiB between two ranks; collectives for the rest"),
    (
        "fused", False, "cpu", None,
        "fused for row outputs of at most 16.0 MiB between two ranks; collectives for the rest",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overlap", "sequence", "device", "measured", "line"), LINES)
def test_the_banner_says_what_runs(
    overlap: str, sequence: bool, device: str, measured: OverlapChoices | None, line: str
) -> None:
    assert f"  overlap    {line}\n" in banner_text(planned(overlap, sequence), device, measured)


def test_layers_of_other_sizes_are_not_fused() -> None:
    other = OverlapChoices([choice("gather_product", INNER, WIDTH), choice("gather_product", INNER // TP, INNER)])
    assert fused_layers(planned("auto", True), other) == ()


def test_nothing_is_fused_on_a_gpu_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned("auto", True).config
    assert measured_overlap(config, torch.device("cpu")) is None
    from engine.kernels import overlap

    rows = [choice("gather_product", INNER // TP, WIDTH)]
    monkeypatch.setattr(overlap, "shipped_overlap", lambda: rows)
    found = measured_overlap(config, torch.device("cpu"))
    assert found is not None and found.rows == tuple(rows)
    assert measured_overlap(config, torch.device("cpu"), card="") is None, "kernels do not run on all ranks"
    assert measured_overlap(planned("chunks", True).config, torch.device("cpu")) is None
    rows[0] = choice("gather_product", INNER // TP, WIDTH, "chunks")
    assert measured_overlap(config, torch.device("cpu")) is None, "nothing has won"
