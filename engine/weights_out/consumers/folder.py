"""Folder of versions: ``version-000007`` is a Hugging Face folder, committed by rename.

A file with unchanged tensors is a hard link to the file of the version before it, so it costs neither reads nor bytes
on disk. Of a changed file, only changed blocks are read from the trainer.
"""

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from engine.checkpoint.contents.snapshot import METADATA
from engine.checkpoint.format.filesystem import Files, remove_tree, write_new
from engine.checkpoint.format.host_image import HostImage, ImageMemory, make_image, write_file
from engine.checkpoint.format.safetensors_file import INDEX
from engine.checkpoint.format.strict_json import dump, parse
from engine.errors import CheckpointError
from engine.weights_out.blocks import WeightBlocks
from engine.weights_out.reader import Known

_NAME = re.compile(r"version-(\d{6,})")
_NOTE = "trine-version.json"
"""File with number, base and block hashes of a version."""


@dataclass(slots=True)
class VersionFolder:
    """Consumer that writes each version as a Hugging Face folder, ``version-NNNNNN``, below ``folder``.

    Args:
        folder: folder of all versions; it is created.
        keep: number of newest versions that remain; older ones are removed.
    """

    folder: Path
    keep: int = 2
    files: Files = field(default_factory=Files)
    memory: ImageMemory = field(default_factory=ImageMemory)
    _written: Path | None = None
    """Folder of the prepared version."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the versions that are completely written in the folder, ascending."""
        names = self.files.names(self.folder) if self.files.is_folder(self.folder) else []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    @property
    def last(self) -> int:
        """Number of the newest completely written version; 0 before the first."""
        return max(self.numbers, default=0)

    def prepare(self, blocks: WeightBlocks) -> None:
        """Writes the version of ``blocks`` under a temporary name; earlier versions do not change.

        Raises:
            EngineError: the version has not arrived in time, or the training has dropped it.
            CheckpointError: the folder cannot be written.
        """
        with self._named():
            self._prepare(blocks)

    def hold(self) -> None:
        """Does nothing: the current version's folder remains for programs that read it."""

    def commit(self, blocks: WeightBlocks) -> None:
        """Renames the written version to its final name, and removes old versions.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        assert self._written is not None, "the version is prepared"
        with self._named():
            self.files.rename(self._written, self._path(blocks.version.number))
            self._written = None
            self.files.sync_folder(self.folder)
        for number in self.numbers[: -self.keep]:
            remove_tree(self.files, self._path(number))

    def drop(self) -> None:
        """Removes the files of the version that ``prepare`` has written; earlier versions remain."""
        if self._written is not None:
            remove_tree(self.files, self._written)
        self._written = None

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Names the folder in errors of the disk."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be written ({error.strerror}); give another folder in weights_out.to, or free "
                "space."
            ) from error

    def _prepare(self, blocks: WeightBlocks) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.files.names(self.folder):
            if name.startswith(".version-"):  # of a process that was killed
                remove_tree(self.files, self.folder / name)
        version, base = blocks.version, self._path(self.last) if self.last else None
        note = _read_note(base) if base is not None else {}
        self._written = written = self.folder / f".{self._path(version.number).name}.{secrets.token_hex(4)}"
        self.files.make_folder(written)
        groups, placed, hashes = blocks.groups(), dict[str, str](), dict[str, Any]()
        for number, keys in enumerate(groups):
            name = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
            known = _known(note, name) if note.get("run") == version.run else None
            hashes[name] = _texts(self._write(blocks, keys, written / name, base, known))
            placed |= {part.key: name for key in keys for part in blocks.geometry.tensors[key].entries(key)}
        size = sum(tensor.kind.bytes for tensor in blocks.geometry.served.values())
        about = {"run": version.run, "number": version.number, "base": version.base, "step": version.step}
        metadata = {"total_size": size, "version": version.number, "base": version.base}
        self._text(written / INDEX, dump({"metadata": metadata, "weight_map": placed}))
        self._text(written / _NOTE, dump({**about, "hashes": hashes}))
        for name, text in blocks.geometry.files.items():
            self._text(written / name, text.encode())
        self.files.sync_folder(written)

    def _path(self, number: int) -> Path:
        return self.folder / f"version-{number:06d}"

    def _text(self, path: Path, data: bytes) -> None:
        write_new(self.files, path, [memoryview(data)])

    def _write(
        self, blocks: WeightBlocks, keys: Sequence[str], path: Path, base: Path | None, known: Known | None
    ) -> Known:
        """Writes one file, or links it to the base's if nothing has changed; returns the hashes of its blocks."""
        kinds = {key: blocks.geometry.tensors[key].kind for key in keys}
        parts = {key: blocks.geometry.tensors[key].parts for key in keys}
        image = make_image(kinds, METADATA, self.memory, "bucket", parts)
        earlier = base / path.name if base is not None else None
        has_values = earlier is not None and _begins_with(earlier, image)

        def memory() -> Mapping[str, Tensor]:
            if has_values and earlier is not None:
                with earlier.open("rb") as file:
                    file.readinto(image.memory[: image.layout.size])
            return {key: image.tensor(key) for key in keys}

        into = blocks.bucket(keys, memory, has_values)
        hashes = blocks.fetch(into, known if has_values else None)
        if has_values and earlier is not None and not into.made:
            os.link(earlier, path)
        else:
            write_file(self.files, path, image.memory, image.layout.size)
        return hashes


def _begins_with(path: Path, image: HostImage) -> bool:
    """Returns True if a file has the tensors of an image, with the same dtypes and shapes."""
    try:
        with path.open("rb") as file:
            same = file.read(len(image.layout.header)) == image.layout.header
        return same and path.stat().st_size == image.layout.size
    except FileNotFoundError:
        return False


def _read_note(base: Path) -> Mapping[str, Any]:
    try:
        return parse((base / _NOTE).read_bytes(), str(base / _NOTE))
    except FileNotFoundError:
        return {}


def _texts(known: Known) -> dict[str, list[str]]:
    return {str(owner): [each.astype("<u8").tobytes().hex() for each in flows] for owner, flows in known.items()}


def _known(note: Mapping[str, Any], name: str) -> Known | None:
    stored = note["hashes"].get(name)
    if stored is None:
        return None
    return {int(o): [np.frombuffer(bytes.fromhex(text), dtype="<u8") for text in flows] for o, flows in stored.items()}
