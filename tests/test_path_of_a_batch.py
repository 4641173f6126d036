"""The path of a batch in ``docs/internals/architecture.md``: short, and every file on it takes part in a step."""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import engine
from engine.models.decoder import loss_sum
from tests import models
from tests.structure import ROOT

PAGE = ROOT / "docs" / "internals" / "architecture.md"
RunRanks = Callable[..., list[Any]]
DATA: dict[str, Any] = {"zero_optimization": {"stage": 1}, "parallel": {"data": 2}}
THREE_AXES: dict[str, Any] = {
    "zero_optimization": {"stage": 3}, "parallel": {"data": 2, "tensor": 2, "pipeline": 2},
}  # fmt: skip
MOST_FILES, MOST_FILES_OF_THREE_AXES = 40, 75
"""Files of the product in which a function runs in one step, over all ranks: what a reader may have to open."""
SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


def path_of(marker: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"<!-- path {marker} -->(.*?)<!-- /path {marker} -->", text, re.DOTALL)
    assert found is not None
    return re.findall(r"^\d+\. `([\w/.]+)`", found[1], re.MULTILINE)


def files_of_a_step(config: dict[str, Any]) -> set[str]:
    """Body of a rank: product files in which a function runs during the second step."""
    batches = models.batches_for("decoder", 8, 2)
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    with engine.initialize(
        models.decoder(), SIZES | config, loss_sum, {k: v[:2] for k, v in batches[0].items()}
    ) as eng:
        rows = slice(eng.grid.coord().dp * 4, eng.grid.coord().dp * 4 + 4)
        first, second = ({key: value[rows] for key, value in batch.items()} for batch in batches)
        eng.train_batch(first)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            eng.train_batch(second)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return {Path(name).resolve().relative_to(ROOT).as_posix() for name in seen if name.startswith(f"{ROOT}/")}


def test_the_path_of_a_batch_is_short() -> None:
    assert len(path_of("dp")) <= 12 and len(path_of("dp")) + len(path_of("3d")) <= 25


def test_a_batch_passes_the_files_on_its_path(run_ranks: RunRanks) -> None:
    files = set.union(*run_ranks(files_of_a_step, 2, DATA))
    assert not set(path_of("dp")) - files and len(files) <= MOST_FILES


@pytest.mark.long
def test_a_batch_passes_the_files_on_its_path_over_three_axes(run_ranks: RunRanks) -> None:
    files = set.union(*run_ranks(files_of_a_step, 8, THREE_AXES))
    assert not {*path_of("dp"), *path_of("3d")} - files and len(files) <= MOST_FILES_OF_THREE_AXES
