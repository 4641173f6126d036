"""Trainers of TRL behind the engine's Trainer train as they do alone on as many data ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.huggingface.trl_runs import Tuning, run_tuning

pytestmark = pytest.mark.long
EXACT = 1e-5
"""Largest relative difference of a loss in fp32."""


class Host(NamedTuple):
    """A run of TRL alone."""

    ranks: int
    """2 where TRL draws on every rank, or normalizes there, so that one process computes something else."""
    run: Mapping[str, Any]
    """What differs from the usual run, of :class:`Tuning`."""


HOSTS: Mapping[str, Host] = {
    "SFT": Host(1, {"kind": "SFT"}),
    "SFT with adapters": Host(1, {"kind": "SFT", "adapters": True}),
    "SFT packed": Host(1, {"kind": "SFT", "arguments": {"packing": True, "max_length": 24, "num_train_epochs": 2}}),
    "DPO": Host(1, {"kind": "DPO"}),
    "DPO with adapters": Host(1, {"kind": "DPO", "adapters": True}),
    "DPO of a moving reference": Host(
        1, {"kind": "DPO", "arguments": {"sync_ref_model": True, "ref_model_sync_steps": 1}}
    ),
    "GRPO": Host(2, {"kind": "GRPO"}),
    "GRPO on one data rank": Host(1, {"kind": "GRPO"}),
    "GRPO of several updates": Host(
        2,
        {
            "kind": "GRPO",
            "arguments": {
                "beta": 0.1,
                "num_iterations": 2,
                "steps_per_generation": 4,
                "max_steps": 8,
                "adam_epsilon": 1e-5,
            },
        },
    ),
    "GRPO with adapters": Host(2, {"kind": "GRPO", "adapters": True, "arguments": {"beta": 0.1}}),
    "RLOO": Host(2, {"kind": "RLOO", "arguments": {"beta": 0.1}}),
    "KTO": Host(2, {"kind": "KTO"}),
    "KTO with adapters": Host(2, {"kind": "KTO", "adapters": True}),
    "Reward": Host(1, {"kind": "Reward"}),
}
GRIDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "dp2": (2, {}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero2": (2, {"zero_optimization": {"stage": 2}}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "dp2 x tp2": (4, {"parallel": {"tensor": 2}, "zero_optimization": {"stage": 1}}),
}
DATA = ("dp2", "zero1", "zero2", "zero3")
WHERE: Mapping[str, tuple[str, ...]] = {
    "SFT": (*DATA, "tp2", "dp2 x tp2"),
    "SFT with adapters": ("zero3", "tp2"),
    "SFT packed": ("zero3", "tp2"),
    "DPO": (*DATA, "tp2", "dp2 x tp2"),
    "DPO with adapters": ("zero1", "zero3", "tp2"),
    "DPO of a moving reference": ("zero2",),
    "GRPO": (*DATA, "dp2 x tp2"),
    "GRPO on one data rank": ("tp2",),
    "GRPO of several updates": ("dp2", "zero3", "dp2 x tp2"),
    "GRPO with adapters": ("zero3", "dp2 x tp2"),
    "RLOO": ("zero3", "dp2 x tp2"),
    "KTO": ("zero3",),
    "KTO with adapters": ("zero3",),
    "Reward": ("zero3",),
}  # fmt: skip
Logs = dict[str, list[float]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What TRL logs alone, each run once."""
    done: dict[str, Logs] = {}

    def run(name: str) -> Logs:
        if name not in done:
            host, folder = HOSTS[name], str(tmp_path_factory.mktemp("host"))
            done[name] = run_tuning(Tuning(folder=folder, rows=4 // host.ranks, **host.run), host.ranks)
        return done[name]

    return run


@pytest.mark.parametrize(("name", "grid"), [(name, grid) for name in HOSTS for grid in WHERE[name]])
def test_a_run_is_that_of_trl_alone(name: str, grid: str, alone: Any, tmp_path: Path) -> None:
    ranks, config = GRIDS[grid]
    rows = 4 if grid == "tp2" else 2
    host, found = (
        alone(name),
        run_tuning(Tuning(folder=str(tmp_path), config=config, rows=rows, **HOSTS[name].run), ranks),
    )
    assert len(host["loss"]) >= 4 and host.keys() == found.keys()
    for value, logged in host.items():
        exact = EXACT if value.endswith("loss") else 1e-4
        assert found[value] == pytest.approx(logged, rel=exact, abs=1e-6), value


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_pipelines_are_refused(kind: str, tmp_path: Path) -> None:
    found = run_tuning(Tuning(folder=str(tmp_path), kind=kind, config={"parallel": {"pipeline": 2}}), 2)
    assert found == (
        f"{kind}Trainer of TRL was given parallel.pipeline 2, but its loss multiplies by the weight of the head, which "
        "only the last stage has; remove parallel.pipeline."
    )
