"""``deepspeed.utils.logging``: the engine's logger under DeepSpeed's names."""

import logging

import torch

logger = logging.getLogger("trine")


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Logs ``message`` at ``level`` on the ranks in ``ranks``; None: on rank 0; [-1]: on all ranks."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank in (ranks or [0]) or -1 in (ranks or ()):
        logger.log(level, message)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Logs ``message`` on rank 0 if ``force`` is True; otherwise does nothing. ``debug`` has no effect."""
    if force:
        log_dist(message)
