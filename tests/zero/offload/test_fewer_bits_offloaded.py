"""State on the host beside traffic in fewer bits: the bits of a run with the same traffic whose state stays."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.selection import wide
from tests.zero.offload.test_offloaded_training import settings, trained, unequal

RunRanks = Callable[..., list[Any]]
FEWER: dict[str, dict[str, Any]] = {
    "weights": {"zero_quantized_weights": True},
    "gradients": {"zero_quantized_gradients": True},
    "both, with feedback": {
        "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_gradient_error_feedback": True,
        "zero_quantized_gradients_bits": 4,
    },
}  # fmt: skip


def differs(precision: str, mode: tuple[int, str], fewer: str) -> list[str]:
    """Body of a rank: what an offload changes."""
    runs = []
    for device in ("none", "cpu"):
        given = settings(("AdamW", precision, mode, 0.5), device)
        given["zero_optimization"] |= FEWER[fewer] | {"zero_quantized_block_size": 64}
        runs.append(trained(given))
    plain, offloaded = runs
    return unequal(plain[1], offloaded[1]) if plain[0] == offloaded[0] else [f"{plain[0]} {offloaded[0]}"]


@pytest.mark.parametrize(
    ("precision", "mode", "fewer"),
    [
        ("bf16", (1, "step"), "both, with feedback"),
        *(
            wide(precision, mode, fewer)
            for precision in ("bf16", "fp32", "fp16")
            for mode in ((1, "step"), (2, "microbatch"), (3, "step"), (3, "microbatch"))
            for fewer in FEWER
        ),
    ],
    ids=str,
)
def test_an_offload_changes_no_bit(run_ranks: RunRanks, precision: str, mode: tuple[int, str], fewer: str) -> None:
    assert run_ranks(differs, 2, precision, mode, fewer) == [[], []]
