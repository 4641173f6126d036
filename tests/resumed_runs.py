"""Runs in two halves: a data rank's rows of global batches, and steps before and after a checkpoint."""

from collections.abc import Sequence
from typing import Any

from engine.engine import Engine
from tests.models import take_rows

HALFWAY = 2
"""Steps before the checkpoint."""


def own_rows(eng: Engine, batch: Any) -> Any:
    """The rows of a global batch that this rank passes to a step."""
    rows = eng.config.micro * eng.config.accumulation
    return take_rows(batch, eng.grid.coord().dp * rows, rows)


def second_half(eng: Engine, batches: Sequence[Any], folder: str, load: bool) -> list[float]:
    """The losses after ``HALFWAY`` of the global ``batches``: after steps that ``folder`` keeps, or after its load."""
    if load:
        eng.load_checkpoint(folder)
    else:
        for batch in batches[:HALFWAY]:
            eng.train_batch(own_rows(eng, batch))
        eng.save_checkpoint(folder).wait()
    return [eng.train_batch(own_rows(eng, batch)).loss for batch in batches[HALFWAY:]]
