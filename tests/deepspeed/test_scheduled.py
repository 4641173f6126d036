"""Arguments of forward that follow the step: layer drop and a curriculum of lengths, as in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
import engine.deepspeed as deepspeed
from engine.config.deepspeed.forms import read_keywords
from engine.config.rules import Problems
from engine.deepspeed.pipe import LayerSpec, PipelineModule
from tests.deepspeed.scheduled_runs import CONFIG, KEPT, LENGTHS, LINEAR, Layers, in_plain_torch, microbatch, trained


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 4, 4, 6, 6, 8, 8, 10, 10)),
        (
            {
                "schedule_type": "fixed_root",
                "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2, "root_degree": 2},
            },
            (4, 6, 6, 6, 8, 8, 8, 10, 10),
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2, 3], "max_step": [2, 4]},
            },
            (1, 1, 2, 2, 3, 3),
        ),
        ({"schedule_config": {"total_curriculum_step": 8, "difficulty_step": 4}}, (4, 4, 4, 4, 4, 8)),
        ({"curriculum_type": "words"}, (None,)),
    ],
)
def test_a_curriculum_gives_each_step_its_length(changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    keywords = read_keywords({"curriculum_learning": LINEAR | changes}, Problems("the config"))
    assert tuple(keywords.at(steps).get("curriculum_seqlen") for steps in range(len(expected))) == expected


def check(found: list[tuple[list[float], dict[str, Tensor], list[Any]]]) -> None:
    losses, weights = in_plain_torch()
    for _, _, seen in found:
        assert seen == list(zip(KEPT, LENGTHS, strict=True))
    mean = torch.tensor([one for one, _, _ in found]).mean(0)
    assert torch.allclose(mean, torch.tensor(losses), rtol=1e-6)
    assert all(torch.allclose(found[0][1][name], value, atol=1e-5) for name, value in weights.items())


def test_forward_is_given_what_belongs_to_the_step_also_after_a_checkpoint(tmp_path: Path) -> None:
    check([trained(tmp_path, {})])


@pytest.mark.parametrize(
    "changes",
    [{"zero_optimization": {"stage": 3}}, pytest.param({"parallel": {"tensor": 2}}, marks=pytest.mark.long)],
)
def test_on_grids_too(changes: dict[str, Any], run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    check(run_ranks(trained, 2, tmp_path, changes))


def test_what_scripts_ask_about_them() -> None:
    eng: Any = deepspeed.initialize(model=Layers(), config=CONFIG)[0]
    assert eng.pld_enabled() and eng.curriculum_enabled_legacy() and eng.get_pld_theta() == 1.0
    scheduler = eng.curriculum_scheduler_legacy
    assert (scheduler.get_current_difficulty(), scheduler.update_difficulty(2), scheduler.get_difficulty(8)) == (
        2,
        4,
        10,
    )
    with pytest.raises(engine.EngineError, match=r"train_batch\(\) was called, but the configuration passes"):
        eng.train_batch(iter([microbatch(0)] * 2))
    plain: Any = deepspeed.initialize(model=nn.Linear(4, 2), config={"train_batch_size": 2})[0]
    assert plain.get_pld_theta() is None and plain.curriculum_scheduler_legacy is None and not plain.pld_enabled()


def test_a_chain_is_given_no_keywords() -> None:
    chain = PipelineModule([LayerSpec(nn.Linear, 4, 2)], 1, loss_fn=nn.MSELoss())
    with pytest.raises(engine.ConfigError, match="progressive_layer_drop was given with a PipelineModule, whose"):
        deepspeed.initialize(model=chain, config=CONFIG)
    given = {"train_batch_size": 2, "optimizer": CONFIG["optimizer"], "curriculum_learning": LINEAR}
    eng: Any = deepspeed.initialize(model=chain, config=given)[0]
    lengths = []
    for _ in range(2):
        lengths.append(eng.curriculum_scheduler_legacy.get_current_difficulty())
        eng.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 2))]))
    assert lengths == [2, 4]
