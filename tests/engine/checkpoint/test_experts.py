"""Checkpoints of experts that data ranks share load on any grid, with the optimizer's state, and export whole."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import engine
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_reader import StepReader
from engine.parallel.grid import saved_grid
from tests.engine.parity.expert_runs import CONFIG, GRIDS, TOKENS, WORDS, Run, mixture, own_batch, run
from tests.engine.parity.test_experts import STACKS, adapted

RunRanks = Callable[..., list[Any]]
Legs = Sequence[tuple[str, int]]
"""Grid and ZeRO stage of each step; a checkpoint lies between two of them."""
UNEVEN = {"data": 3, "expert": 3}
WIDE: Mapping[str, Mapping[str, Any]] = {
    **GRIDS, "dp2": {"data": 2}, "ep3": UNEVEN, "alone": {"data": 1},
    **{form: {**GRIDS["ep2-tp2"], "expert_tensor": form} for form in ("cut", "whole")},
}  # fmt: skip


def leg(
    parallel: Mapping[str, Any], changes: Mapping[str, Any], step: int, source: str | None, target: str,
    make: Callable[[], nn.Module] = mixture,
) -> tuple[float, float, dict[str, Tensor]]:  # fmt: skip
    """Body of a rank: loads, makes one step and saves. Returns loss, norm and weights."""
    torch.set_num_threads(1)
    example = {name: torch.zeros(1, TOKENS, dtype=torch.long) for name in ("input_ids", "labels")}
    with engine.initialize(make(), {**CONFIG, **changes, "parallel": parallel}, None, example) as eng:
        if source is not None:
            eng.load_checkpoint(source)
        report = eng.train_batch(own_batch(eng, step))
        eng.save_checkpoint(target).wait()
        eng.save_pretrained(f"{target}-exported")
        return report.loss, report.grad_norm, eng.full_state_dict()


def exported(folder: str) -> set[str]:
    """Keys of all tensors of a Hugging Face folder."""
    return {key for file in Path(f"{folder}-exported").glob("*.safetensors") for key in load_file(file)}


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
    weights, source = chain(run_ranks, legs, changes, alone, tmp_path)
    assert exported(source) == exported(str(tmp_path / "after-0"))
    loaded: Any = type(mixture()).from_pretrained(f"{source}-exported")  # type: ignore[attr-defined]
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
    step_folder, (grid, _) = next(Path(source).glob("step-*")), legs[-1]
    experts = saved_grid(StepReader(Files(), step_folder).manifest.info["grid"]).experts
    assert experts == WIDE[grid].get("expert", 1)


def chain(
    run_ranks: RunRanks, legs: Legs, changes: dict[str, Any], alone: Run, folder: Path, *make: Callable[[], nn.Module]
) -> tuple[dict[str, Tensor], str]:
    """Runs all legs, equal to one process; returns the weights at the end and the last folder."""
    source: str | None = None
    for step, (grid, stage) in enumerate(legs):
        target, parallel = str(folder / f"after-{step}"), WIDE[grid]
        ranks = int(parallel["data"]) * int(parallel.get("tensor", 1)) * int(parallel.get("pipeline", 1))
        given = changes | {"zero_optimization": {"stage": stage}}
        loss, norm, weights = run_ranks(leg, ranks, parallel, given, step, source, target, *make)[0]
        assert (loss, norm) == (
            pytest.approx(alone.losses[step], rel=1e-6), pytest.approx(alone.norms[step], rel=1e-5)
        )  # fmt: skip
        source = target
    assert source is not None and weights.keys() == alone.weights.keys()
    for name, value in alone.weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    return weights, source


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(
    "legs", [(("ep4", 3), ("ep2-tp2", 1), ("ep2-pp2", 0)), (("ep2-pp2", 3), ("dp2", 2), ("ep2-tp2", 3), ("ep4", 0))]
)
def test_adapters_of_experts_move_to_other_grids_and_are_written_as_peft_reads_them(
    run_ranks: RunRanks, legs: Legs, tmp_path: Path
) -> None:
    from peft import PeftModel

    make = partial(adapted, **STACKS)
    weights, source = chain(run_ranks, legs, {}, run({"data": 1}, make=make, steps=len(legs)), tmp_path, make)
    right: Any = make()
    right.load_state_dict(weights)
    read = PeftModel.from_pretrained(mixture(), f"{source}-exported")
    ids = torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        assert torch.equal(read.eval()(ids).logits, right.eval()(ids).logits)
