"""``deepspeed.runtime.utils``: random seeds, and a log line about memory."""

import logging
import os
import random

import numpy as np
import torch

from engine.deepspeed.utils.logging import log_dist
from engine.parallel.comm.world import read_world
from engine.reporting.step_report import peak_memory

_GIB = 2**30


def set_random_seed(seed: int) -> None:
    """Seeds the random generators of Python's ``random``, numpy and torch with ``seed``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs ``message``, the device's peak memory and the host's used memory (GiB) on rank 0, if ``force`` is True."""
    if not force:
        return
    peak = peak_memory(read_world().device) / _GIB
    pages = os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES")
    host = pages * os.sysconf("SC_PAGE_SIZE") / _GIB
    log_dist(f"{message}: at most {peak:.2f} GiB on the device; {host:.2f} GiB on the host", level=logging.INFO)
