"""Models that write into their batch, as FSMT does: microbatches and stages do not see each other's writes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.verify import Parity, verify
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


class Writer(nn.Module):
    """Shifts its ids in place, before the embedding keeps them for its backward, and masks its labels in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(models.VOCABULARY + 1, 32), nn.Linear(32, models.VOCABULARY)
        self.layers = nn.ModuleList(models.NanoBlock(32, 4) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        ids.add_(1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        labels.masked_fill_(labels % 7 == 0, -100)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def trained(parallel: dict[str, Any]) -> Parity | None:
    """Body of a rank."""
    batches = [{"ids": t[:, :-1].clone(), "labels": t[:, 1:].clone()} for t in models.token_batches(16)]
    return verify(Writer, config_for(1, 0, parallel={"data": 1} | parallel), batches)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2},
        wide({"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}),
        wide({"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2}),
    ],
    ids=str,
)
def test_every_forward_has_its_own_copy(run_ranks: RunRanks, parallel: dict[str, Any]) -> None:
    result = run_ranks(trained, 2, parallel)[0]
    assert result.holds(), str(result)
