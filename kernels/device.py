"""The device that a rank computes on: the single place for differences between GPUs, other accelerators and the CPU.

    host           the CPU: an operator has run when its call returns, and the host reads any tensor
    accelerator    any other type: operators are queued, and the host waits for them when it reads a tensor

All that torch knows of a type it is asked by the type's name; what it does not know is a row of :data:`ACCELERATORS`.
AMD's GPUs are "cuda" in torch.
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
    """Properties of a type of device that torch does not report."""

    collectives: str
    """The backend of ``torch.distributed`` that carries its tensors."""
    hidden_by: str
    """The variable that makes devices invisible to a process."""
    compiles_triton: bool
    """True if the kernels of ``kernels/gpu`` are compiled for it."""
    multiplies_wide: bool
    """True if torch multiplies 16-bit matrices into an fp32 one on it."""
    link: tuple[float, float]
    """(seconds of latency, bytes per second) between devices of one node, roughly; enough for a plan, in which a
    transfer is short compared with a stage."""


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
"""By type, in the order in which a rank looks for one."""


def find_accelerator() -> str | None:
    """The type of the accelerators that this process sees; None if there is none."""
    return next((name for name in ACCELERATORS if _module(name).is_available()), None)


def count_devices(kind: str) -> int:
    """Returns the number of devices of a type that this process sees."""
    count: int = _module(kind).device_count()
    return count


def is_host(device: torch.device) -> bool:
    """Returns True if ``device`` is the CPU: the host reads its tensors without waiting."""
    return device.type == "cpu"


def compiles_triton(device: torch.device) -> bool:
    """Returns True if Triton kernels are compiled for ``device``."""
    row = ACCELERATORS.get(device.type)
    return row is not None and row.compiles_triton


def multiplies_wide(device: torch.device) -> bool:
    """Returns True if torch multiplies 16-bit matrices into an fp32 one on ``device``."""
    row = ACCELERATORS.get(device.type)
    return row is not None and row.multiplies_wide


def collectives_for(device: torch.device) -> str:
    """The backend of ``torch.distributed`` for tensors on ``device``; gloo where no other is known."""
    row = ACCELERATORS.get(device.type)
    return "gloo" if row is None else row.collectives


def expected_link(kind: str) -> tuple[float, float]:
    """(seconds of latency, bytes per second) between two ranks of a node with this type of device, roughly."""
    row = ACCELERATORS.get(kind)
    return _GLOO_LINK if row is None else row.link


_GLOO_LINK = (200e-6, 1e9)
"""Between processes of one host."""


def use_device(device: torch.device) -> None:
    """Makes ``device`` the current one of this thread: each thread has its own, and the CPU is always there."""
    if _is_accelerator(device):
        _module(device.type).set_device(device)


def indexed(device: torch.device) -> torch.device:
    """Gives ``device`` the index of the current one of this thread where it has none; the CPU stays as it is."""
    if not _is_accelerator(device):
        return device
    index = _module(device.type).current_device() if device.index is None else device.index
    return torch.device(device.type, index)


def finish(device: torch.device) -> None:
    """Waits until ``device`` has done all that it was given."""
    if _is_accelerator(device):
        _module(device.type).synchronize(device)


def record_event(device: torch.device) -> torch.Event | None:
    """An event after what the current stream has been given, for ``synchronize``; None on the host, which has done it.

    The current device of this thread must be ``device``.
    """
    if not _is_accelerator(device):
        return None
    event: torch.Event = _module(device.type).Event()
    event.record()
    return event


def device_generator(device: torch.device) -> torch.Generator | None:
    """The random generator that operators on ``device`` draw from; None on the host, which has the default one."""
    if not _is_accelerator(device):
        return None
    module = _module(device.type)
    current = module.current_device()  # initialises CUDA, which creates the generators
    generator: torch.Generator = module.default_generators[current if device.index is None else device.index]
    return generator


def host_words(count: int, device: torch.device) -> torch.Tensor:
    """Zeros, int32, in memory of the host that kernels on ``device`` read in place."""
    return torch.zeros(count, dtype=torch.int32, pin_memory=_is_accelerator(device))


def host_memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host, its content undefined, as large as ``tensor`` and reached by copies that nobody waits for."""
    if not _is_accelerator(tensor.device):
        return torch.empty_like(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def host_zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory, page-locked if ``device`` is an accelerator, which then copies while the host goes on."""
    return torch.zeros(count, dtype=dtype, pin_memory=_is_accelerator(device))


def host_bytes(count: int, pinned: bool) -> torch.Tensor:
    """``count`` bytes of host memory, their content undefined; page-locked if ``pinned``."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=pinned)


def peak_allocated(device: torch.device) -> int | None:
    """The most bytes that were allocated at once on ``device``; None on the host, which does not count them."""
    return _module(device.type).max_memory_allocated(device) if _is_accelerator(device) else None


def device_name(device: torch.device) -> str:
    """The name that the vendor gives the device, such as "NVIDIA H100 80GB HBM3", or its type on the host."""
    return str(_module(device.type).get_device_name(device)) if _is_accelerator(device) else device.type


def triton_target(capability: tuple[int, int]) -> Any:
    """An NVIDIA GPU of a compute capability, as Triton names its targets."""
    from triton.backends.compiler import GPUTarget

    major, minor = capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def hand_over(device: torch.device, event: torch.Event | None, tensors: Iterable[torch.Tensor | None]) -> None:
    """Lets the current stream of ``device`` continue after ``event`` of another one, and read ``tensors`` there."""
    if event is None:
        return
    event.wait()
    current = torch.accelerator.current_stream(device)
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(current)


class PostedCopy:
    """A copy of ``tensor`` that any stream of its device may read; it is made on the current stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().clone()
        self._event = record_event(tensor.device)

    def read_on(self, device: torch.device) -> torch.Tensor:
        """Returns the copy on ``device``, for its current stream."""
        if self._copy.device == device:
            hand_over(device, self._event, (self._copy,))
        return self._copy.to(device)


class PinnedCopies:
    """Copies to a device from pageable memory, through pinned memory that stays until the device has read it.

    A driver copies pageable memory through a buffer of its own, and may wait until the device comes to it.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[torch.Event, torch.Tensor]] = deque()

    def bring(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns ``tensor`` on ``device``, the current one of this thread; the host does not wait."""
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
    """A second queue of work on ``device``; on the host, where nothing is queued, work is done when it is given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if _is_accelerator(device) else None

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Queues the block's work after all earlier work of the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    @contextmanager
    def after(self, events: Iterable[torch.Event | None]) -> Iterator[None]:
        """Queues the block's work after ``events`` of :func:`record_event` only, whatever else runs."""
        if self._stream is None:
            yield
            return
        with self._stream:
            for event in events:
                if event is not None:
                    event.wait()
            yield

    def uses(self, tensor: torch.Tensor) -> None:
        """Frees the memory of ``tensor``, of the current stream, only after the work queued here by now."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Makes the current stream wait for the queued work of this one."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def _is_accelerator(device: torch.device) -> bool:
    """Returns True if ``device`` queues work: the CPU does not, and the meta device computes nothing."""
    return device.type not in ("cpu", "meta")


def _module(kind: str) -> Any:
    """``torch.cuda``, or the module of another type with the same names."""
    return torch.get_device_module(kind)
