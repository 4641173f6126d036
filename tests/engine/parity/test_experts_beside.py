"""Weight gradients of one microbatch that are computed while rows of another one travel to experts and back."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.engine.parity.expert_runs import GRIDS, WORDS, Run, assert_equal, run
from tests.selection import wide


class Experts(nn.Module):
    """A stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.rand(4, 16, 16) - 0.5)

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighed sums of a product of each row with the matrices of its experts."""
        y = torch.zeros_like(x)
        for expert in range(len(self.matrix)):
            row, slot = (numbers == expert).nonzero().unbind(1)
            y = y.index_add(0, row, (x[row] @ self.matrix[expert]) * weights[row, slot, None])
        return y


class Block(nn.Module):
    """Linear layers around experts, with or without a shared one, which is computed while results travel."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)
        self.experts = Experts()
        self.shared = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the rows of the stream after the block."""
        rows = (x + self.down(self.up(x).tanh())).view(-1, 16)
        weights, numbers = self.router(rows).softmax(-1).topk(2)
        y = self.experts(rows, numbers, weights)
        if self.shared is not None:
            y = y + self.shared(rows)
        out: Tensor = (rows + y).view(x.shape)
        return out


class Words(nn.Module):
    """A model of words with experts in each block."""

    def __init__(self, shared: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


class Noted:
    """Counts of deferred weight gradients that are computed while rows travel, and of others, by rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.beside: dict[str, int] = {}
        """Gradients that are computed between the start of an exchange and its wait, by thread of a rank and label."""
        self._local = threading.local()
        self._exchange, self._next = Comm.exchange, DeferredWeightGrads._next
        patch.setattr(Comm, "exchange", lambda comm, *args: self._travels(comm, *args))
        patch.setattr(DeferredWeightGrads, "_next", lambda work: self._computed(work))

    @property
    def _travelling(self) -> list[str]:
        if not hasattr(self._local, "labels"):
            self._local.labels = []
        labels: list[str] = self._local.labels
        return labels

    def _travels(self, comm: Comm, *args: Any) -> Pending:
        pending = self._exchange(comm, *args)
        arrive, label = pending._wait, args[-1]
        self._travelling.append(label)

        def wait() -> None:
            self._travelling.remove(label)
            if arrive is not None:
                arrive()

        pending._wait = wait
        return pending

    def _computed(self, work: DeferredWeightGrads) -> Any:
        label = self._travelling[0] if self._travelling else "alone"
        self.beside[label] = self.beside.get(label, 0) + 1
        return self._next(work)


def trained(shared: bool, schedule: dict[str, Any], filled: bool) -> tuple[Run, dict[str, int]]:
    """Returns a run over two stages and two expert ranks, and the noted counts."""
    parallel = GRIDS["ep2-pp2"] | {"overlap": "chunks"} | schedule
    with pytest.MonkeyPatch.context() as patch:
        noted = Noted(patch)
        if not filled:
            patch.setattr(TensorAxis, "filling_waits", lambda *_: nullcontext())
        return run(parallel, None, lambda: Words(shared)), noted.beside


@pytest.mark.parametrize("shared", [wide(False, id="experts alone"), pytest.param(True, id="with a shared expert")])
@pytest.mark.parametrize(
    "schedule",
    [
        {"schedule": "zb-h1"},
        wide({"schedule": "zb-v", "virtual_stages": 2}),
        wide({"schedule": "dualpipe-v", "virtual_stages": 2}),
    ],
    ids=["zb-h1", "zb-v", "dualpipe-v"],
)
def test_weight_gradients_are_computed_while_rows_travel_to_the_same_bit(
    schedule: dict[str, Any], shared: bool
) -> None:
    (found, beside), (plain, alone) = (trained(shared, schedule, filled) for filled in (True, False))
    assert alone.keys() == {"alone"} and sum(beside.values()) == alone["alone"], "nothing is computed twice"
    assert beside["dispatch"] and beside["combine"], "both ways are filled"
    assert found.losses == plain.losses and found.norms == plain.norms
    torch.testing.assert_close(found.weights, plain.weights, rtol=0, atol=0)
    assert_equal(found, run({"data": 1}, None, lambda: Words(shared)))
