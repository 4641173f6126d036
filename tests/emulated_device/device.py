"""A device of eight that is no GPU and behaves like one: its own memory, streams, and a host that must not wait.

``load`` registers it as ``torch.device("emulated", index)``. torch chooses the threads of backward at the first
backward of a process, so a process loads it before that, and keeps it.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.emulated_device.build import library
from tests.structure import ROOT

NAME = "emulated"
COUNT = 8
Policy = Literal["at once", "late", "early", "random"]
POLICIES: tuple[Policy, ...] = ("at once", "late", "early", "random")
KINDS = (
    "item", "copy to host", "copy to device", "content", "event", "stream", "device", "staged copy", "number",
)  # fmt: skip
"""Why the host waits, in the order of ``source/waits.h``; for the staged copy a driver may wait, and may not.

"number": ``tensor[..] = 1.0``, which torch fills on this device and copies from the host on CUDA.
"""


@cache
def load() -> ctypes.CDLL:
    """Register the device in this process."""
    found = library()
    torch.ops.load_library(found)  # type: ignore[no-untyped-call]
    made = ctypes.CDLL(str(found))
    made.emulated_waits.restype = ctypes.c_long
    made.emulated_tasks.restype = made.emulated_peak_bytes.restype = ctypes.c_uint64
    made.emulated_set_policy.argtypes = [ctypes.c_int, ctypes.c_uint64]
    made.emulated_start()
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(made))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    return made


def _module(made: ctypes.CDLL) -> Any:
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
    """The host's waits for one device, or for all."""

    device: int | None
    kinds: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    """By the innermost function of the engine: "engine/step/update.py read: event"."""


@contextmanager
def host_waits(device: int | None = None) -> Iterator[HostWaits]:
    """Count the waits inside the context, with their places: those of threads whose device is ``device``."""
    found = HostWaits(device)
    _listeners().append(found)
    try:
        yield found
    finally:
        _listeners().remove(found)


_SET_ITEM = Tensor.__setitem__


def _set_item(into: Tensor, index: Any, value: Any) -> None:
    if into.device.type == NAME and not isinstance(value, Tensor):
        vars(load())["note"](KINDS.index("number"))
    _SET_ITEM(into, index, value)


@cache
def _listeners() -> list[HostWaits]:
    """Those who count, in several threads; told by one function, which lives as long as the device."""
    made, listening = load(), list[HostWaits]()

    def note(kind: int) -> None:
        place, device = _place(sys._getframe()), made.emulated_current_device()
        for found in listening:
            if found.device in (None, device):
                found.kinds[KINDS[kind]] += 1
                found.places[f"{place}: {KINDS[kind]}"] += 1

    told = ctypes.CFUNCTYPE(None, ctypes.c_int)(note)
    vars(made).update(told=told, note=note)  # ctypes frees a function that nobody holds
    made.emulated_listen(told)
    Tensor.__setitem__ = _set_item  # type: ignore[assignment,method-assign]
    return listening


def _place(frame: FrameType | None) -> str:
    """File and function of the innermost frame of the product."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/") and not path.startswith(f"{ROOT}/tests/"):
            return f"{Path(path).resolve().relative_to(ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
