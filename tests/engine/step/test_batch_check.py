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


def other(bits: int) -> type[RecordingBackend]:
    """The other rank's digest differs in these bits."""

    class Other(RecordingBackend):
        """Rank 1."""

        def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
            full.copy_(torch.cat([shard, shard ^ bits]).view_as(full))
            return lambda: None

    return Other


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
    _, problem, _ = take(other(1))
    assert isinstance(problem, EngineError) and "were given different batches" in str(problem)
    assert "model_engine.grid.get_data_parallel_rank()" in str(problem), "grid.dp is no attribute of DeepSpeed's grid"


@pytest.mark.parametrize("training", [True, False])
def test_a_rank_that_evaluates_while_others_train_is_refused(training: bool) -> None:
    """Over tensor ranks its collectives fit those of a training step, and nobody would notice."""
    with torch.set_grad_enabled(training):
        _, problem, _ = take(other(1 << 62))
    assert isinstance(problem, EngineError) and "rank 0 and rank 1 make different calls" in str(problem)
