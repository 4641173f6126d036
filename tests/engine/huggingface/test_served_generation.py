"""GRPO with a vLLM server: each step samples from its own weights, and log-probabilities tell stale ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.served_runs import RENAMED, STALE, Served, run_served, save_model
from tests.engine.weights_out.fake_vllm_server import fake_server

GRIDS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "dp2 ZeRO 1": (2, 2, {"zero_optimization": {"stage": 1}}),
    "tp2": (2, 4, {"parallel": {"tensor": 2}}),
    "dp2 ZeRO 3": (2, 2, {"zero_optimization": {"stage": 3}}),
    "dp2 x tp2": (4, 2, {"parallel": {"tensor": 2}, "zero_optimization": {"stage": 1}}),
}
"""Ranks, rows of a data rank in a microbatch, and the configuration."""
ROUNDING, OTHER = 5e-6, 1e-2
"""Largest difference of log-probabilities by rounding, and least mean difference of the weights one step before."""


def check_served(found: list[dict[str, Any]]) -> None:
    """Asserts that each step used its own version, the stale one is seen, and the renamed one refused on all ranks."""
    first, fresh = found[0], STALE - 1
    begin = int(first["versions"][0])
    assert first["versions"] == [str(begin + step) for step in (*range(fresh), fresh - 1)]
    assert all(0 < value < ROUNDING for value in first["max"][:fresh]), first["max"]
    assert first["mean"][fresh] > OTHER and len(first["mean"]) == RENAMED - 1, first["mean"]
    for rank in found:
        assert rank["sentence"].endswith(
            f"has sampled tokens from version '99', but version {begin + fresh} was published for them; let no other "
            "training publish to this server."
        )


def test_each_step_samples_from_its_own_weights(tmp_path: Path) -> None:
    with fake_server(save_model(tmp_path)) as url:
        found = run_served(Served(folder=str(tmp_path), url=url), 1)
    check_served(found)


@pytest.mark.long
def test_grids_train_as_one_process_does(tmp_path: Path) -> None:
    with fake_server(save_model(tmp_path)) as url:
        alone = run_served(Served(folder=str(tmp_path), url=url), 1)[0]
    for name, (ranks, rows, config) in GRIDS.items():
        folder = tmp_path / name
        with fake_server(save_model(folder)) as url:
            found = run_served(Served(folder=str(folder), url=url, config=config, rows=rows), ranks)
        check_served(found)
        for key in ("loss", "grad_norm", "reward", "reward_std"):
            assert found[0][key][: STALE - 1] == pytest.approx(alone[key][: STALE - 1], rel=1e-4, abs=1e-6), (name, key)
        assert found[0]["prompts"] == alone["prompts"]
