"""Device of a rank: the only module with differences between GPUs, other accelerators and the CPU.

    host           the CPU: an operator has run when the call returns, and the host reads any tensor
    accelerator    any other type: operators are queued, and the host waits for them when it reads a tensor

Torch reports most properties of a type by name; :data:`ACCELERATORS` contains the others. AMD's GPUs are "cuda" in
torch.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Properties of a device type, such as "cuda", that torch does not report."""

    collectives: str
    """Backend of ``torch.distributed`` for tensors of the type."""
    hidden_by: str
    """Environment variable that hides devices from a process."""
    compiles_triton: bool
    """True if Triton compiles the kernels of ``kernels/gpu`` for the type."""
    multiplies_wide: bool
    """True if torch multiplies 16-bit matrices into an fp32 matrix on the type."""
    link: tuple[float, float]
    """Rough (latency in seconds, bytes per second) between devices of one node.

    The precision suffices for plans, because a transfer is short compared with a stage.
    """


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "cuda": Accelerator(
            collectives="nccl",
            hidden_by="CUDA_VISIBLE_DEVICES",
            compiles_triton=True,
            multiplies_wide=True,
            link=(20e-6, 100e9),
        ),
        "xpu": Accelerator(
            collectives="xccl",
            hidden_by="ZE_AFFINITY_MASK",
            compiles_triton=False,
            multiplies_wide=False,
            link=(20e-6, 100e9),
        ),
    }
)
"""Properties by device type, in the order in which a rank searches for devices."""


def find_accelerator() -> str | None:
    """Returns the type of the accelerators visible to this process, such as "cuda"; None without accelerators."""
    return next((name for name in ACCELERATORS if _module(name).is_available()), None)


def count_devices(kind: str) -> int:
    """Returns the number of devices of type ``kind``, such as "cuda", that are visible to this process."""
    count: int = _module(kind).device_count()
    return count


def is_host(device: torch.device) -> bool:
    """Returns True if ``device`` is the CPU."""
    return device.type == "cpu"


def compiles_triton(device: torch.device) -> bool:
    """Returns True if Triton compiles this package's kernels for the type of ``device``; False for the CPU."""
    row = ACCELERATORS.get(device.type)
    return row is not None and row.compiles_triton


def multiplies_wide(device: torch.device) -> bool:
    """Returns True if torch can multiply two bf16 or fp16 matrices into an fp32 result on ``device``."""
    row = ACCELERATORS.get(device.type)
    return row is not None and row.multiplies_wide


def collectives_for(device: torch.device) -> str:
    """Returns the torch.distributed backend for tensors on ``device``, such as "nccl"; "gloo" for unknown types."""
    row = ACCELERATORS.get(device.type)
    return "gloo" if row is None else row.collectives


def expected_link(kind: str) -> tuple[float, float]:
    """Returns a rough estimate of (latency in seconds, bytes per second) between two ranks on one node.

    ``kind``: type of the ranks' devices, such as "cuda".
    """
    row = ACCELERATORS.get(kind)
    return _GLOO_LINK if row is None else row.link


_GLOO_LINK = (200e-6, 1e9)
"""Rough latency and bandwidth of gloo between processes of one host."""


def use_device(device: torch.device) -> None:
    """Makes ``device`` the current device of this thread; does nothing for the CPU."""
    if _is_accelerator(device):
        _module(device.type).set_device(device)


def indexed(device: torch.device) -> torch.device:
    """Returns ``device`` with an index: its own, or the index of this thread's current device.

    The CPU is returned unchanged.
    """
    if not _is_accelerator(device):
        return device
    index = _module(device.type).current_device() if device.index is None else device.index
    return torch.device(device.type, index)


def finish(device: torch.device) -> None:
    """Waits until ``device`` has finished all queued work."""
    if _is_accelerator(device):
        _module(device.type).synchronize(device)


def record_event(device: torch.device) -> torch.Event | None:
    """Records an event in the current stream of ``device``, and returns it; returns None on the CPU.

    ``device`` must be the current device of this thread.
    """
    if not _is_accelerator(device):
        return None
    event: torch.Event = _module(device.type).Event()
    event.record()
    return event


def device_generator(device: torch.device) -> torch.Generator | None:
    """Returns torch's default random generator of ``device``; None on the CPU."""
    if not _is_accelerator(device):
        return None
    module = _module(device.type)
    current = module.current_device()  # initialises CUDA, which creates the generators
    generator: torch.Generator = module.default_generators[current if device.index is None else device.index]
    return generator


