"""Stages that begin inside a block, whose own forward nobody calls: the masks of one process, wherever that is cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.verify import verify
from tests import models
from tests.engine.parity.launches import settings
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


class Half(nn.Module):
    """Drops inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.down(F.gelu(self.up(x))))
        return out


class ShardHolder(nn.Module):
    """Has no forward of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), Half(width), Half(width)


class Around(nn.Module):
    """Calls the parts of its blocks itself, and drops between them too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(models.VOCABULARY, width), nn.Linear(width, models.VOCABULARY)
        self.blocks = nn.ModuleList(ShardHolder(width) for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + F.dropout(block.one(block.norm(x)), 0.2, self.training)  # type: ignore[operator]
            x = x + F.dropout(block.two(block.norm(x)), 0.2, self.training)  # type: ignore[operator]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(config: dict[str, Any]) -> Any:
    """Body of a rank."""
    return verify(Around, config, [(t[:, :-1], t[:, 1:]) for t in models.token_batches(8, 3)])


@pytest.mark.parametrize(
    ("pp", "changes"),
    [
        wide(2, {}),
        (2, {"split": ["blocks.1.two"]}),
        wide(4, {"split": ["blocks.0.one", "blocks.2.norm:1", "head"]}),
    ],
    ids=str,
)
def test_dropout_does_not_depend_on_a_cut_inside_blocks(run_ranks: RunRanks, pp: int, changes: dict[str, Any]) -> None:
    result = run_ranks(train, pp, settings(pp, parallel=changes))[0]
    assert result.holds(), str(result)
    assert min(result.reference.norms) > 0.05, "clipping must be active"
