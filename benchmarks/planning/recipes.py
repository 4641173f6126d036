"""Published grids of mixtures of experts beside those that ``trine plan --search`` chooses, on the same GPUs.

    python -m benchmarks planning --experts [--write-figures]

``recipes.json`` has the grids with their sources. Models are built from ``configurations.json`` without content, and
nothing is measured: both columns are predictions of this engine in bf16, with selective recomputation and ZeRO 1 for
the published grid.
"""

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.planning.plan_search import CONFIGURATIONS, GIB, GPU
from engine.launch.cli import main as run_command

CONTEXT = 4096
"""Tokens of a row in all recipes."""
RECIPES: tuple[Mapping[str, Any], ...] = tuple(
    json.loads(Path(__file__).with_name("recipes.json").read_text(encoding="utf-8"))
)
_OUTSIDE = ("computation", "bubble")
Cells = dict[tuple[str, str], str]


def recipe_cells() -> Iterator[Cells]:
    """Yields the row of each recipe."""
    for recipe in RECIPES:
        name = f"{recipe['model']}, {recipe['gpus']:,} GPUs"
        yield {(name, column): text for column, text in _row(recipe).items()}


def _row(recipe: Mapping[str, Any]) -> dict[str, str]:
    begun = time.process_time()
    search = _planned(recipe, "--search", "--batch", str(recipe["rows"]))
    seconds, chosen = time.process_time() - begun, search["finalists"][0]
    published = _planned(recipe, config=published_config(recipe))
    return {
        "published grid": grid_text(recipe),
        "planned as": published["layout"],
        "published speed": recipe["published"],
        "step and memory of the published grid, predicted": _costs(published),
        "chosen grid": chosen["layout"],
        "step and memory of the chosen grid, predicted": _costs(chosen),
        "why they differ": reason(published, chosen),
        "search": f"{search['tried']:,} layouts, {seconds:.0f} CPU s",
        "source": recipe["source"],
    }


def grid_text(recipe: Mapping[str, Any]) -> str:
    """Returns a grid as its source gives it."""
    stages = f" of {recipe['virtual']} stages a rank" * (recipe["virtual"] > 1)
    return f"tp{recipe['tensor']} x pp{recipe['pipeline']}{stages}, ep{recipe.get('folded', recipe['expert'])}"


def published_config(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a published grid."""
    tensor, pipeline, virtual = recipe["tensor"], recipe["pipeline"], recipe["virtual"]
    parallel = {
        "data": recipe["gpus"] // tensor // pipeline,
        "tensor": tensor,
        "pipeline": pipeline,
        "expert": recipe["expert"],
        "sequence_parallel": tensor > 1,
        "schedule": "interleaved" if virtual > 1 else "1f1b",
        "virtual_stages": virtual,
    }
    return {
        "train_batch_size": recipe["rows"],
        "train_micro_batch_size_per_gpu": recipe["micro"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "parallel": parallel,
        "zero_optimization": {"stage": 1},
        "activation_checkpointing": {"mode": "selective"},
    }


def reason(published: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Describes the reason for another grid: memory, or the parts of a step that lose most."""
    if not published["fits"]:
        return f"the published grid needs {_memory(published):.1f} of {published['gpu_memory_bytes'] / GIB:.1f} GiB"
    parts = {**dict.fromkeys(published["seconds"] | chosen["seconds"], 0.0), **published["seconds"]}
    lost = {name: seconds - chosen["seconds"].get(name, 0.0) for name, seconds in parts.items()}
    worst = sorted((name for name in lost if lost[name] > 0), key=lambda name: -lost[name])[:2]
    share = published["step_seconds"] / chosen["step_seconds"] - 1
    if share <= 0 or not worst:
        return "the published grid is as fast"
    words = " and ".join(f"{lost[name]:.2g} s of {name if name in _OUTSIDE else f'{name} traffic'}" for name in worst)
    return f"the published grid takes {share:.0%} longer: {words}"


def _costs(plan: Mapping[str, Any]) -> str:
    step, speed = plan["step_seconds"], plan["tokens_per_second_of_a_gpu"]
    rate = plan["flops_per_second"] / 1e12
    return f"{step:.1f} s, {speed:,.0f} tokens/s, {rate:.0f} TFLOP/s, {_memory(plan):.1f} GiB"


def _memory(plan: Mapping[str, Any]) -> float:
    return max(float(rank["total"]) for rank in plan["memory_bytes"]) / GIB


def _planned(recipe: Mapping[str, Any], *options: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the answer of ``trine plan --estimate``."""
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGURATIONS[recipe["model"]]["config"]))
        given = []
        if config is not None:
            (Path(folder) / "run.json").write_text(json.dumps(config))
            given = [f"{folder}/run.json"]
        sizes = ("--world", str(recipe["gpus"]), "--gpu", GPU, "--context", str(CONTEXT))
        with contextlib.redirect_stdout(told):
            status = run_command(["plan", folder, *given, *sizes, "--estimate", "--json", *options])
    if status:
        raise RuntimeError(f"trine plan {recipe['model']} has failed")
    found: dict[str, Any] = json.loads(told.getvalue())
    return found
