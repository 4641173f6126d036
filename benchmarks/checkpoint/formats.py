"""Writes and reads the same tensors by Trine, torch.save, DCP, safetensors and plain files.

    tensors    the weights of a decoder, which are written
    landing    as many bytes of page-aligned memory, touched before: reads fill it, plain files are written from it

A write ends with an fsync of file and folder. A read ends when the values are in the landing (Trine: in the model),
which is overwritten in place. Partial reads take the second quarter of the rows, as one of four tensor ranks does.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import engine
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.host_image import as_bytes
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.step_folders import committed
from engine.checkpoint.format.step_reader import ReadRequest, StepReader

RAW_CHUNK = 1 << 25
"""Bytes of one write or read of the raw disk; larger ones were no faster."""
FILE = "tensors"

Tensors = Mapping[str, Tensor]


def decoder_shapes(width: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Returns the weight shapes of a Llama decoder; its MLP has the width ratio 4096 -> 11008."""
    inner = 43 * width // 16
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width)}
    for layer in range(layers):
        shapes |= {f"layer{layer}_{name}": (width, width) for name in ("query", "key", "value", "output")}
        shapes |= {f"layer{layer}_{name}": (inner, width) for name in ("gate", "up")}
        shapes |= {f"layer{layer}_down": (width, inner)}
        shapes |= {f"layer{layer}_{name}": (width,) for name in ("norm_attention", "norm_mlp")}
    return shapes


