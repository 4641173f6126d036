"""Several ranks in one process on one device: one GPU runs the whole protocol of kernels that communicate.

Each rank has a stream, and the kernels of all ranks run at once; on a CPU the ranks take turns.
"""

import torch

from engine.parallel.comm.symmetric_memory import SharedBytes, SlotSizes, SymmetricBuffer


def virtual_ranks(sizes: SlotSizes, seconds: float, device: torch.device) -> tuple[SymmetricBuffer, ...]:
    """Allocates symmetric memory for each virtual rank on ``device``; returns the ranks' buffers."""
    parts = tuple(torch.zeros(sizes.total, dtype=torch.uint8, device=device) for _ in range(sizes.ranks))
    memories = [SharedBytes(parts=parts, index=index, close=lambda: None) for index in range(sizes.ranks)]
    return tuple(SymmetricBuffer(memory, sizes, seconds, range(sizes.ranks)) for memory in memories)
