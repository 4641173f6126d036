"""Files in host memory, page-aligned and byte for byte as on disk, and their write past the page cache.

A save is then one copy into the image and one long write. The memory is reused by the next save, because allocating
fresh pages costs more than the copy.

``write_file`` writes large chunks and forces them to disk while another thread hashes the blocks:

    this thread      | write chunk 0 | write chunk 1 | ... | truncate, sync |
    hashing thread   | hash chunk 0 | hash chunk 1 | ...

Both release the interpreter lock, and the memory does not change meanwhile.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch
from torch import Tensor

from engine.checkpoint.format.checked_blocks import BLOCK, DEFAULT_ALGORITHM, Hashes, hash_blocks
from engine.checkpoint.format.filesystem import PAGE, Files, named
from engine.checkpoint.format.safetensors_file import DTYPES, FileLayout, TensorKind, code_of, lay_out

T = TypeVar("T")


class ImageMemory:
    """Reusable buffers by name, each as large as its largest use so far."""

    def __init__(self) -> None:
        self._buffers: dict[str, mmap.mmap] = {}

    def take(self, name: str, size: int) -> memoryview:
        """Returns a buffer of at least ``size`` bytes, rounded up to pages, with the bytes of its previous use."""
        wanted = max(PAGE, -(-size // PAGE) * PAGE)
        held = self._buffers.get(name)
        if held is None or len(held) < wanted:
            held = self._buffers[name] = mmap.mmap(-1, wanted)
            with suppress(OSError):  # a kernel without huge pages uses small ones
                held.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(held)[:wanted]

    @property
    def bytes(self) -> int:
        """Total size of the buffers."""
        return sum(map(len, self._buffers.values()))


@dataclass(frozen=True, slots=True)
class HostImage:
    """One file in host memory."""

    layout: FileLayout
    memory: memoryview
    """Whole pages; the file is its first ``layout.size`` bytes."""

    def tensor(self, key: str) -> Tensor:
        """Returns a view of a tensor's bytes, to be filled with its values."""
        kind, start = self.layout.places[key]
        return as_tensor(self.memory[start : start + kind.bytes], kind)


def make_image(
    tensors: Mapping[str, TensorKind], metadata: Mapping[str, str], memory: ImageMemory, name: str
) -> HostImage:
    """Returns an image of a safetensors file with header and padding, without the values."""
    layout = lay_out(tensors, metadata)
    image = HostImage(layout, memory.take(name, layout.size))
    image.memory[: len(layout.header)] = layout.header
    image.memory[layout.size :] = bytes(len(image.memory) - layout.size)
    return image


def as_tensor(memory: memoryview, kind: TensorKind) -> Tensor:
    """Returns a tensor that shares this memory."""
    if not len(memory):
        return torch.empty(kind.shape, dtype=torch_dtype(kind))
    return torch.frombuffer(memory, dtype=torch_dtype(kind)).view(kind.shape)


def as_bytes(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(b"")
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data


def kind_of(tensor: Tensor, shape: tuple[int, ...] | None = None) -> TensorKind:
    """Returns dtype and shape of a tensor in a file; ``shape`` replaces the tensor's own."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorKind(code_of(dtype), tuple(tensor.shape) if shape is None else shape)


def torch_dtype(kind: TensorKind) -> torch.dtype:
    """Returns the torch dtype of a kind."""
    dtype: torch.dtype = getattr(torch, DTYPES[kind.dtype])
    return dtype


CHUNK = 1 << 24
"""Bytes per write."""


def write_file(files: Files, path: Path, memory: memoryview, size: int) -> Hashes:
    """Writes the first ``size`` bytes of ``memory`` to a new file; returns the hashes of its blocks.

    ``memory`` starts at a page boundary and extends to the end of the last page, so that the last write can bypass the
    page cache too.

    Raises:
        OSError: names ``path``; the file may have been written in part.
    """
    end = min(-(-size // PAGE) * PAGE, len(memory))
    hashes: list[Hashes] = []
    # a plain thread: an executor refuses work during interpreter shutdown, when the last save of a run is often written
    hasher = Thread(target=lambda: hashes.append(hash_blocks(memory[:size], DEFAULT_ALGORITHM, BLOCK)), name="hashes")
    hasher.start()
    try:
        with named(path):
            _write(files, path, memory[:end], size)
    finally:
        hasher.join()
    return hashes[0]


def _write(files: Files, path: Path, memory: memoryview, size: int) -> None:
    file = files.create(path)
    try:
        for start in range(0, len(memory), CHUNK):
            files.write(file, memory[start : start + CHUNK])
        files.truncate(file, size)
        files.sync(file)
    finally:
        files.close(file)


def in_batches(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields runs of ``items`` of at most ``limit`` bytes; a larger item is a run by itself."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + size_of(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch
