"""Models for ``trine verify``."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """A softmax over the width between two layers, which tensor ranks cannot compute on their shares."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))  # type: ignore[no-any-return]


def rows(count: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return torch.randn(count, 8, generator=chance), torch.randn(count, 8, generator=chance)


def distance(output: Tensor, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch[1])


def classifier() -> tuple[nn.Module, Any, Any]:
    return Classifier(), rows(16), distance


def of_one_row() -> tuple[nn.Module, Any, Any]:
    return Classifier(), rows(1), distance


def without_rows() -> nn.Module:
    return Classifier()


def no_model() -> int:
    return 3


def that_raises() -> nn.Module:
    raise ValueError("no such size")


def wrong_width() -> tuple[nn.Module, Any, Any]:
    return nn.Linear(9, 8), rows(16), distance
