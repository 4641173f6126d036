"""Commands ``trine checkpoint``: inspect, verify and export checkpoints. They import no torch, so they respond at once.

info      prints the lines of a run's banner, from the manifest alone
verify    reads every block and compares its hash
export    copies the model folder, verified during the copy
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from engine.checkpoint.format.filesystem import Files, remove_tree, write_new
from engine.checkpoint.format.manifest import Manifest, StoredTensor
from engine.checkpoint.format.safetensors_file import SINGLE, lay_out
from engine.checkpoint.format.step_folders import LOCK, committed, read_manifest, steps_of
from engine.checkpoint.format.step_reader import ReadRequest, StepReader
from engine.checkpoint.format.strict_json import Fields, dump
from engine.errors import CheckpointError
from engine.launch.run_folder import CHECKPOINTS
from engine.parallel.comm.traffic import megabytes
from engine.parallel.grid import Grid, saved_grid, saved_order

MODEL = "model/"


def info(folder: Path) -> None:
    """Prints the content of a checkpoint, read from its manifest alone.

    Args:
        folder: folder of a checkpoint, or of a run; its newest checkpoint is shown.

    Raises:
        CheckpointError: the folder has no checkpoint, or its manifest is damaged.
    """
    files, step = Files(), find(folder)
    with _plain_errors(step):
        lines = {**checkpoint_lines(read_manifest(files, step)), "also there": beside(files, step)}
    print(step)
    for word, text in lines.items():
        if text:
            print(f"  {word:<10} {''.join(c if c.isprintable() else '?' for c in text)}")


def verify_checkpoint(folder: Path, everything: bool) -> None:
    """Verifies the checksum of every block of a checkpoint, and prints one line.

    ``folder``: folder of a checkpoint, or of a run; then its newest checkpoint is verified. ``everything``: verifies
    all checkpoints.

    Raises:
        CheckpointError: a checkpoint is damaged; the message names file and tensor, or the damaged checkpoints.
    """
    newest = find(folder)
    beside_it = committed(Files(), newest.parent)
    steps = beside_it if everything and newest in beside_it else [newest]
    damaged = []
    for step in steps:
        try:
            print(_verified(step), flush=True)
        except CheckpointError as error:
            if len(steps) == 1:
                raise
            print(error, file=sys.stderr)
            damaged.append(step.name)
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(steps)} checkpoints are damaged: {', '.join(damaged)}; copy these again, or load "
            "one of the others."
        )


def export(folder: Path, out: Path, single: bool) -> None:
    """Copies a checkpoint's model in Hugging Face format to the folder ``out``, and verifies every block.

    ``folder``: a checkpoint, or a run; then its newest checkpoint is copied. ``out`` appears only when complete.

    Args:
        single: True: one file ``model.safetensors``; False: one file per rank that saved the checkpoint.

    Raises:
        CheckpointError: ``out`` exists and is not empty, the checkpoint is damaged, or the disk is full.
    """
    files, step, target = Files(), find(folder), out.absolute()
    written = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    if os.path.lexists(target) and (not files.is_folder(target) or files.names(target)):
        raise CheckpointError(
            f"{out} exists and is not an empty folder; name another one, since nothing is overwritten."
        )
    with _plain_errors(step):
        reader = StepReader(files, step)
        written.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.make_folder(written)
            count = _copy_model(files, reader, written, single)
            files.sync_folder(written)
            files.rename(written, target)
            files.sync_folder(target.parent)
        finally:
            if files.is_folder(written):
                remove_tree(files, written)
    print(f"{out}: the model of {step}, {megabytes(count)}, every block checked")


def find(folder: Path) -> Path:
    """Returns ``folder`` itself if it is a checkpoint, or the newest checkpoint of the run in ``folder``.

    Raises:
        CheckpointError: ``folder`` has no checkpoint.
    """
    path, files = folder.absolute(), Files()
    with _plain_errors(path):
        found = steps_of(files, path) or committed(files, path / CHECKPOINTS)
    if not found:
        there = "has no checkpoint" if files.is_folder(path) else "is not a folder"
        raise CheckpointError(f"{folder} {there}; give the folder of a run, or one of its step-N folders.")
    return found[-1]


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror or error}; check the path, its permissions and free space."
        ) from error


def _verified(step: Path) -> str:
    started = perf_counter()
    with _plain_errors(step):
        reader = StepReader(Files(), step)
        reader.verify()
    manifest, seconds = reader.manifest, perf_counter() - started
    size, files, tensors = megabytes(sum(manifest.files.values())), len(manifest.files), len(manifest.tensors)
    return f"{step} is sound: {size} in {files} files, {tensors} tensors, {seconds:.1f} s"


def _copy_model(files: Files, reader: StepReader, target: Path, single: bool) -> int:
    """Copies the files of the model and returns the number of bytes written."""
    count = 0
    for name in reader.manifest.files:
        weights = name.endswith((".safetensors", ".safetensors.index.json"))
        if name.startswith(MODEL) and not (single and weights):
            count += write_new(files, target / name.removeprefix(MODEL), reader.chunks(name))
    return count + (write_new(files, target / SINGLE, _joined(reader)) if single else 0)


def _joined(reader: StepReader) -> Iterator[memoryview]:
    """Yields one file of all tensors, one after the other, with at most one tensor in memory."""
    model = reader.manifest.model_kinds()
    places = {stored.key: (name, stored) for name in model for stored in reader.manifest.tensors[name].pieces}
    layout = lay_out({key: reader.kind_of(stored) for key, (_, stored) in places.items()}, {"format": "pt"})
    yield memoryview(layout.header)
    for key, (kind, _) in sorted(layout.places.items(), key=lambda item: item[1][1]):
        name, stored = places[key]
        data = memoryview(bytearray(kind.bytes))
        reader.read([ReadRequest(name, stored.piece, data)])
        yield data


def checkpoint_lines(manifest: Manifest) -> dict[str, str]:
    """Returns the content of a checkpoint as one line of text per title, such as "grid" or "optimizer"."""
    return {
        "saved": _saved(manifest),
        "grid": _grid(manifest),
        "model": _model(manifest),
        "optimizer": _optimizer(manifest),
        **_tracked(manifest),
        "files": _folders(manifest),
        "checked by": f"{manifest.checksum.algorithm} of every {manifest.checksum.block_bytes >> 10} KiB that is read",
        "client": _shortened(dump({"": manifest.user}).decode()[4:-1]) if manifest.user else "",
    }


def _saved(manifest: Manifest) -> str:
    update = Fields(manifest.progress.get("update"), "the counters in the manifest")
    known = Fields({"versions": {}} | dict(manifest.info), "the manifest").object("versions")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(known.items())) or "converted"
    rows, tokens = update.count("samples"), update.count("tokens")
    counts = [f"{rows:,} rows", *[f"{tokens:,} tokens"] * (tokens != rows)]  # without input_ids, a token is a row
    skipped = f", {update.count('skipped'):,} steps skipped" if update.count("skipped") else ""
    return f"{manifest.info.get('time')} after update {manifest.step:,}: {', '.join(counts)}{skipped} ({versions})"


def _grid(manifest: Manifest) -> str:
    if "origin" in manifest.info:
        return f"from {manifest.info['origin']}; any grid loads it"
    grid = Fields(manifest.info.get("grid"), "the grid in the manifest")
    sizes = {axis: grid.count(axis) for axis in (*Grid().sizes, "ep") if axis in manifest.info["grid"]}
    ranks = saved_grid({**sizes, "order": saved_order(manifest.info["grid"])})
    return f"{ranks}, ZeRO {grid.count('zero')}; any other grid loads it too"


def _model(manifest: Manifest) -> str:
    tensors = {word: _under(manifest, folder) for word, folder in (("parameters", "param"), ("buffers", "buffer"))}
    parts = [
        f"{_elements(found):,} {word} in {len(found)} tensors, {_dtypes(found)}"
        for word, found in tensors.items()
        if found
    ]
    names = len(manifest.aliases)
    tied = f"{names} other name{'s' * (names != 1)} of tied ones" if names else ""
    return "; ".join(filter(None, [*parts, tied]))


def _optimizer(manifest: Manifest) -> str:
    families = sorted({name.partition("/")[0] for name in manifest.tensors} - {"param", "buffer"})
    states = [
        f"{name} {_dtypes(found)} of {_elements(found):,}" for name in families for found in [_under(manifest, name)]
    ]
    groups = len(Fields(manifest.optimizer, "the optimizer in the manifest").list("groups"))
    kind = manifest.optimizer.get("type") or " or ".join(manifest.optimizer.get("types", [])[:2])
    head = f"{kind}, {groups} group{'s' * (groups != 1)}" if groups else "no optimizer state"
    return ", ".join([head, *states])


def _tracked(manifest: Manifest) -> dict[str, str]:
    """Describes the registered state, such as the position in the data."""
    lines = {}
    for name, state in Fields(manifest.progress, "the manifest").object("tracked").items():
        plain = isinstance(state, dict) and all(isinstance(value, int | float | str) for value in state.values())
        text = ", ".join(f"{key} {value}" for key, value in state.items()) if plain else str(state)
        lines[name] = _shortened(text)
    return lines


def _folders(manifest: Manifest) -> str:
    sizes: dict[str, list[int]] = {}
    for name, size in manifest.files.items():
        sizes.setdefault(name.partition("/")[0], []).append(size)
    parts = [f"{folder} {megabytes(sum(found))} in {len(found)}" for folder, found in sorted(sizes.items())]
    return f"{megabytes(sum(manifest.files.values()))} in {len(manifest.files)} ({', '.join(parts)})"


def beside(files: Files, step: Path) -> str:
    """Returns one line with the names of all other checkpoints and files next to the checkpoint folder ``step``.

    ``files``: access to the file system.
    """
    steps = [path.name for path in committed(files, step.parent) if path != step]
    hidden = {step.name, "latest", LOCK, *steps}
    others = [name for name in files.names(step.parent) if name not in hidden]
    return ", ".join([*steps, *others]) if step.name not in others else ""


def _under(manifest: Manifest, folder: str) -> list[StoredTensor]:
    return [tensor for name, tensor in manifest.tensors.items() if name.partition("/")[0] == folder]


def _elements(tensors: list[StoredTensor]) -> int:
    return sum(tensor.kind.bytes // tensor.kind.width for tensor in tensors)


def _dtypes(tensors: list[StoredTensor]) -> str:
    return " and ".join(sorted({tensor.kind.dtype for tensor in tensors}))


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
