"""A path that follows a counter which each rank counts for itself is refused on all ranks of a pipeline."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.verify import verify
from tests import models
from tests.engine.parity.launches import settings

RunRanks = Callable[..., list[Any]]


class Counted(nn.Module):
    """Leaves out one of two blocks by a counter, which the stage that reaches the end counts alone."""

    def __init__(self, left_out: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(models.VOCABULARY, width), nn.Linear(width, models.VOCABULARY)
        self.blocks = nn.ModuleList(models.NanoBlock(width, 2) for _ in range(4))
        self.left_out, self.calls = left_out, 0

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if i != self.left_out + self.calls % 2:
                x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        self.calls += 1
        return loss


def counted(left_out: int, loop: bool, tensor: int) -> tuple[float, list[str]]:
    """The first loss, and what the next two steps say."""
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(2, 2)]
    config = settings(2, train_batch_size=2, parallel={"tensor": tensor}, communication={"timeout_seconds": 20})
    with engine.initialize(Counted(left_out), config, example_batch=tuple(t[:2] for t in batches[0])) as eng:
        if loop:
            eng.open_pipeline()

        def step(batch: Any) -> float:
            if not loop:
                return eng.train_batch(batch).loss
            loss = eng(*batch)
            eng.backward(loss)
            eng.step()
            return float(loss.detach())

        first, said = step(batches[0]), []
        for _ in range(2):
            with pytest.raises(engine.EngineError) as caught:
                step(batches[1])
            said.append(str(caught.value))
        return first, said


@pytest.mark.parametrize(
    ("left_out", "loop", "tensor"),
    [(0, False, 1), (2, True, 1), pytest.param(0, False, 2, marks=pytest.mark.long)],
    ids=["block-train_batch", "start-loop", "tp2-pp2"],
)
def test_ranks_that_count_for_themselves_refuse_the_step_alike(
    run_ranks: RunRanks, left_out: int, loop: bool, tensor: int
) -> None:
    told = run_ranks(counted, 2 * tensor, left_out, loop, tensor)
    assert all(sentences == told[0][1] for _, sentences in told) and told[0][0] > 0
    for sentence in told[0][1]:
        assert sentence.startswith("the forward takes different paths through the modules on rank 0 and on rank ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "stage"), [({"data": 2}, 1), ({"data": 2}, 3), ({"tensor": 2}, 0)], ids=["dp2", "dp2-zero3", "tp2"]
)
def test_ranks_that_all_count_alike_train_as_one_process(parallel: dict[str, int], stage: int) -> None:
    config = settings(1, parallel=parallel, zero_optimization={"stage": stage})
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(config["train_batch_size"], 3)]
    result = verify(lambda: Counted(0), config, batches, threads=2)
    assert result is not None and result.holds(), str(result)
