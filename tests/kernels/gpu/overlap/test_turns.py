"""Kernels that communicate, with ranks that take turns: equal to the plain products, bit for bit on whole numbers."""

import pytest
import torch
from torch import Tensor

from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.gpu.overlap.launches import (
    launch_gather_product,
    launch_product_scatter,
    launch_release,
    launch_sum_slots,
)
from engine.kernels.mailbox import Mailbox
from tests.kernels.gpu.overlap.turns import mailboxes

SMALL = Tile(16, 16, 16, 4, 2, 2, described=False)
B, L, K, N = 2, 21, 24, 40
MOST, CAPACITY = 16, 4096 * 4


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def gathered(
    boxes: list[Mailbox], parts: list[Tensor], matrix: Tensor, bias: Tensor | None, epoch: int
) -> list[Tensor]:
    for box, part in zip(boxes, parts, strict=True):
        launch_gather_product(part, matrix, bias, box, epoch, "push", SMALL)
    found = [
        launch_gather_product(part, matrix, bias, box, epoch, "multiply", SMALL)
        for box, part in zip(boxes, parts, strict=True)
    ]
    for box in boxes:
        launch_release(box, epoch)
    return found


def scattered(
    boxes: list[Mailbox], wholes: list[Tensor], matrix: Tensor, plus: list[Tensor] | None, epoch: int
) -> list[Tensor]:
    for box, whole in zip(boxes, wholes, strict=True):
        launch_product_scatter(whole, matrix, plus[box.rank] if plus else None, box, epoch, torch.float32, SMALL)
    found = [launch_sum_slots(B, L, N, box, epoch, torch.float32, SMALL) for box in boxes]
    for box in boxes:
        launch_release(box, epoch)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_call_equals_the_plain_products(ranks: int) -> None:
    boxes, _ = mailboxes(ranks, CAPACITY, MOST)
    matrix, bias = whole_numbers(K, N), whole_numbers(N)
    for epoch in range(1, 5):
        if epoch % 2:
            parts = [whole_numbers(B, L, K, seed=10 * epoch + rank) for rank in range(ranks)]
            wanted = torch.stack(parts, 1) @ matrix + bias
            transposed = matrix if epoch == 1 else matrix.t().contiguous().t()
            for found in gathered(boxes, parts, transposed, bias, epoch):
                assert found.equal(wanted)
        else:
            wholes = [whole_numbers(B, ranks, L, K, seed=10 * epoch + rank) for rank in range(ranks)]
            plus = [whole_numbers(B, ranks, L, N, seed=99 + rank) for rank in range(ranks)]
            sums = sum(whole @ matrix + more for whole, more in zip(wholes, plus, strict=True))
            for rank, found in enumerate(scattered(boxes, wholes, matrix, plus, epoch)):
                assert found.equal(sums[:, rank])  # type: ignore[index]
    assert not any(box.status.item() for box in boxes)
