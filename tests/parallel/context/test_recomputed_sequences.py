"""Recomputed blocks of context ranks run as their forward did: with the same operators, on batch tensors alone."""

from typing import Any

import pytest

from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.context import recipe_mode
from engine.parallel.context.sequences import ContextOfSequences, SequenceEntry
from engine.parallel.grid import Grid
from engine.parallel.model.operand_casts import is_watched
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.verify import verify
from tests.parallel.context.test_context_training import batches_of, config_of, llama
from tests.selection import wide

GRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "cp2": ({"context": 2}, 2),
    "cp2 x tp2": ({"context": 2, "tensor": 2, "sequence_parallel": True}, 4),
    "cp2 x pp2": ({"context": 2, "pipeline": 2}, 4),
    "cp2 x pp2, zero bubble": ({"context": 2, "pipeline": 2, "schedule": "zb-h1"}, 4),
}


def context_of_two() -> ContextOfSequences:
    grid = Grid(pp=1, dp=1, tp=1, cp=2, rank=0)
    return ContextOfSequences(TensorAxis(Comm(grid, RecordingBackend(grid)), "cp"))


def test_a_forward_of_context_ranks_runs_the_operators_of_layers() -> None:
    with SequenceEntry(context_of_two(), ()):
        assert not is_watched()


@pytest.mark.parametrize(
    ("grid", "mode", "kernels"),
    [
        (grid, mode, kernels) if (grid, mode, kernels) == ("cp2", "full", "reference") else wide(grid, mode, kernels)
        for grid in GRIDS
        for mode in ("full", "selective")
        for kernels in ("auto", "reference")
    ],
)
def test_recomputed_blocks_train_as_one_process(
    grid: str, mode: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_mode, "_LONG", 8)  # masks are recipes, in a function mode of their own
    sizes, threads = GRIDS[grid]
    more: dict[str, Any] = {"kernels": kernels, "activation_checkpointing": {"mode": mode}}
    result = verify(llama, config_of({"data": 1, **sizes}, **more), batches_of("plain"), threads=threads)
    assert result is not None and result.holds(), str(result)
