"""Ranks in one process that take turns: nobody runs while another does."""

import torch

from engine.kernels.mailbox import Mailbox
from engine.parallel.comm.symmetric.shared_bytes import SlotSizes
from engine.parallel.comm.symmetric.symmetric_buffer import SymmetricBuffer, virtual_ranks

SECONDS = 0.005
"""Fifty looks at a signal."""


def mailboxes(ranks: int, capacity: int, most: int) -> tuple[list[Mailbox], tuple[SymmetricBuffer, ...]]:
    """The view of each rank, and its memory, which has to be kept: kernels know its address only."""
    sizes = SlotSizes(ranks=ranks, capacity=capacity, most=most)
    buffers = virtual_ranks(sizes, SECONDS, torch.device("cpu"))
    return [buffer.mailbox for buffer in buffers], buffers
