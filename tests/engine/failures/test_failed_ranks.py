"""A data rank whose loader fails, or whose step does: all ranks raise, and the others name it and its error."""

import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

import engine
from tests import models
from tests.engine.every_grid import every_grid
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import ROWS, data, settings

RunRanks = Callable[..., list[Any]]


def microbatches(rows: Tensor, end: int, error: Exception | None) -> Iterator[Tensor]:
    """The microbatches of a step; before number ``end`` the loader ends, or raises."""
    for index, microbatch in enumerate(rows.chunk(2)):
        if index == end:
            if error is not None:
                raise error
            return
        yield microbatch


def message(call: Callable[[Any], object], batch: Iterator[Tensor]) -> str:
    try:
        call(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loaders_fail(grid: dict[str, int], stage: Any) -> list[tuple[str, str]]:
    """Body of a rank: (what was failed at, what is said) of the last rank's loader, and the losses of good steps."""
    found = []
    with engine.initialize(models.decoder(), settings(grid, stage), loss_of, example_batch=data(1)[0][:2]) as eng:
        bad = eng.grid.rank == eng.grid.world_size - 1
        for call in (eng.train_batch, eng.eval_batch):
            for error in (None, OSError("the disk is gone")):
                rows = data(1)[0][:ROWS]
                found.append((call.__name__, message(call, microbatches(rows, 1 if bad else 2, error))))
                found.append(("loss", f"{eng.train_batch(rows).loss:.6f}"))
    return found


@pytest.mark.parametrize(("grid", "stage"), every_grid("dp2-zero3", "pp2"))
def test_a_loader_that_ends_or_raises_on_one_rank_stops_all_with_its_error(
    grid: dict[str, int], stage: Any, run_ranks: RunRanks
) -> None:
    *others, own = run_ranks(loaders_fail, math.prod(grid.values()), grid, stage)
    errors = [text for what, text in own if what != "loss"]
    assert errors[1::2] == ["OSError: the disk is gone"] * 2 and errors[0].startswith("EngineError: the iterator ended")
    named = (
        f"EngineError: rank {len(others)} ({socket.gethostname()}) failed in this step, so no rank updated its weights"
    )
    for other in others:
        for (what, text), (_, cause) in zip(other, own, strict=True):
            expected = cause if what == "loss" else f"{named}; see the error of the rank that failed: {cause}"
            assert text == expected
    assert own[1] != own[3], "steps between failures train"
