"""A batch check that cannot be made is no bad batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import load_config
from engine.errors import EngineError
from engine.parallel.comm.backend import RecordingBackend, Wait
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis, Grid
from engine.program.batch_rows import BatchRows
from engine.step.batch_check import take_batch


class Silent(RecordingBackend):
    """The other ranks do not come."""

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        def wait() -> None:
            raise RuntimeError("Timed out waiting 15000ms for recv operation to complete")

        return wait


def take(backend: type[RecordingBackend]) -> Any:
    grid = Grid(tp=2)
    config = load_config({"train_batch_size": 2, "parallel": {"tensor": 2}}, 2)
    whole = partial(BatchRows().take_microbatches, torch.ones(2, 3), config.micro, config.accumulation)
    return take_batch(whole, Comm(grid, backend(grid)), torch.device("cpu"))


def test_a_lost_rank_ends_the_step_at_once() -> None:
    """Kept as a problem of the batch, it was replaced by the failure of the next collective, which names others."""
    with pytest.raises(EngineError, match=r"all_gather 'batch check' over replica.*Timed out waiting"):
        take(Silent)


def test_a_batch_that_differs_is_a_problem_of_the_step() -> None:
    _, problem = take(RecordingBackend)
    assert isinstance(problem, EngineError) and "were given different batches" in str(problem)
