"""Runs test cases in one process and prints the result of each at once; one that raises does not stop the rest."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.first_contact.processes import MARK
from benchmarks.harness.worker import last_line

Finding = dict[str, Any]
BROKEN = 3
"""Exit code after an error that breaks the device for this process."""


def device_kind() -> str:
    """Returns the device type of this run: "cuda" or "cpu"."""
    return os.environ.get("FIRST_CONTACT_DEVICE", "cpu")


def on_gpu() -> bool:
    """Returns True if this run uses a GPU."""
    return device_kind() == "cuda"


def settle() -> None:
    """Waits until the GPU, if there is one, has finished all work."""
    if on_gpu():
        torch.cuda.synchronize()


def tell(name: str, ok: bool | None, began: float, **more: Any) -> None:
    """Prints a finding on a line for the parent process."""
    row = {"name": name, "ok": ok, "seconds": time.monotonic() - began, **more}
    print(f"\n{MARK}{json.dumps(row)}", flush=True)


def each(names: Sequence[str], body: Callable[[str], Finding]) -> None:
    """Runs ``body`` for each case and prints its result; ``ok`` defaults to True."""
    for name in names:
        began = time.monotonic()
        try:
            found = body(name)
            settle()
            tell(name, found.pop("ok", True), began, **found)
        except Exception as error:
            traceback.print_exc()
            tell(name, False, began, error=last_line(error))
            if "CUDA error" in str(error) or "illegal memory" in str(error):
                sys.stdout.flush()
                os._exit(BROKEN)


def event_ms(work: Callable[[], object], count: int) -> float:
    """Returns the median milliseconds of ``work`` on the device over ``count`` runs; one run on a CPU."""
    if not on_gpu():
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    for _ in range(2):
        work()
    pairs = []
    for _ in range(count):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        work()
        last.record()
        pairs.append((first, last))
    torch.cuda.synchronize()
    return float(sorted(first.elapsed_time(last) for first, last in pairs)[count // 2])
