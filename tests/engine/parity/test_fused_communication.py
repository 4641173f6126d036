"""Training with products that communicate inside their kernels is that of one process, at the bytes of the plan."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.verify import Parity, verify
from tests.engine.parity.launches import Compared, compare, settings
from tests.engine.parity.tensor_models import HEADS
from tests.kernels.interpreter import repair
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
FUSED = {"overlap": "fused", "pipeline": 1}
SHAPE = DecoderConfig(vocabulary=32, layers=1, width=16, heads=4, context=8)
LAUNCHES = ("launch_gather_product", "launch_product_scatter", "launch_forward_slots")


def trained(parallel: dict[str, Any]) -> tuple[Parity | None, dict[str, int]]:
    """Body of a rank: two steps of two microbatches, and how often each kernel was launched."""
    repair()
    from engine.kernels.gpu.overlap import launches

    launched: Counter[str] = Counter()
    for name in LAUNCHES:
        setattr(launches, name, _counted(name, getattr(launches, name), launched))
    tokens = torch.randint(0, 32, (2, 2, 9), generator=torch.Generator().manual_seed(3))
    batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]
    config = settings(1, parallel=FUSED | parallel) | {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}

    def build() -> Decoder:
        torch.manual_seed(1)
        return Decoder(SHAPE)

    return verify(build, config, batches, loss_sum), dict(launched)


def _counted(name: str, launch: Callable[..., Any], launched: Counter[str]) -> Callable[..., Any]:
    def counting(*args: Any, **named: Any) -> Any:
        launched[name] += 1
        return launch(*args, **named)

    return counting


@pytest.mark.parametrize(
    ("parallel", "launched"),
    [
        # a block gathers and scatters twice each in forward, and the other way round in backward
        ({"tensor": 2, "sequence_parallel": True}, {"launch_gather_product": 16, "launch_product_scatter": 16}),
        wide({"tensor": 2}, {"launch_product_scatter": 8}),
        wide({"tensor": 4}, {"launch_product_scatter": 8, "launch_forward_slots": 8}),
    ],
    ids=str,
)
def test_the_decoder_trains_as_one_process(
    run_ranks: RunRanks, parallel: dict[str, Any], launched: dict[str, int]
) -> None:
    for parity, counted in run_ranks(trained, parallel["tensor"], parallel, seconds=200.0):
        assert parity is None or parity.holds(), str(parity)
        assert counted == launched


def planted(sequence: bool, rows: list[dict[str, Any]]) -> tuple[Parity | None, dict[str, int]]:
    """Body of a rank: a step with overlap "auto" where ``rows`` were measured, and how often kernels were launched."""
    repair()
    from engine.kernels import overlap
    from engine.kernels.gpu.overlap import launches
    from engine.parallel.tensor.overlap import fused_moves

    table = tuple(overlap.OverlapChoice(device="cpu", dtype="float32", ranks=2, **row) for row in rows)
    overlap.shipped_overlap = lambda: table  # type: ignore[assignment]
    launched: Counter[str] = Counter()
    for name in LAUNCHES:
        setattr(launches, name, _counted(name, getattr(launches, name), launched))
    setattr(fused_moves, "copied_rows", _counted("copied_rows", fused_moves.copied_rows, launched))  # noqa: B010
    tokens = torch.randint(0, 32, (1, 9), generator=torch.Generator().manual_seed(3))
    config = settings(1, parallel={"overlap": "auto", "pipeline": 1, "tensor": 2, "sequence_parallel": sequence})

    def build() -> Decoder:
        torch.manual_seed(1)
        return Decoder(SHAPE)

    one = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
    return verify(build, config | one, [{"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}], loss_sum), dict(
        launched
    )


def row(operation: str, columns: int, depth: int) -> dict[str, Any]:
    """A kernel was measured to win from 8 rows on."""
    return {
        "operation": operation, "rows": 8, "columns": columns, "depth": depth, "way": "fused", "speedup": 1.2,
        "tile": (16, 16, 16, 4, 2),
    }  # fmt: skip


QUERY = row("gather_product", 8, 16)
"""Also the gradient of the attention's output; gate and up have other columns."""


@pytest.mark.parametrize(
    ("sequence", "rows", "launched"),
    [
        pytest.param(True, [QUERY], {"launch_gather_product": 2}, id="gather"),
        wide(True, [QUERY | {"way": "copied"}], {"launch_gather_product": 2, "copied_rows": 2}, id="copies"),
        wide(True, [QUERY, QUERY | {"way": "chunks", "rows": 4}], {"launch_gather_product": 2}, id="from 8 rows on"),
        wide(True, [QUERY | {"rows": 9}], {}, id="too few rows"),
        wide(True, [QUERY | {"way": "collectives"}], {}, id="collectives win"),
        wide(True, [row("product_scatter", 16, 8)], {"launch_product_scatter": 2}, id="scatter"),
        wide(False, [row("product_sum", 16, 8)], {"launch_product_scatter": 1}, id="sum"),
        wide(False, [row("product_sum", 16, 9)], {}, id="another depth"),
    ],
)
def test_auto_runs_in_kernels_what_was_measured_to_win(
    run_ranks: RunRanks, sequence: bool, rows: list[dict[str, Any]], launched: dict[str, int]
) -> None:
    for parity, counted in run_ranks(planted, 2, sequence, rows, seconds=200.0):
        assert parity is None or parity.holds(), str(parity)
        assert counted == launched


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "ranks", "changes"),
    [
        (("Llama", "Phi-3", "GPT-2", "Qwen3"), 2, {"parallel": {"sequence_parallel": True}}),
        (("Llama", "GPT-2"), 2, {"zero_optimization": {"stage": 1}}),
        (("Llama", "GPT-2", "Phi-3", "Qwen3"), 4, {"parallel": {"sequence_parallel": True}}),
        (("Llama", "GPT-2"), 4, {}),
    ],
    ids=str,
)
def test_models_train_as_one_process(
    run_ranks: RunRanks, names: tuple[str, ...], ranks: int, changes: dict[str, Any]
) -> None:
    parallel = FUSED | {"tensor": ranks} | changes.get("parallel", {})
    config = settings(1, **changes | {"parallel": parallel})
    for name, result in compare(run_ranks, [f"{name}{HEADS}" for name in names], config).items():
        assert isinstance(result, Compared), f"{name}: {result}"
        assert not result.uncounted, f"{name}: {result.uncounted}"