def host_words(count: int, device: torch.device) -> torch.Tensor:
    """Returns ``count`` int32 zeros in host memory.

    The memory is page-locked if ``device`` is an accelerator, so that kernels on ``device`` can read the numbers.
    """
    return torch.zeros(count, dtype=torch.int32, pin_memory=_is_accelerator(device))


def host_memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized tensor in host memory with the shape and dtype of ``tensor``.

    The memory is page-locked if ``tensor`` is on an accelerator.
    """
    if not _is_accelerator(tensor.device):
        return torch.empty_like(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def host_zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns ``count`` zeros of ``dtype`` in host memory, page-locked if ``device`` is an accelerator."""
    return torch.zeros(count, dtype=dtype, pin_memory=_is_accelerator(device))


def host_bytes(count: int, pinned: bool) -> torch.Tensor:
    """Returns an uninitialized uint8 tensor of ``count`` elements in host memory, page-locked if ``pinned`` is True."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=pinned)


def peak_allocated(device: torch.device) -> int | None:
    """Returns the peak number of bytes that torch has allocated on ``device``; None on the CPU."""
    return _module(device.type).max_memory_allocated(device) if _is_accelerator(device) else None


def total_memory(device: torch.device) -> int | None:
    """Returns the size of the memory of ``device`` in bytes; None on the CPU."""
    if not _is_accelerator(device):
        return None
    memory: int = _module(device.type).get_device_properties(device).total_memory
    return memory


def attends_in_blocks(device: torch.device) -> bool:
    """Returns True if torch has flash attention kernels for ``device`` that return log-sum-exps."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def device_name(device: torch.device) -> str:
    """Returns the vendor's name of ``device``, such as "NVIDIA H100 80GB HBM3"; "cpu" on the CPU."""
    return str(_module(device.type).get_device_name(device)) if _is_accelerator(device) else device.type


def triton_target(capability: tuple[int, int]) -> Any:
    """Returns Triton's compilation target for an NVIDIA GPU of compute capability (major, minor)."""
    from triton.backends.compiler import GPUTarget

    major, minor = capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def hand_over(device: torch.device, event: torch.Event | None, tensors: Iterable[torch.Tensor | None]) -> None:
    """Makes the current stream of ``device`` wait for ``event``.

    ``tensors``: tensors of another stream that the current stream will use. Their memory is not reused before
    the current stream has finished with them. With an ``event`` of None the function has no effect.
    """
    if event is None:
        return
    event.wait()
    current = torch.accelerator.current_stream(device)
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(current)


class PostedCopy:
    """Tensor copy that another thread may read on any stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().clone()
        self._event = record_event(tensor.device)

    def read_on(self, device: torch.device) -> torch.Tensor:
        """Returns the copy as a tensor on ``device``, ready for the current stream of ``device``."""
        if self._copy.device == device:
            hand_over(device, self._event, (self._copy,))
        return self._copy.to(device)


class PinnedCopies:
    """Asynchronous copies of host tensors to a device, through page-locked memory.

    The object prevents the reuse of this memory until the device has read it.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[torch.Event, torch.Tensor]] = deque()

    def bring(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of ``tensor`` on ``device``; the host does not wait.

        ``device`` must be the current device of this thread.
        """
        pageable = _is_accelerator(device) and is_host(tensor.device) and tensor.numel() and not tensor.is_pinned()
        if not pageable:
            return tensor.to(device, non_blocking=True)
        while self._unread and self._unread[0][0].query():
            self._unread.popleft()
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        moved = pinned.to(device, non_blocking=True)
        if (event := record_event(device)) is not None:
            self._unread.append((event, pinned))
        return moved


class SideStream:
    """Second stream of ``device``; on the CPU, work runs immediately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if _is_accelerator(device) else None

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Makes this stream wait for the current stream, then queues the work inside the context on this stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    @contextmanager
    def after(self, events: Iterable[torch.Event | None]) -> Iterator[None]:
        """Queues the work inside the context on this stream, after ``events``."""
        if self._stream is None:
            yield
            return
        with self._stream:
            for event in events:
                if event is not None:
                    event.wait()
            yield

    def uses(self, tensor: torch.Tensor) -> None:
        """Prevents reuse of the memory of ``tensor`` until the work now queued on this stream has ended.

        Call it for a tensor of another stream that work on this stream reads or writes.
        """
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Makes the current stream wait for all work queued on this stream."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def _is_accelerator(device: torch.device) -> bool:
    """Returns True if ``device`` queues work: the CPU does not, and the meta device computes nothing."""
    return device.type not in ("cpu", "meta")


def _module(kind: str) -> Any:
    """Returns ``torch.cuda``, or the equivalent module of another type."""
    return torch.get_device_module(kind)
