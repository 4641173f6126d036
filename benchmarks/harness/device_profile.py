"""Profile of one training step on the device: busy share, launches, longest kernels, idle spans, and host waits."""

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 20
"""Number of kernels in a table."""
GAPS = 10
"""Number of idle spans in a table."""
LENGTHS = MappingProxyType({"< 3 us": 3.0, "< 20 us": 20.0, "< 200 us": 200.0, "longer": float("inf")})
"""Classes of idle spans by microseconds: back to back, a late launch, several late launches, a wait of the host."""


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
    return {"wall_ms": round(wall * 1e3, 1), **figures(profiler.events() or (), wall), "profile": table}


def figures(events: Iterable[Any], wall: float) -> dict[str, Any]:
    """Returns the figures of a profile of ``wall`` seconds: busy share, launches, longest kernels, idle spans."""
    calls, kernels, annotations = Counter[str](), list[Span](), list[Span]()
    known = [*events]
    annotated = {event.name for event in known if event.is_user_annotation}
    for event in known:
        if "CUDA" in str(event.device_type):
            span = Span(event.time_range.start, event.time_range.end, event.name[:90])
            (annotations if event.name in annotated else kernels).append(span)
        elif event.name.startswith(("cuda", "cuLaunch")):
            calls[event.name] += 1
    spent = defaultdict[str, float](float)
    for kernel in kernels:
        spent[kernel.name] += kernel.end - kernel.start
    longest = sorted(spent.items(), key=lambda item: -item[1])[:TOP]
    return {
        "busy_share": round(busy((one.start, one.end) for one in kernels) / 1e6 / wall, 3) if kernels else None,
        "launches": len(kernels),
        "calls": dict(calls.most_common(12)),
        "top_ms": {name: round(time_ / 1e3, 2) for name, time_ in longest},
        **idle(kernels, annotations),
    }


class Span(NamedTuple):
    """Kernel or annotation on the device, in microseconds."""

    start: float
    end: float
    name: str


def idle(kernels: Sequence[Span], annotations: Sequence[Span]) -> dict[str, Any]:
    """Returns the idle spans between kernels: milliseconds and number by length, and the longest.

    Each of the longest names the kernels before and after it and the shortest annotation around the latter.
    """
    gaps, last = list[tuple[float, float, str, Span]](), None
    for kernel in sorted(kernels):
        if last is not None and kernel.start > last.end:
            gaps.append((kernel.start - last.end, last.end, last.name, kernel))
        last = kernel if last is None or kernel.end > last.end else last
    by_length = {name: list[float]() for name in LENGTHS}
    for length, *_ in gaps:
        by_length[next(name for name, most in LENGTHS.items() if length < most)].append(length / 1e3)
    first = min((kernel.start for kernel in kernels), default=0.0)
    longest = [
        {"ms": round(length / 1e3, 3), "at_ms": round((start - first) / 1e3, 1), "after": before[:60],
         "before": kernel.name[:60], "within": _around(kernel, annotations)}
        for length, start, before, kernel in sorted(gaps, reverse=True)[:GAPS]
    ]  # fmt: skip
    counts = {name: (len(found), round(sum(found), 3)) for name, found in by_length.items()}
    return {"idle_count_ms": counts, "gaps": longest}


def _around(kernel: Span, annotations: Sequence[Span]) -> str:
    found = [one for one in annotations if one.start <= kernel.start and kernel.end <= one.end]
    return min(found, key=lambda one: one.end - one.start).name if found else ""


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
