"""Training with products that communicate inside their kernels is that of one process, at the bytes of the plan."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.parity.launches import Compared, compare, settings
from tests.engine.parity.tensor_models import HEADS
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
FUSED = {"sequence_parallel": True, "overlap": "fused", "pipeline": 1}


@pytest.mark.parametrize(
    ("names", "ranks", "changes"),
    [
        (("Llama",), 2, {}),
        wide(("Phi-3", "GPT-2", "Qwen3"), 2, {"zero_optimization": {"stage": 1}}),
        wide(("Llama", "GPT-2", "Phi-3", "Qwen3"), 4, {}),
    ],
)
def test_fused_communication_trains_as_one_process(
    run_ranks: RunRanks, names: tuple[str, ...], ranks: int, changes: dict[str, Any]
) -> None:
    config = settings(1, parallel=FUSED | {"tensor": ranks}, **changes)
    for name, result in compare(run_ranks, [f"{name}{HEADS}" for name in names], config).items():
        assert isinstance(result, Compared), f"{name}: {result}"
        assert result.parity.holds(), f"{name}: {result.parity}"
        assert not result.uncounted, f"{name}: {result.uncounted}"
