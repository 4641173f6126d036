"""A device of eight that is no GPU and behaves like one: its own memory, streams, and a host that must not wait.

``load`` registers it as ``torch.device("emulated", index)``. torch chooses the threads of backward at the first
backward of a process, so a process loads it before that, and keeps it.
"""

import ctypes
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any, Literal

import torch

from tests.emulated_device.build import library

NAME = "emulated"
COUNT = 8
Policy = Literal["at once", "late", "early", "random"]
POLICIES: tuple[Policy, ...] = ("at once", "late", "early", "random")
KINDS = (
    "item", "copy to host", "copy to device", "content", "event", "stream", "device",
)  # fmt: skip
"""Why the host waits, in the order of ``source/waits.h``."""


@cache
def load() -> ctypes.CDLL:
    """Register the device in this process."""
    found = library()
    torch.ops.load_library(found)
    made = ctypes.CDLL(str(found))
    made.emulated_waits.restype = ctypes.c_long
    made.emulated_tasks.restype = made.emulated_peak_bytes.restype = ctypes.c_uint64
    made.emulated_set_policy.argtypes = [ctypes.c_int, ctypes.c_uint64]
    made.emulated_start()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(made))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return made


def _module(made: ctypes.CDLL) -> ModuleType:
    """``torch.emulated``, with the names that torch and an engine look for in such a module."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: COUNT
    module.current_device = made.emulated_current_device
    module.set_device = lambda device: made.emulated_set_device(torch.device(device).index)
    module.Event, module.Stream = partial(torch.Event, NAME), torch.Stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    module.default_generators = _default_generators(made)
    module.get_rng_state = lambda device: module.default_generators[torch.device(device).index].get_state()
    module.set_rng_state = lambda state, device: module.default_generators[torch.device(device).index].set_state(state)
    module.manual_seed_all = lambda seed: [one.manual_seed(seed) for one in module.default_generators]
    module.manual_seed = lambda seed: module.default_generators[made.emulated_current_device()].manual_seed(seed)
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.max_memory_allocated = lambda device: made.emulated_peak_bytes(torch.device(device).index)
    module.get_device_name = lambda device=None: "emulated device"
    return module


def _default_generators(made: ctypes.CDLL) -> tuple[torch.Generator, ...]:
    made.emulated_hand_out_generators(1)
    try:
        return tuple(torch.Generator(f"{NAME}:{index}") for index in range(COUNT))
    finally:
        made.emulated_hand_out_generators(0)


@contextmanager
def policy(name: Policy, seed: int = 1) -> Iterator[None]:
    """When tasks run, inside the context; see ``source/queues.h``. What is queued runs at both ends."""
    made = load()
    made.emulated_set_policy(POLICIES.index(name), seed)
    try:
        yield
    finally:
        made.emulated_set_policy(0, 1)


@dataclass
class HostWaits:
    """The host's waits for the device."""

    kinds: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    """By the innermost function of the engine: "engine/step/update.py read: event"."""


@contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Count the waits inside the context, with their places."""
    made, found = load(), HostWaits()
    listener = ctypes.CFUNCTYPE(None, ctypes.c_int)(partial(_note, found))
    made.emulated_listen(listener)
    try:
        yield found
    finally:
        made.emulated_listen(None)


def _note(found: HostWaits, kind: int) -> None:
    found.kinds[KINDS[kind]] += 1
    found.places[f"{_place()}: {KINDS[kind]}"] += 1


def _place() -> str:
    """File and function of the innermost frame of the product on this thread."""
    for frame, _ in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        for folder in ("/kernels/", "/parallel/", "/zero/", "/engine/"):
            if folder in path and "site-packages" not in path and "/tests/" not in path:
                return f"{path[path.rindex(folder) + 1 :]} {frame.f_code.co_name}"
    return "outside"
