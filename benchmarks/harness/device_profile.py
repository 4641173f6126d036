"""Profile of one training step on the device: busy share, launches, longest kernels, and host waits."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 20
"""Number of kernels in a table."""


def host_waits(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Returns the number of host synchronizations in a step by "file.py:line"; empty on a CPU."""
    if device.type != "cuda":
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = (
        f"{Path(one.filename).name}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message)
    )
    return dict(sorted(Counter(places).items()))


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Profiles one step; returns its figures, with torch's table of the longest operators as ``profile``."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    _settle(on_gpu)
    with profile(activities=kinds) as profiler:
        start = time.perf_counter()
        step()
        _settle(on_gpu)
        wall = time.perf_counter() - start
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=key, row_limit=TOP, max_name_column_width=70)
    return {"wall_ms": round(wall * 1e3, 1), **_figures(profiler.events() or (), wall), "profile": table}


def _figures(events: Iterable[Any], wall: float) -> dict[str, Any]:
    spans, calls, kernels = list[tuple[float, float]](), Counter[str](), Counter[str]()
    for event in events:
        if "CUDA" in str(event.device_type):
            spans.append((event.time_range.start, event.time_range.end))
            kernels[event.name[:90]] += event.time_range.end - event.time_range.start
        elif event.name.startswith(("cuda", "cuLaunch")):
            calls[event.name] += 1
    return {
        "busy_share": round(busy(spans) / 1e6 / wall, 3) if spans else None,
        "launches": len(spans),
        "calls": dict(calls.most_common(12)),
        "top_ms": {name: round(spent / 1e3, 2) for name, spent in kernels.most_common(TOP)},
    }


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of time spans."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _settle(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
