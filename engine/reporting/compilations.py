"""What Triton compiles in the first step, where it does: the part of it that a later start finds in the cache."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.kernels.device import compiles_triton

logger = logging.getLogger("trine")


@contextmanager
def say_what_compiles(device: torch.device, rank: int) -> Iterator[None]:
    """Say at the end which kernels Triton has compiled inside, and how long that took; on rank 0, nothing if none."""
    knobs = _compilation_knobs() if rank == 0 and compiles_triton(device) else None
    if knobs is None:
        yield
        return
    kernels, found, microseconds, before = Counter[str](), 0, 0, knobs.listener

    def listen(**call: Any) -> None:
        nonlocal found, microseconds
        if before is not None:
            before(**call)
        if call["cache_hit"]:
            found += 1
        else:
            kernels[str(call["metadata"]["name"])] += 1
            microseconds += call["times"].total

    knobs.listener = listen
    try:
        yield
    finally:
        knobs.listener = before
        if kernels:
            names = ", ".join(f"{name} {count}x" for name, count in sorted(kernels.items()))
            told = (
                "Triton compiled %d kernels in %.1f s, which the next start finds in its cache, and found %d there: %s"
            )
            logger.info(told, kernels.total(), microseconds / 1e6, found, names)


def _compilation_knobs() -> Any:
    """Return Triton's settings of compilation; None without Triton."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.compilation
