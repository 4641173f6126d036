"""Kernels that communicate, with ranks that take turns: equal to the plain products, bit for bit on whole numbers."""

import pytest
import torch
from torch import Tensor

from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.gpu.overlap.launches import (
    KernelCall,
    launch_collect_slots,
    launch_forward_slots,
    launch_gather_product,
    launch_multicast_sum,
    launch_product_scatter,
    launch_sum_slots,
)
from engine.kernels.gpu.overlap.signals import LOOKS_BETWEEN
from engine.kernels.overlap import Mailbox, Missing, read_status
from tests.kernels.gpu.overlap.turns import mailboxes
from tests.selection import wide

SMALL = Tile(16, 16, 16, 4, 2, 2, described=False)
B, L, K, N = 2, 21, 24, 40
MOST, CAPACITY = 16, 4096 * 4


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def gathered(
    boxes: list[Mailbox], parts: list[Tensor], matrix: Tensor, bias: Tensor | None, epoch: int
) -> list[Tensor]:
    for box, part in zip(boxes, parts, strict=True):
        launch_gather_product(part, matrix, bias, KernelCall(box, epoch, SMALL), "push")
    found = [
        launch_gather_product(part, matrix, bias, KernelCall(box, epoch, SMALL), "multiply")
        for box, part in zip(boxes, parts, strict=True)
    ]
    return found


def scattered(
    boxes: list[Mailbox], wholes: list[Tensor], matrix: Tensor, plus: list[Tensor] | None, epoch: int
) -> list[Tensor]:
    for box, whole in zip(boxes, wholes, strict=True):
        launch_product_scatter(
            whole, matrix, plus[box.rank] if plus else None, KernelCall(box, epoch, SMALL), torch.float32
        )
    found = [launch_sum_slots(B, L, N, KernelCall(box, epoch, SMALL), torch.float32) for box in boxes]
    return found


@pytest.mark.parametrize("ranks", [2, wide(4)])
def test_every_call_equals_the_plain_products(ranks: int) -> None:
    boxes, _memory = mailboxes(ranks, CAPACITY, MOST)
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


@pytest.mark.parametrize("ranks", [2, wide(4)])
def test_sums_are_whole_on_all_ranks(ranks: int) -> None:
    boxes, _memory = mailboxes(ranks, CAPACITY, MOST)
    matrix = whole_numbers(K, N)
    inputs = [whole_numbers(1, 2 * L, K, seed=rank) for rank in range(ranks)]
    wanted = torch.stack([x @ matrix for x in inputs]).sum(0)
    for box, x in zip(boxes, inputs, strict=True):
        launch_product_scatter(x, matrix, None, KernelCall(box, 1, SMALL), torch.float32)
    assert all(launch_sum_slots(1, 2 * L, N, KernelCall(box, 1, SMALL), torch.float32).equal(wanted) for box in boxes)
    parts = wanted[0][: ranks * (L // 2)].chunk(ranks)
    for box in boxes:
        launch_forward_slots(parts[box.rank].contiguous(), KernelCall(box, 2))
    for box in boxes:
        found = launch_collect_slots(parts[box.rank].contiguous(), KernelCall(box, 2))
        assert all(row.equal(part) for row, part in zip(found, parts, strict=True))
    assert not any(box.status.item() for box in boxes)


@pytest.mark.parametrize("ranks", [2, wide(3), wide(8)])
def test_sums_by_a_switch_are_whole_on_all_ranks(ranks: int) -> None:
    """Emulated: every rank keeps its product, the owner of rows adds that of all ranks, and all collect the sums."""
    boxes, _memory = mailboxes(ranks, CAPACITY, MOST)
    matrix = whole_numbers(K, N)
    for epoch in (1, 3):
        inputs = [whole_numbers(1, ranks, L, K, seed=epoch + rank) for rank in range(ranks)]
        wanted = torch.stack([x @ matrix for x in inputs]).sum((0, 1))
        calls = [KernelCall(box, epoch, SMALL) for box in boxes]
        for call, x in zip(calls, inputs, strict=True):
            launch_product_scatter(x, matrix, None, call, torch.float32, stays=True)
        for call in calls:
            launch_multicast_sum(L, N, call, torch.float32)
        for box in boxes:
            assert launch_collect_slots(torch.empty(L, N), KernelCall(box, epoch + 1, SMALL)).equal(wanted)
    assert not any(box.status.item() for box in boxes)


def test_a_sum_that_lacks_a_rank_is_not_sent() -> None:
    boxes, memory = mailboxes(2, CAPACITY, MOST)
    first, matrix = KernelCall(boxes[0], 1, SMALL), torch.ones(K, N)
    launch_product_scatter(torch.ones(1, 2, L, K), matrix, None, first, torch.float32, True)
    launch_multicast_sum(L, N, first, torch.float32)
    assert read_status(int(boxes[0].status)) == Missing(rank=1, tile=0, epoch=1)
    arrivals = memory[:, 2 * 2 * CAPACITY // 4 :][:, : 2 * 2 * MOST].view(2, 2, 2, MOST)  # owner, parity, writer, tile
    assert arrivals[:, 1, 0].any() and not arrivals[:, 0].any(), "parts are signalled, sums are not"


@pytest.mark.parametrize("fault", ["lost", "of another call"])
def test_what_does_not_come_is_written_down(fault: str) -> None:
    boxes, memory = mailboxes(2, CAPACITY, MOST)
    matrix = whole_numbers(K, N)
    parts = [whole_numbers(B, L, K, seed=rank) for rank in range(2)]
    for box, part in zip(boxes, parts, strict=True):
        launch_gather_product(part, matrix, None, KernelCall(box, 1, SMALL), "push")
    arrivals = memory[0, 2 * 2 * CAPACITY // 4 :][: 2 * 2 * MOST].view(2, 2, MOST)  # parity, writer, tile
    arrival = arrivals[1, 1, 3:]
    assert arrival[0] == 1
    arrival[0] = 0 if fault == "lost" else 3
    launch_gather_product(parts[0], matrix, None, KernelCall(boxes[0], 1, SMALL), "multiply")
    assert read_status(int(boxes[0].status)) == Missing(rank=1, tile=3, epoch=1)
    launch_gather_product(parts[1], matrix, None, KernelCall(boxes[1], 1, SMALL), "multiply")
    assert read_status(int(boxes[1].status)) is None


def test_after_something_that_did_not_come_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    boxes, _memory = mailboxes(2, CAPACITY, MOST)
    looks = 0
    look = InterpreterBuilder.create_atomic_rmw

    def counted(*args: object) -> object:
        nonlocal looks
        looks += 1
        return look(*args)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted)
    tiles = B * -(-L // SMALL.rows) * -(-N // SMALL.columns)
    launch_sum_slots(B, L, N, KernelCall(boxes[0], 1, SMALL), torch.float32)
    at_ended = boxes[0].patience // LOOKS_BETWEEN.value
    assert looks == 2 * tiles + boxes[0].patience + at_ended, "one look at each tile of each rank, and one wait"
    assert read_status(int(boxes[0].status)) == Missing(rank=0, tile=0, epoch=1)