class Weights(nn.Module):
    """Model with these parameters and no forward."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape, generator=generator)))


@dataclass(frozen=True)
class Landing:
    """Warm, page-aligned host memory for every tensor."""

    memory: memoryview
    tensors: Tensors

    def quarter(self) -> dict[str, tuple[int, int]]:
        """Returns the second quarter of each matrix's rows as [start, stop), by name."""
        return {name: (len(tensor) // 4, len(tensor) // 2) for name, tensor in self.tensors.items() if tensor.ndim == 2}

    def rows(self) -> dict[str, Tensor]:
        """Returns views of that quarter of the rows, by name."""
        return {name: self.tensors[name][start:stop] for name, (start, stop) in self.quarter().items()}

    def offset(self, tensor: Tensor) -> int:
        """Returns the byte offset of a tensor in the memory."""
        return tensor.data_ptr() - torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()


def make_landing(tensors: Tensors) -> Landing:
    """Copies ``tensors`` to new memory, each at a multiple of 64 bytes."""
    starts, end = {}, 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += -(-tensor.nbytes // 64) * 64
    pages = mmap.mmap(-1, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)
    placed = {
        name: torch.frombuffer(memory[starts[name] :][: tensor.nbytes], dtype=tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        placed[name].copy_(tensor)
    return Landing(memory, placed)


@dataclass(frozen=True)
class Format:
    """Functions that write and read a checkpoint in one format, given its folder."""

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    read_rows: Callable[[Path], object]


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def forget(folder: Path) -> None:
    """Drops all files in a folder from the page cache; they must be on disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def warm(folder: Path) -> None:
    """Reads all files in a folder into the page cache."""
    buffer = memoryview(bytearray(1 << 20))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _sync(path: Path, flags: int = os.O_RDONLY) -> None:
    file = os.open(path, flags)
    os.fsync(file)
    os.close(file)


# ---------------------------------------------------------------------- the bare disk


def write_raw(landing: Landing, folder: Path, direct: bool) -> None:
    """Writes the memory to one file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(folder / FILE, flags | (os.O_DIRECT if direct else 0), 0o644)
    except OSError:  # a file system without O_DIRECT, such as tmpfs
        (folder / FILE).unlink(missing_ok=True)
        file = os.open(folder / FILE, flags, 0o644)
    for start in range(0, len(landing.memory), RAW_CHUNK):
        data = landing.memory[start : start + RAW_CHUNK]
        while data:
            data = data[os.write(file, data) :]
    os.fsync(file)
    os.close(file)
    sync_folder(folder)


def read_direct(landing: Landing, folder: Path) -> None:
    """Reads the file with direct I/O if the file system supports it."""
    try:
        file = os.open(folder / FILE, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        file = os.open(folder / FILE, os.O_RDONLY)
    for start in range(0, len(landing.memory), RAW_CHUNK):
        os.preadv(file, [landing.memory[start : start + RAW_CHUNK]], start)
    os.close(file)


def raw(landing: Landing) -> Format:
    """Returns the raw disk as a format: buffered reads and writes of the needed bytes only."""

    def fetch(folder: Path, ranges: Iterator[tuple[int, int]]) -> None:
        file = os.open(folder / FILE, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        for first, last in ranges:
            for start in range(first, last, RAW_CHUNK):
                target = landing.memory[start : min(start + RAW_CHUNK, last)]
                while target:
                    count = os.preadv(file, [target], start)
                    start, target = start + count, target[count:]
        os.close(file)

    def quarter() -> Iterator[tuple[int, int]]:
        for rows in landing.rows().values():
            yield landing.offset(rows), landing.offset(rows) + rows.nbytes

    return Format(
        "raw",
        lambda folder: write_raw(landing, folder, direct=False),
        lambda folder: fetch(folder, iter([(0, len(landing.memory))])),
        lambda folder: fetch(folder, quarter()),
    )


# ---------------------------------------------------------------------- the others


def safetensors(tensors: Tensors, landing: Landing) -> Format:
    """Returns the format of the safetensors package: ``save_file``, ``load_file`` and ``get_slice``, copied into
    existing tensors.
    """

    def write(folder: Path) -> None:
        save_file(dict(tensors), folder / FILE)
        _sync(folder / FILE)
        sync_folder(folder)

    def read(folder: Path) -> None:
        for name, values in load_file(folder / FILE).items():
            landing.tensors[name].copy_(values)

    def read_rows(folder: Path) -> None:
        with safe_open(folder / FILE, framework="pt") as file:
            for name, (start, stop) in landing.quarter().items():
                landing.tensors[name][start:stop].copy_(file.get_slice(name)[start:stop])

    return Format("safetensors", write, read, read_rows)


def torch_save(tensors: Tensors, landing: Landing) -> Format:
    """Returns the format of ``torch.save`` and ``torch.load(mmap=True)``, followed by a copy into existing tensors."""

    def write(folder: Path) -> None:
        with open(folder / FILE, "xb") as file:
            torch.save(dict(tensors), file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)

    def load(folder: Path) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(folder / FILE, mmap=True, weights_only=True)
        return found

    def read(folder: Path) -> None:
        for name, values in load(folder).items():
            landing.tensors[name].copy_(values)

    def read_rows(folder: Path) -> None:
        found = load(folder)
        for name, (start, stop) in landing.quarter().items():
            landing.tensors[name][start:stop].copy_(found[name][start:stop])

    return Format("torch.save", write, read, read_rows)


def distributed_checkpoint(tensors: Tensors, landing: Landing, threads: int) -> Format:
    """Returns torch's distributed checkpoint (DCP) in one process as a format; it syncs its files itself."""

    def write(folder: Path) -> None:
        writer = FileSystemWriter(folder, thread_count=threads, sync_files=True)
        dcp_save(dict(tensors), storage_writer=writer)
        sync_folder(folder)

    def read(folder: Path) -> None:
        dcp_load(dict(landing.tensors), storage_reader=FileSystemReader(folder))

    def read_rows(folder: Path) -> None:
        dcp_load(landing.rows(), storage_reader=FileSystemReader(folder), planner=_QuarterPlanner(landing))

    return Format(f"DCP, {threads} thread{'s' * (threads > 1)}", write, read, read_rows)


class _QuarterPlanner(DefaultLoadPlanner):
    """Asks for the quarter as DCP asks for the shard of a DTensor, without a job of four ranks."""

    def __init__(self, landing: Landing) -> None:
        super().__init__()
        self._quarter, self._rows = landing.quarter(), landing.rows()

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner comes first"
        items = []
        for name, (start, _) in self._quarter.items():
            chunk = ChunkStorageMetadata(torch.Size([start, 0]), self._rows[name].shape)
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), "tensors only"
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._rows[index.fqn]


def stage_with_dcp(tensors: Tensors, folder: Path, kept: AsyncStager | None) -> Callable[[], object]:
    """Starts ``dcp.async_save``; returns a function that waits for its end. ``kept``: stager with reused memory."""
    future = async_save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=True), async_stager=kept)
    assert isinstance(future, Future), "a thread's"
    return future.result


# ---------------------------------------------------------------------- Trine


class Trine:
    """Trine engine with one rank and no state except weights (SGD without momentum), as a format."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.model = Weights(shapes)
        config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        self.engine = engine.initialize(self.model, config)

    @property
    def parameters(self) -> Tensors:
        """Weights of the model by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def begin(self, folder: Path) -> Callable[[], object]:
        """Starts a save, up to where training continues; returns a function that waits for the rest."""
        return self.engine.save_checkpoint(folder).wait

    def format(self, landing: Landing) -> Format:
        """Returns the engine's ``save_checkpoint``, ``load_checkpoint`` and row reader as a format."""
        return Format(
            "Trine",
            lambda folder: self.begin(folder)(),
            lambda folder: self.engine.load_checkpoint(folder),
            lambda folder: read_rows(landing, folder),
        )


def read_rows(landing: Landing, folder: Path) -> int:
    """Reads a quarter of the rows by Trine's reader; returns the bytes read from tensor files."""
    files = Files()
    reader = StepReader(files, committed(files, folder)[-1])
    reader.read(
        ReadRequest(f"param/{name}", _rows(landing.tensors[name], *landing.quarter()[name]), as_bytes(rows))
        for name, rows in landing.rows().items()
    )
    return reader.bytes_read


def _rows(tensor: Tensor, start: int, stop: int) -> Piece:
    return Part(tuple(tensor.shape), 0, ((start, stop),)).whole()
