"""Kernels in which the rows of experts travel, with ranks that take turns, against plain torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.gpu.overlap.expert_matmul import (
    launch_collect_rows,
    launch_dispatch_product,
    launch_product_return,
)
from engine.kernels.gpu.overlap.launches import KernelCall
from engine.kernels.ops.grouped_product import grouped_product_reference
from engine.kernels.overlap import ExpertRows, Mailbox, Missing, read_status
from tests.kernels.gpu.overlap.turns import mailboxes
from tests.selection import wide

SMALL = Tile(16, 16, 16, 4, 2, 2, described=False)
K, N = 24, 40
MOST, CAPACITY = 64, 4096 * 8
Counts = Callable[[int], Tensor]


def even(ranks: int) -> Tensor:
    """Every rank sends to every expert, tiles with tails."""
    return torch.randint(1, 20, (ranks, 2 * ranks), generator=torch.Generator().manual_seed(ranks))


def sparse(ranks: int) -> Tensor:
    """Most experts get nothing from most ranks."""
    chance = torch.Generator().manual_seed(ranks)
    return torch.randint(0, 40, (ranks, 2 * ranks), generator=chance) * (
        torch.rand((ranks, 2 * ranks), generator=chance) < 0.3
    )


def one_expert(ranks: int) -> Tensor:
    """One expert gets everything."""
    counts = torch.zeros((ranks, 2 * ranks), dtype=torch.long)
    counts[:, 1] = 17
    return counts


def one_sender(ranks: int) -> Tensor:
    """All ranks but one have no tokens."""
    counts = torch.zeros((ranks, 2 * ranks), dtype=torch.long)
    counts[0] = 18
    return counts


def nothing(ranks: int) -> Tensor:
    """No rank has a token."""
    return torch.zeros((ranks, 2 * ranks), dtype=torch.long)


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def views(counts: Tensor) -> list[ExpertRows]:
    return [ExpertRows(counts=counts, rank=rank) for rank in range(len(counts))]


def exchanged(parts: list[list[Tensor]]) -> list[list[Tensor]]:
    """All-to-all of parts[source][target]."""
    return [list(column) for column in zip(*parts, strict=True)]


def there(boxes: list[Mailbox], rows: list[ExpertRows], tokens: list[Tensor], weights: Tensor, epoch: int) -> None:
    """One call, compared with an exchange and a plain product."""
    calls = [KernelCall(box, epoch, SMALL) for box in boxes]
    for call, view, own in zip(calls, rows, tokens, strict=True):
        launch_dispatch_product(own, weights, view, call, "push")
    come = exchanged([view.to_owners(own) for view, own in zip(rows, tokens, strict=True)])
    for call, view, own, parts in zip(calls, rows, tokens, come, strict=True):
        found = launch_dispatch_product(own, weights, view, call, "multiply")
        assert found.equal(grouped_product_reference(view.by_expert(parts), weights, view.sizes.cumsum(0)))


def back(boxes: list[Mailbox], rows: list[ExpertRows], inputs: list[Tensor], weights: Tensor, epoch: int) -> None:
    """One call of the way back, likewise."""
    calls = [KernelCall(box, epoch, SMALL) for box in boxes]
    for call, view, whole in zip(calls, rows, inputs, strict=True):
        launch_product_return(whole, weights, view, call)
    products = [
        view.by_rank(grouped_product_reference(whole, weights, view.sizes.cumsum(0)))
        for view, whole in zip(rows, inputs, strict=True)
    ]
    for call, view, parts in zip(calls, rows, exchanged(products), strict=True):
        assert launch_collect_rows(N, view, call, torch.float32).equal(torch.cat(parts))


@pytest.mark.parametrize(("ranks", "calls"), [(2, 2), wide(2, 4), wide(4, 2), wide(8, 2)])
@pytest.mark.parametrize("counts", [even, sparse, one_expert, one_sender, nothing], ids=lambda made: made.__name__)
def test_every_call_equals_exchange_and_plain_products(counts: Counts, ranks: int, calls: int) -> None:
    boxes, memory = mailboxes(ranks, CAPACITY, MOST)
    rows = views(counts(ranks))
    weights = whole_numbers(2, K, N)
    for epoch in range(1, calls + 1):
        laid = weights if epoch < 3 else weights.transpose(1, 2).contiguous().transpose(1, 2)
        if epoch % 2:
            there(boxes, rows, [whole_numbers(view.own, K, seed=10 * epoch + view.rank) for view in rows], laid, epoch)
        else:
            back(boxes, rows, [whole_numbers(view.here, K, seed=10 * epoch + view.rank) for view in rows], laid, epoch)
    assert memory.any() and not any(box.status.item() for box in boxes)


@pytest.mark.parametrize("dtype", [wide(torch.float16), torch.bfloat16], ids=str)
def test_narrow_products_are_those_of_the_plain_kernel(dtype: torch.dtype) -> None:
    from engine.kernels.gpu.grouped_matmul import launch_grouped_product

    boxes, _ = mailboxes(2, CAPACITY, MOST)
    rows = views(even(2))
    tokens = [torch.randn(view.own, K, generator=torch.Generator().manual_seed(view.rank)).to(dtype) for view in rows]
    weights = torch.randn(2, K, N, generator=torch.Generator().manual_seed(9)).to(dtype)
    for box, view, own in zip(boxes, rows, tokens, strict=True):
        launch_dispatch_product(own, weights, view, KernelCall(box, 1, SMALL), "push")
    come = exchanged([view.to_owners(own) for view, own in zip(rows, tokens, strict=True)])
    for box, view, own, parts in zip(boxes, rows, tokens, come, strict=True):
        found = launch_dispatch_product(own, weights, view, KernelCall(box, 1, SMALL), "multiply")
        ends = view.sizes.cumsum(0).int()
        assert found.equal(launch_grouped_product(view.by_expert(parts), weights, ends, SMALL))


def test_a_rank_without_rows_for_another_is_waited_for_all_the_same() -> None:
    boxes, memory = mailboxes(2, CAPACITY, MOST)
    rows, weights = views(nothing(2)), whole_numbers(2, K, N)
    for box, view in zip(boxes, rows, strict=True):
        launch_dispatch_product(torch.empty(0, K), weights, view, KernelCall(box, 1, SMALL), "push")
    arrivals = memory[:, 2 * 2 * CAPACITY // 4 :]
    assert [int(arrivals[owner, (2 + 1 - owner) * MOST]) for owner in range(2)] == [1, 1]
    arrivals[0, (2 + 1) * MOST] = 0
    launch_dispatch_product(torch.empty(0, K), weights, rows[0], KernelCall(boxes[0], 1, SMALL), "multiply")
    assert read_status(int(boxes[0].status)) == Missing(rank=1, tile=0, epoch=1)


@pytest.mark.parametrize(
    "counts", [torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4), -torch.ones(2, 4).long(), torch.ones(4).long()]
)
def test_counts_that_are_none_are_refused(counts: Tensor) -> None:
    with pytest.raises(EngineError, match="experts must be a multiple of ranks"):
        ExpertRows(counts=counts, rank=0)
