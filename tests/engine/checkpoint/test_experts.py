"""Checkpoints of experts that data ranks share load on any grid, with the optimizer's state, and export whole."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import engine
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_reader import StepReader
from engine.parallel.grid import saved_grid
from tests.engine.parity.expert_runs import CONFIG, GRIDS, TOKENS, mixture, own_batch, run

RunRanks = Callable[..., list[Any]]
Legs = Sequence[tuple[str, int]]
"""Grid and ZeRO stage of each step; a checkpoint lies between two of them."""
UNEVEN = {"data": 3, "expert": 3}
WIDE: Mapping[str, Mapping[str, Any]] = {
    **GRIDS, "dp2": {"data": 2}, "ep3": UNEVEN, "alone": {"data": 1},
    **{form: {**GRIDS["ep2-tp2"], "expert_tensor": form} for form in ("cut", "whole")},
}  # fmt: skip


def leg(
    parallel: Mapping[str, Any], changes: Mapping[str, Any], step: int, source: str | None, target: str
) -> tuple[float, float, dict[str, Tensor]]:
    """Body of a rank: loads, makes one step and saves. Returns loss, norm and weights."""
    torch.set_num_threads(1)
    example = {name: torch.zeros(1, TOKENS, dtype=torch.long) for name in ("input_ids", "labels")}
    with engine.initialize(mixture(), {**CONFIG, **changes, "parallel": parallel}, None, example) as eng:
        if source is not None:
            eng.load_checkpoint(source)
        report = eng.train_batch(own_batch(eng, step))
        eng.save_checkpoint(target).wait()
        eng.save_pretrained(f"{target}-exported")
        return report.loss, report.grad_norm, eng.full_state_dict()


def exported(folder: str) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder."""
    found = {}
    for file in Path(f"{folder}-exported").glob("*.safetensors"):
        found.update(load_file(file))
    return found


@pytest.mark.parametrize(
    ("legs", "changes"),
    [
        ((("ep2", 3), ("ep2-pp2", 1)), {}),
        *(
            pytest.param(legs, changes, marks=pytest.mark.long)
            for legs, changes in (
                *(((("ep4", z), ("ep2", z), ("dp2", z), ("ep2-pp2", z), ("ep4", z)), {}) for z in range(4)),
                ((("ep4", 3), ("dp4-ep2", 1), ("ep2-tp2", 3), ("ep2-pp2", 0), ("ep2", 2)), {}),
                ((("ep4", 3), ("dp4-ep2", 1), ("ep2-tp2", 0)), {"optimizer": {"type": "Adafactor"}}),
                ((("ep4", 3), ("dp4-ep2", 1), ("ep2-tp2", 0)), {"optimizer": {"type": "Lamb"}}),
                ((("ep4", 3), ("dp4-ep2", 1), ("ep2-tp2", 0)), {"ema": {"decay": 0.9}}),
                ((("ep3", 3), ("dp2", 1), ("ep3", 0)), {"train_batch_size": 6}),
                *(((("cut", z), ("whole", 1), ("cut", 3), ("alone", 0)), {}) for z in range(4)),
                ((("whole", 3), ("cut", 1), ("alone", 0)), {"optimizer": {"type": "Adafactor"}}),
                ((("cut", 1), ("whole", 3), ("alone", 0)), {"optimizer": {"type": "Lamb"}}),
            )
        ),
    ],
)
def test_a_run_over_several_grids_equals_one_process(
    run_ranks: RunRanks, legs: Legs, changes: dict[str, Any], tmp_path: Path
) -> None:
    alone = run({"data": 1}, {key: value for key, value in changes.items() if key != "ema"}, steps=len(legs))
    source: str | None = None
    for step, (grid, stage) in enumerate(legs):
        target, parallel = str(tmp_path / f"after-{step}"), WIDE[grid]
        ranks = int(parallel["data"]) * int(parallel.get("tensor", 1)) * int(parallel.get("pipeline", 1))
        given = changes | {"zero_optimization": {"stage": stage}}
        loss, norm, weights = run_ranks(leg, ranks, parallel, given, step, source, target)[0]
        assert (loss, norm) == (
            pytest.approx(alone.losses[step], rel=1e-6), pytest.approx(alone.norms[step], rel=1e-5)
        )  # fmt: skip
        source = target
    assert source is not None
    found = exported(source)
    assert found.keys() == exported(str(tmp_path / "after-0")).keys()
    for name, value in alone.weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    for name, value in found.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
    step_folder = next(Path(source).glob("step-*"))
    assert saved_grid(StepReader(Files(), step_folder).manifest.info["grid"]).experts == parallel.get("expert", 1)
