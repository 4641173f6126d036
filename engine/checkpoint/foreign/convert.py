"""Conversion of another engine's checkpoint to ours: safetensors with a hash of every block, in a step folder.

open -> read and write one file after another, of at most FILE bytes -> hashes, manifest, COMMIT -> rename
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from engine.checkpoint.contents.snapshot import METADATA
from engine.checkpoint.foreign import foreign_folder, open_foreign
from engine.checkpoint.foreign.foreign_step import ForeignStep
from engine.checkpoint.format.checked_blocks import Hashes, hash_blocks
from engine.checkpoint.format.filesystem import Files, remove_tree, resolved, write_new
from engine.checkpoint.format.host_image import ImageMemory, make_image, write_file
from engine.checkpoint.format.manifest import CHECKSUMS, Manifest, StoredPiece, StoredTensor, hashes_file
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.safetensors_file import INDEX, TensorKind, in_batches
from engine.checkpoint.format.step_folders import commit, make_run_folder, temporary, write_manifest
from engine.checkpoint.format.step_reader import ReadRequest
from engine.checkpoint.format.strict_json import dump
from engine.errors import CheckpointError

FILE = 1 << 30
"""Largest bytes of tensors in an output file, and so in memory; a larger tensor has its own file."""


def convert(folder: Path, out: Path, weights_only: bool = False) -> Path:
    """Converts another engine's checkpoint in ``folder`` to this engine's format. Returns the new checkpoint's folder,
    inside ``out``.

    Args:
        weights_only: True to leave out optimizer state. False raises if the files do not name its parameters, as in
            Megatron's torch format.

    Raises:
        CheckpointError: ``folder`` has no checkpoint of a known engine, or it cannot be read; the disk is full.
    """
    files = Files()
    given, target = resolved(folder), resolved(out)
    found = foreign_folder(files, given)
    if found is None:
        raise CheckpointError(
            f"{folder} has no checkpoint of DeepSpeed, torch.distributed.checkpoint or Megatron; pass the folder "
            "that was saved."
        )
    try:
        return _write(files, open_foreign(files, found, optimizer=not weights_only), target, weights_only)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or out}: {error.strerror or error}; check the path, its permissions and free space."
        ) from error


def _write(files: Files, source: ForeignStep, out: Path, weights_only: bool) -> Path:
    make_run_folder(files, out)
    written = temporary(out, source.manifest.step, secrets.token_hex(4))
    files.make_folder(written)
    try:
        for name in ("model", "optim", "state"):
            files.make_folder(written / name)
        manifest = _write_tensors(files, source, written, weights_only)
        write_manifest(files, written, manifest)
        return commit(files, written, manifest.step)
    except BaseException:
        with suppress(OSError):
            remove_tree(files, written)
        raise


def _write_tensors(files: Files, source: ForeignStep, written: Path, weights_only: bool) -> Manifest:
    memory, sizes, hashes = ImageMemory(), dict[str, int](), dict[str, Hashes]()
    tensors: dict[str, StoredTensor] = {}
    for file, kinds in _files_of(source.kinds, weights_only):
        model = file.startswith("model/")
        keys = {name: name.partition("/")[2] if model else name for name in kinds}
        image = make_image({keys[name]: kind for name, kind in kinds.items()}, METADATA, memory, "file")
        for name, kind in kinds.items():
            piece, start = Part(kind.shape).whole(), image.layout.places[keys[name]][1]
            source.read([ReadRequest(name, piece, image.memory[start : start + kind.bytes])])
            tensors[name] = StoredTensor(kind, (StoredPiece(file, keys[name], piece),))
        hashes[file] = write_file(files, written / file, image.memory, image.layout.size)
        sizes[file] = image.layout.size
    places = {name: stored.pieces[0] for name, stored in tensors.items() if name.startswith(("param/", "buffer/"))}
    index = dump({
        "metadata": {"total_size": sum(tensors[name].kind.bytes for name in places)},
        "weight_map": {piece.key: piece.file.removeprefix("model/") for piece in places.values()},
    })  # fmt: skip
    sizes[f"model/{INDEX}"] = write_new(files, written / "model" / INDEX, [memoryview(index)])
    hashes[f"model/{INDEX}"] = hash_blocks(memoryview(index))
    data, checksum = hashes_file(hashes)
    write_new(files, written / CHECKSUMS, [memoryview(data)])
    attempt = written.name.rpartition("-")[2]
    info = {**source.manifest.info, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    optimizer = {"type": None, "groups": []} if weights_only else source.manifest.optimizer
    return replace(
        source.manifest,
        tensors=tensors,
        files=sizes,
        checksum=checksum,
        attempt=attempt,
        info=info,
        optimizer=optimizer,
    )


def _files_of(kinds: Mapping[str, TensorKind], weights_only: bool) -> Iterator[tuple[str, dict[str, TensorKind]]]:
    """Yields name and tensors of each file."""
    model = {name: kind for name, kind in kinds.items() if name.startswith(("param/", "buffer/"))}
    others = {} if weights_only else {name: kind for name, kind in kinds.items() if name not in model}
    shards = list(in_batches(model.items(), lambda item: item[1].bytes, FILE))
    for index, batch in enumerate(shards):
        yield f"model/model-{index + 1:05d}-of-{len(shards):05d}.safetensors", dict(batch)
    for index, batch in enumerate(in_batches(others.items(), lambda item: item[1].bytes, FILE)):
        yield f"optim/optim-{index:05d}.safetensors", dict(batch)
