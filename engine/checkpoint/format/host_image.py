"""Files of a checkpoint built in page-aligned host memory, and their write with O_DIRECT.

The memory is reused by the next save. ``write_file`` writes and calls fsync while another thread hashes the blocks:

    this thread      | write chunk 0 | write chunk 1 | ... | truncate, sync |
    hashing thread   | hash chunk 0 | hash chunk 1 | ...
"""

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from engine.checkpoint.format.checked_blocks import BLOCK, DEFAULT_ALGORITHM, Hashes, hash_blocks
from engine.checkpoint.format.filesystem import PAGE, Files, named
from engine.checkpoint.format.safetensors_file import DTYPES, FileLayout, FilePart, TensorKind, code_of, lay_out


class ImageMemory:
    """Host buffers by name, reused by each snapshot. A buffer grows to the largest requested size and never shrinks."""

    def __init__(self) -> None:
        self._buffers: dict[str, mmap.mmap] = {}

    def take(self, name: str, size: int) -> memoryview:
        """Returns ``size`` bytes, rounded up to whole pages, of the buffer ``name``, with undefined contents.

        The buffer is made or enlarged if necessary.
        """
        wanted = max(PAGE, -(-size // PAGE) * PAGE)
        held = self._buffers.get(name)
        if held is None or len(held) < wanted:
            held = self._buffers[name] = mmap.mmap(-1, wanted)
            with suppress(OSError):  # a kernel without huge pages uses small ones
                held.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(held)[:wanted]

    @property
    def bytes(self) -> int:
        """Total bytes of the buffers."""
        return sum(map(len, self._buffers.values()))


@dataclass(frozen=True, slots=True)
class HostImage:
    """Safetensors file in host memory, byte for byte as it will be on disk."""

    layout: FileLayout
    memory: memoryview
    """Page-aligned memory of the file, rounded up to whole pages; the file is its first ``layout.size`` bytes."""

    def tensor(self, key: str) -> Tensor:
        """Returns the tensor of ``key`` as a view of the file's memory."""
        kind, start = self.layout.places[key]
        return as_tensor(self.memory[start : start + kind.bytes], kind)


def make_image(
    tensors: Mapping[str, TensorKind],
    metadata: Mapping[str, str],
    memory: ImageMemory,
    name: str,
    parts: Mapping[str, Sequence[FilePart]] | None = None,
) -> HostImage:
    """Makes a safetensors file in host memory, with its header and padding. The caller fills in the tensor values.

    Args:
        tensors: dtype and shape of each tensor, by key.
        metadata: texts for the header's ``__metadata__``.
        memory: buffers by name.
        name: buffer that the file uses.
        parts: tensor key -> entries that the header lists in place of this tensor, such as one for each expert.
    """
    layout = lay_out(tensors, metadata, parts or {})
    image = HostImage(layout, memory.take(name, layout.size))
    image.memory[: len(layout.header)] = layout.header
    image.memory[layout.size :] = bytes(len(image.memory) - layout.size)
    return image


def as_tensor(memory: memoryview, kind: TensorKind) -> Tensor:
    """Returns ``memory`` as a CPU tensor with the dtype and shape of ``kind``, without a copy."""
    if not len(memory):
        return torch.empty(kind.shape, dtype=torch_dtype(kind))
    return torch.frombuffer(memory, dtype=torch_dtype(kind)).view(kind.shape)


def as_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data


def kind_of(tensor: Tensor, shape: tuple[int, ...] | None = None) -> TensorKind:
    """Returns the safetensors dtype of a tensor together with ``shape``, by default the tensor's own shape."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorKind(code_of(dtype), tuple(tensor.shape) if shape is None else shape)


def torch_dtype(kind: TensorKind) -> torch.dtype:
    """Returns the torch dtype of ``kind``."""
    dtype: torch.dtype = getattr(torch, DTYPES[kind.dtype])
    return dtype


CHUNK = 1 << 24
"""Bytes of each write to disk."""


def write_file(files: Files, path: Path, memory: memoryview, size: int) -> Hashes:
    """Writes the first ``size`` bytes of ``memory`` to a new file and calls fsync. Returns the block hashes, uint64
    [blocks].

    ``memory`` must be page-aligned and consist of whole pages, for O_DIRECT.

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
