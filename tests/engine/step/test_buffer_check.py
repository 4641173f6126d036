"""Buffers that each data rank writes from its own rows: said once, with the name of the first."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

RunRanks = Callable[..., list[Any]]
CONFIG = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
LABEL = "buffer check"


class Counted(nn.Module):
    """Writes a buffer, the same on all ranks."""

    calls: Tensor
    unsaved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.unsaved += x.detach().sum()
        return x


def network(kind: str) -> nn.Module:
    torch.manual_seed(3)
    between: dict[str, nn.Module] = {"statistics": nn.BatchNorm1d(4), "counter": Counted(), "none": nn.LayerNorm(4)}
    return nn.Sequential(nn.Linear(4, 4), between[kind], nn.Linear(4, 1))


class Heard(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(kind: str, grid: dict[str, int]) -> tuple[list[str], list[int]]:
    """Body of a rank: its warnings about buffers, and the calls of the check in each step."""
    heard, calls = Heard(), []
    logging.getLogger("trine").addHandler(heard)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, 4, generator=generator)
    with engine.initialize(network(kind), CONFIG | {"parallel": grid}, lambda y, _: y.square().mean()) as eng:
        rows = 8 // eng.grid.dp
        for batch in x:
            before = eng.sent.copy()
            eng.train_batch(batch[eng.grid.coord().dp * rows :][:rows])
            calls.append(sum(row.calls for row in eng.sent.since(before).rows() if row.label == LABEL))
    logging.getLogger("trine").removeHandler(heard)
    return [line for line in heard.lines if "buffer" in line], calls


@pytest.mark.parametrize(("kind", "checks"), [("statistics", 1), ("counter", 1), ("none", 0)])
def test_data_ranks(run_ranks: RunRanks, kind: str, checks: int) -> None:
    (first, calls), (second, _) = run_ranks(trained, 2, kind, {"data": 2})
    assert calls == [0, checks, 0, 0] and not second
    if kind == "statistics":
        (line,) = first
        assert line.startswith("buffer '1.running_mean' differs between data ranks") and "GroupNorm" in line
    else:
        assert not first


def test_pipeline_ranks_are_not_compared(run_ranks: RunRanks) -> None:
    assert run_ranks(trained, 2, "statistics", {"pipeline": 2}) == [([], [0] * 4)] * 2
