"""Rows that copies carry: a product that only waits for them gives what the plain product gives."""

import pytest
import torch

from benchmarks.overlap.places import virtual_ranks
from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.gpu.overlap.launches import KernelCall, launch_gather_product
from engine.parallel.comm.symmetric_memory import SlotSizes
from engine.parallel.tensor.overlap import fused_moves as module
from engine.parallel.tensor.overlap.fused_moves import copied_rows, rows_of_a_copy
from tests.kernels.interpreter import repair
from tests.selection import wide

SMALL = Tile(16, 16, 16, 4, 2, 2, described=False)
B, L, K, N = 2, 37, 16, 16


@pytest.mark.parametrize(("ranks", "calls"), [(2, 1), wide(4, 4)])
def test_a_product_that_waits_for_copies_equals_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, ranks: int, calls: int
) -> None:
    repair()
    monkeypatch.setattr(module, "COPIED_BYTES", 16 * K * 4)  # a tile of rows: three copies of a sequence
    sizes = SlotSizes(ranks=ranks, capacity=B * L * K * 4, most=6)
    buffers = virtual_ranks(sizes, 1.0, torch.device("cpu"))
    chance = torch.Generator().manual_seed(1)
    for _ in range(calls):
        parts = [torch.randint(-4, 5, (B, L, K), generator=chance).float() for _ in range(ranks)]
        matrix = torch.randint(-4, 5, (K, N), generator=chance).float()
        wanted = torch.stack(parts, 1) @ matrix
        epochs = [buffer.next_epoch() for buffer in buffers]
        for buffer, part, epoch in zip(buffers, parts, epochs, strict=True):
            with copied_rows(part, buffer, epoch, SMALL.rows):
                pass  # ranks that take turns multiply when all have sent
        for buffer, part, epoch in zip(buffers, parts, epochs, strict=True):
            call = KernelCall(buffer.mailbox, epoch, SMALL)
            assert launch_gather_product(part, matrix, None, call, "multiply").equal(wanted)
            buffer.check()


def test_a_copy_has_whole_tiles_and_bytes_enough() -> None:
    part = torch.empty(1, 4096, 8192, dtype=torch.bfloat16, device="meta")
    assert rows_of_a_copy(part, 128) == 256  # of 16 KiB each: 4 MiB
    assert rows_of_a_copy(part[..., :64], 128) == 32768, "more than there are: one copy"
