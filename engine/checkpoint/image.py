"""Files in host memory, page-aligned and as they will lie on the disk, so that a save is one copy and one long write.

The memory is kept from one save to the next: fresh pages cost more than the copy does.
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.files import PAGE
from engine.checkpoint.tensor_file import DTYPES, FileLayout, Kind, code_of, lay_out


class ImageMemory:
    """Buffers by name, each as large as its largest use so far."""

    def __init__(self) -> None:
        self._buffers: dict[str, mmap.mmap] = {}

    def take(self, name: str, size: int) -> memoryview:
        """At least ``size`` bytes, rounded up to pages; what an earlier use left is in there."""
        wanted = max(PAGE, -(-size // PAGE) * PAGE)
        held = self._buffers.get(name)
        if held is None or len(held) < wanted:
            held = self._buffers[name] = mmap.mmap(-1, wanted)
            with suppress(OSError):  # a kernel without them takes small pages
                held.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(held)[:wanted]

    @property
    def bytes(self) -> int:
        """What is held."""
        return sum(map(len, self._buffers.values()))


@dataclass(frozen=True, slots=True)
class Image:
    """One file in memory."""

    layout: FileLayout
    memory: memoryview
    """Whole pages; the file is its first ``layout.size`` bytes."""

    def tensor(self, key: str) -> Tensor:
        """Where a tensor's values go."""
        kind, start = self.layout.places[key]
        return as_tensor(self.memory[start : start + kind.bytes], kind)


def make_image(tensors: Mapping[str, Kind], metadata: Mapping[str, str], memory: ImageMemory, name: str) -> Image:
    """An image of a safetensors file whose values are still to be filled in."""
    layout = lay_out(tensors, metadata)
    image = Image(layout, memory.take(name, layout.size))
    image.memory[: len(layout.header)] = layout.header
    image.memory[layout.size :] = bytes(len(image.memory) - layout.size)
    return image


def as_tensor(memory: memoryview, kind: Kind) -> Tensor:
    """A tensor over this memory."""
    if not len(memory):
        return torch.empty(kind.shape, dtype=torch_dtype(kind))
    return torch.frombuffer(memory, dtype=torch_dtype(kind)).view(kind.shape)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data


def kind_of(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Kind:
    """What a tensor would be in a file."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Kind(code_of(dtype), tuple(tensor.shape) if shape is None else shape)


def torch_dtype(kind: Kind) -> torch.dtype:
    """The dtype in torch."""
    dtype: torch.dtype = getattr(torch, DTYPES[kind.dtype])
    return dtype
