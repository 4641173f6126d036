"""After a load every data rank has read its own share, and gathers what it holds in full."""

import pytest
import torch
from torch import nn

from engine.checkpoint.load import share_weights
from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Grid
from tests.engine.checkpoint.fake_ranks import fake_run


@pytest.mark.parametrize(
    ("stage", "bf16", "gathered"),
    [(0, True, "float32"), (1, True, "bfloat16"), (0, False, "float32"), (1, False, "float32"), (3, True, None)],
    ids=["masters", "parameters beside masters", "parameters", "parameters at ZeRO 1", "nothing"],
)
def test_what_data_ranks_hold_in_full_is_gathered(stage: int, bf16: bool, gathered: str | None) -> None:
    settings = {
        "train_batch_size": 2,
        "parallel": {"data": 2},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    buckets = fake_run(lambda: nn.Linear(9, 9), settings, torch.ones(2, 9)).ranks[1].local_tensors.buckets
    grid = Grid(dp=2, rank=1)
    comm = Comm(grid, RecordingBackend(grid))
    share_weights(buckets, comm)
    found = [(record.op, record.axis, record.elements, record.dtype) for record in comm.records]
    assert found == [("all_gather", "dp", flat.bucket.elements, gathered) for flat in buckets if gathered]
