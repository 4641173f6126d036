"""Scripts of DeepSpeed's users with their import lines changed print what they print with the real DeepSpeed."""

import json
import re
from typing import Any

import pytest

from tests.deepspeed.record import CONFIGS, HERE, RECORD, printed
from tests.warm_python import warm_torchrun

IMPORT = re.compile(r"^(import|from) deepspeed", re.MULTILINE)
OTHER_GRID: dict[str, tuple[int, dict[str, Any]]] = {
    "cifar": (2, {"parallel": {"tensor": 2}, "train_micro_batch_size_per_gpu": 8}),
    "gan": (2, {"parallel": {"tensor": 2}, "train_micro_batch_size_per_gpu": 8}),
    "alexnet": (4, {"parallel": {"tensor": 2}}),
    "bert": (2, {"parallel": {"tensor": 2}, "train_micro_batch_size_per_gpu": 8}),
    "zero3": (2, {"zero_optimization": {"stage": 1}}),
    "full_grad": (2, {"zero_optimization": {"stage": 3}}),
}
"""Ranks, and what is written over the script's configuration; the rows of a step are the same."""


def changed(name: str) -> str:
    """The script, with DeepSpeed's name for the module and no other change."""
    source = (HERE / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    lines = [
        line.replace("import deepspeed", "import engine.deepspeed as deepspeed")
        if line.startswith("import deepspeed")
        else IMPORT.sub(r"\1 engine.deepspeed", line)
        for line in source.split("\n")
    ]
    return "\n".join(lines)


def check(name: str, ranks: int, config: dict[str, Any], warm_python: str) -> None:
    expected = json.loads(RECORD.read_text(encoding="utf-8"))["printed"][name]
    found = printed(changed(name), config, ranks, torchrun=warm_torchrun(warm_python))
    assert [word for word, _ in found] == [word for word, _ in expected]
    assert [number for _, number in found] == pytest.approx([number for _, number in expected], rel=1e-5, abs=1e-7)


OFTEN = ("cifar",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in CONFIGS]
)
def test_a_script_prints_what_it_prints_with_deepspeed(name: str, warm_python: str) -> None:
    check(name, 2, CONFIGS[name], warm_python)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHER_GRID)
def test_on_another_grid_too(name: str, warm_python: str) -> None:
    ranks, more = OTHER_GRID[name]
    check(name, ranks, CONFIGS[name] | more, warm_python)
