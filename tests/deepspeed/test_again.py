"""A module is given to ``initialize`` again after ``destroy``, at every stage."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.deepspeed.again_runs import in_plain_torch, one_after_another, parts_again

ACCUMULATED = {"gradient_accumulation_steps": 2}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return ACCUMULATED | {"zero_optimization": {"stage": stage} | more}


CASES: dict[str, tuple[int, tuple[dict[str, Any], ...]]] = {
    "zero3": (2, (zero(3), zero(3), zero(1))),
    "zero3_on_the_host": (2, (zero(3, offload_param={"device": "cpu"}), zero(3))),
    "shard_groups": (4, (zero(3, mics_shard_size=2), zero(3))),
    "zero3_then_tensor": (2, (zero(3), {"parallel": {"tensor": 2}})),
    "zero2": (2, (zero(2), zero(2))),
    "zero0": (2, (zero(0), zero(3))),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "zero3" else pytest.mark.long) for name in CASES]
)
def test_engines_train_a_model_one_after_another(name: str, run_ranks: Callable[..., Any]) -> None:
    ranks, changes = CASES[name]
    losses, weights = in_plain_torch(len(changes))
    found = run_ranks(one_after_another, ranks, *changes)
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-6)
    assert found[0][1].keys() == weights.keys()
    assert all(torch.allclose(found[0][1][name], value, atol=1e-5) for name, value in weights.items())


@pytest.mark.parametrize("axis", ["tensor", pytest.param("pipeline", marks=pytest.mark.long)])
def test_a_model_that_is_left_in_parts_is_refused(axis: str, run_ranks: Callable[..., Any]) -> None:
    first, second = run_ranks(parts_again, 2, axis)
    assert first == second and re.match(
        r"the model has a part of its parameters on each rank, from a closed engine with ", first
    )
    assert "eng.full_state_dict() before close()" in first
