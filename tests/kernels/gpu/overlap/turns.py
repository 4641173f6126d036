"""Ranks in one process that take turns: the memory of all of them is one tensor, and nobody runs while another does."""

import torch
from torch import Tensor

from engine.kernels.overlap import Mailbox

PATIENCE = 150


def mailboxes(ranks: int, capacity: int, most: int) -> tuple[list[Mailbox], Tensor]:
    """The view of each rank, and the memory, int32, that they share: slots, arrivals, and who has ended, by rank."""
    own = 2 * ranks * capacity // 4 + 2 * ranks * most
    memory = torch.zeros(ranks, -(-(own + ranks) // 4) * 4, dtype=torch.int32)
    slots = torch.tensor([row.data_ptr() for row in memory])
    arrivals = slots + 2 * ranks * capacity
    boxes = [
        Mailbox(
            rank=rank, slots=slots, arrivals=torch.cat([arrivals, slots[rank, None] + 4 * own]),
            status=torch.zeros(1, dtype=torch.int64), capacity=capacity, most=most, patience=PATIENCE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return boxes, memory
