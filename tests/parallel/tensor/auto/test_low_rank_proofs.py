"""Searches and proofs with low-rank weights find and refuse what those with all numbers do. One process."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight, low_rank_parameter
from tests.parallel.tensor.auto import blocks, test_coupled_parameters, test_equivalence, test_search

WITH_NUMBERS = (
    "test_a_truth_is_the_same_for_every_plan", "test_nothing_of_the_block_or_the_process_is_changed",
    "test_the_bias_of_a_key_has_no_gradient_and_rounding_is_none",
)  # fmt: skip
"""Tests that read the numbers of the block itself."""


def low_rank_filled(block: nn.Module) -> nn.Module:
    """As ``blocks.filled``, with every matrix in factors."""
    if any(isinstance(parameter, LowRankWeight) for parameter in block.parameters()):
        return block
    blocks_filled(block)
    generator = torch.Generator().manual_seed(0)
    thin = {
        id(parameter): low_rank_parameter(parameter.shape, name, generator, set())
        for name, parameter in block.named_parameters()
        if parameter.ndim in (2, 3)
    }
    for module in block.modules():
        for local, parameter in module._parameters.items():
            if id(parameter) in thin:
                module._parameters[local] = thin[id(parameter)]  # type: ignore[assignment]
    return block


blocks_filled = blocks.filled


def cases_of(module: ModuleType) -> list[Any]:
    found: list[Any] = []
    for name, function in vars(module).items():
        if not name.startswith("test_") or name in WITH_NUMBERS or not callable(function):
            continue
        values = [dict[str, Any]()]
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize" and isinstance(mark.args[0], str) and "," not in mark.args[0]:
                values = [{mark.args[0]: value} for value in mark.args[1]]
        needs = function.__code__.co_varnames[: function.__code__.co_argcount]
        if all(need in values[0] for need in needs):
            for value in values:
                marks = [pytest.mark.long] * (len(found) % 2)  # by default every second one
                found.append(pytest.param(module, name, value, id=f"{name}-{value}", marks=marks))
    return found


FILES = (test_equivalence, test_coupled_parameters, test_search)


@pytest.mark.parametrize(("module", "name", "values"), [case for module in FILES for case in cases_of(module)])
def test_with_low_rank_weights(
    module: ModuleType, name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "filled", low_rank_filled)
    if hasattr(module, "filled"):
        monkeypatch.setattr(module, "filled", low_rank_filled)
    test: Callable[..., None] = getattr(module, name)
    test(**values)
