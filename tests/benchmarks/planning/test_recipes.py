"""Published grids of mixtures: configurations that the engine reads, and reasons for other grids."""

from typing import Any

import pytest

from benchmarks.planning.plan_search import CONFIGURATIONS
from benchmarks.planning.recipes import RECIPES, grid_text, published_config, reason
from engine.config import load_config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe['model']}-{recipe['gpus']}")
def test_published_grids_are_configurations_of_published_models(recipe: dict[str, Any]) -> None:
    config = load_config(published_config(recipe), recipe["gpus"])
    assert config.train_batch_size == recipe["rows"] and config.parallel.expert == recipe["expert"]
    assert recipe["model"] in CONFIGURATIONS and f"ep{recipe.get('folded', recipe['expert'])}" in grid_text(recipe)


def planned(step: float, fits: bool = True, **seconds: float) -> dict[str, Any]:
    memory = [{"total": 90 * 2**30}]
    return {
        "step_seconds": step, "seconds": seconds, "fits": fits, "memory_bytes": memory, "gpu_memory_bytes": 80 * 2**30,
    }  # fmt: skip


def test_the_reason_for_another_grid_is_its_memory_or_the_parts_that_lose_most() -> None:
    chosen = planned(10.0, computation=9.0, bubble=1.0)
    assert reason(planned(9.0, fits=False), chosen) == "the published grid needs 90.0 of 80.0 GiB"
    assert reason(planned(13.0, computation=9.5, bubble=1.5, ep=2.0), chosen).startswith("the published grid takes 30%")
    assert "2 s of ep traffic and 0.5 s of" in reason(planned(13.0, computation=9.4, bubble=1.5, ep=2.0), chosen)
    assert reason(planned(9.5, computation=9.5), chosen) == "the published grid is as fast"
