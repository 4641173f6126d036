"""Profile of one rank: the Python functions that take its time.

    python -m benchmarks step --profile "Trine tp4"        in place of the table

Python's profiler covers the main thread only and slows calls down, so the CPU seconds above its table come from earlier
steps without it; they include gloo's threads.
"""

import cProfile
import io
import pstats
import time
from collections.abc import Sequence

from torch import Tensor

from benchmarks.peers.workload import Trainer

TOP = 30


def profile_steps(trainer: Trainer, batches: Sequence[Tensor]) -> str:
    """Times one half of ``batches`` and profiles the other: returns CPU seconds and the functions with most own
    time.
    """
    half = len(batches) // 2
    cpu, main = time.process_time(), time.thread_time()
    for rows in batches[:half]:
        trainer.step(rows)
    cpu, main = time.process_time() - cpu, time.thread_time() - main
    with cProfile.Profile() as profiler:
        for rows in batches[half:]:
            trainer.step(rows)
    title = f"CPU s per step of rank 0: {cpu / half:.4f}, of it in the main thread: {main / half:.4f}"
    return f"{title}\nprofile of {len(batches) - half} further steps, main thread, wall time:\n{_top(profiler)}"


def _top(profiler: cProfile.Profile) -> str:
    stream = io.StringIO()
    pstats.Stats(profiler, stream=stream).strip_dirs().sort_stats("tottime").print_stats(TOP)
    return stream.getvalue().strip()
