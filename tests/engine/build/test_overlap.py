"""What ``parallel.overlap`` asks for is what the tensor axis is told; what is not possible here is said."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.build.assemble import set_overlap
from engine.config import load_config
from engine.kernels import overlap
from engine.kernels.overlap import OverlapChoice
from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Grid
from engine.parallel.tensor.overlap.chunked_matmul import choose_pieces
from engine.parallel.tensor.tp_axis import TensorAxis

CPU = torch.device("cpu")


def told(overlap: str) -> TensorAxis:
    config: dict[str, Any] = {"train_batch_size": 2, "parallel": {"tensor": 2, "overlap": overlap}}
    comm = Comm(Grid(tp=2), RecordingBackend(Grid(tp=2)))
    axis = TensorAxis(comm)
    set_overlap(axis, comm, load_config(config, 2), CPU)
    return axis


@pytest.mark.parametrize(("overlap", "on_cpu", "on_gpu"), [("auto", 1, 4), ("off", 1, 1), ("chunks", 4, 1)])
def test_rows_travel_in_as_many_chunks_as_asked_for(overlap: str, on_cpu: int, on_gpu: int) -> None:
    axis = told(overlap)
    assert choose_pieces(8, 1 << 22, "cpu", axis) == on_cpu
    assert choose_pieces(8, 1 << 22, "cuda", axis) == on_gpu, "the device of this rank is the CPU"
    assert axis.symmetric is None


ROW = OverlapChoice(
    operation="gather_product", device="cpu", dtype="bfloat16", ranks=2, rows=1, columns=8, depth=8, way="fused",
    speedup=2.0,
)  # fmt: skip


def test_auto_wants_memory_for_kernels_only_where_one_was_measured_to_win(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for row in (replace(ROW, device="another"), replace(ROW, ranks=4), replace(ROW, way="chunks")):
        monkeypatch.setattr(overlap, "shipped_overlap", lambda row=row: (row,))
        assert told("auto").measured is None and not caplog.messages
    monkeypatch.setattr(overlap, "shipped_overlap", lambda: (ROW,))
    axis = told("auto")
    assert axis.measured is not None and axis.measured.rows == (ROW,)
    (message,) = caplog.messages
    assert message.startswith('parallel.overlap "auto": the tensor ranks share no memory'), "and says so"
    assert told("chunks").measured is None


def test_kernels_without_memory_give_way_to_collectives(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trine"):
        assert told("fused").symmetric is None
    assert caplog.messages == [
        'parallel.overlap "fused": the tensor ranks share no memory that all of them can write; collectives take their '
        "place."
    ]
