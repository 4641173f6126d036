"""Which checkpoints of a run exist, and how one comes into being and goes.

    write files into   step-00001200.tmp-ATTEMPT/      nothing of that name is ever read
    manifest, COMMIT, every file and folder forced to the disk
    rename to          step-00001200/                  from here on it exists
    retention          rename to .trash-..., then unlink

A name that says ``step-`` is a promise: what cannot be read in there is damage and is said, never skipped. A step
that is saved once more gets a revision, ``step-00001200-r1``, so that nothing is written over. Steps beyond the one
that is saved belong to a course that the run has left, by loading an older step: they are set aside first, as
``abandoned-...``, so that the newest is always the one that the run goes on from.
"""

import hashlib
import re
from pathlib import Path

from engine.checkpoint.format.filesystem import Files, read_all, remove_tree, write_new
from engine.checkpoint.format.manifest import COMMIT, LIMIT, NAME, Manifest, from_json, to_json
from engine.checkpoint.format.strict_json import Fields, dump, parse
from engine.errors import CheckpointError

_STEP = re.compile(r"step-([0-9]{8,18})(?:-r([0-9]{1,9}))?")
_LEFTOVER = re.compile(r"\.trash-step-[0-9]{8,18}(-r[0-9]{1,9})?|(step-[0-9]{8,18}|latest)\.tmp-[0-9a-f]{8}")
"""Names that nobody but a save gives: what else lies in a folder is the user's."""
_SMALL = 1 << 12


def step_of(name: str) -> tuple[int, int] | None:
    """(step, revision) of a folder's name, or None."""
    found = _STEP.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def committed(files: Files, folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest last. Nothing where there is no folder."""
    if not files.is_folder(folder):
        return []
    found = [(key, folder / name) for name in files.names(folder) if (key := step_of(name)) is not None]
    return [path for _, path in sorted(found)]


def make_run_folder(files: Files, folder: Path) -> None:
    """The folder of a run with those above it, as far as they are missing, forced to the disk."""
    if files.is_folder(folder):
        return
    make_run_folder(files, folder.parent)
    try:
        files.make_folder(folder)
    except FileExistsError:  # somebody else was faster, or it is no folder: what comes next will say it
        return
    files.sync_folder(folder.parent)


def temporary(folder: Path, step: int, attempt: str) -> Path:
    """Where a save writes."""
    return folder / f"step-{step:08d}.tmp-{attempt}"


def is_step(files: Files, path: Path) -> bool:
    """A checkpoint itself and not the folder of a run, whatever its name is."""
    return step_of(path.name) is not None or (files.is_folder(path) and NAME in files.names(path))


def steps_of(files: Files, path: Path) -> list[Path]:
    """The checkpoint that a folder is, or those of the run that it is of, the newest last."""
    return [path] if is_step(files, path) else committed(files, path)


def read_manifest(files: Files, step: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointError: no COMMIT, the manifest is not the one that was committed, or is that of another step.
    """
    text = read_all(files, step, COMMIT, _SMALL)
    commit = Fields(parse(text, str(step / COMMIT)), str(step / COMMIT))
    size, digest = commit.count("manifest_bytes"), commit.text("manifest_sha256")
    if text != _commit_text(size, digest):
        raise CheckpointError(f"{step / COMMIT} is damaged: it has more than the length and sha256 of {NAME}.")
    data = read_all(files, step, NAME, min(size, LIMIT))
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(f"{step / NAME} is damaged: its length or sha256 is not what {COMMIT} says.")
    manifest = from_json(data, str(step / NAME))
    named_step = step_of(step.name)
    if named_step is not None and named_step[0] != manifest.step:
        raise CheckpointError(
            f"{step / NAME} is of step {manifest.step}; the folder was renamed or mixed with another."
        )
    return manifest


def write_manifest(files: Files, step: Path, manifest: Manifest) -> None:
    """``manifest.json``, then ``COMMIT``, both forced to the disk."""
    data = to_json(manifest)
    write_new(files, step / NAME, [memoryview(data)])
    record = _commit_text(len(data), hashlib.sha256(data).hexdigest())
    write_new(files, step / COMMIT, [memoryview(record)])


def commit(files: Files, written: Path, step: int) -> Path:
    """Let the finished folder ``written`` appear under its name; returns that.

    Raises:
        OSError: it has not.
        CheckpointError: it has, and that could not be forced to the disk.
    """
    folder = written.parent
    for name in files.names(written):
        if files.is_folder(written / name):
            files.sync_folder(written / name)
    files.sync_folder(written)
    others = {path: key for path in committed(files, folder) if (key := step_of(path.name)) is not None}
    attempt = written.name.rpartition("-")[2]
    beyond = [path for path, key in others.items() if key[0] > step]
    for path in beyond:
        files.rename(path, folder / f"abandoned-{attempt}-{path.name}")
    if beyond:
        files.sync_folder(folder)
    revisions = [revision for at, revision in others.values() if at == step]
    suffix = f"-r{max(revisions) + 1}" if revisions else ""
    target = folder / f"step-{step:08d}{suffix}"
    files.rename(written, target)
    try:
        files.sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"{target} is committed, but a power cut may still take it: {error.strerror or error}."
        ) from error
    return target


def point_to(files: Files, step: Path, attempt: str) -> None:
    """Write the hint ``latest``."""
    hint = step.parent / f"latest.tmp-{attempt}"
    write_new(files, hint, [memoryview(dump({"newest": step.name}))])
    files.rename(hint, step.parent / "latest")


def retain(files: Files, folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints (at least one stays); returns what went."""
    old = committed(files, folder)[: -max(1, keep)]
    for path in old:
        trash = folder / f".trash-{path.name}"
        files.rename(path, trash)
        files.sync_folder(folder)  # or a power cut may leave its name and take what is in there
        remove_tree(files, trash)
    return old


def sweep(files: Files, folder: Path) -> None:
    """Remove what interrupted saves and clean-ups have left."""
    for name in files.names(folder) if files.is_folder(folder) else ():
        path = folder / name
        if not _LEFTOVER.fullmatch(name):
            continue
        if files.is_link(path) or not files.is_folder(path):
            files.unlink(path)
            continue
        with files.locked(path) as free:  # or another engine is saving there just now
            if free:
                remove_tree(files, path)


def _commit_text(size: int, digest: str) -> bytes:
    return dump({"manifest_bytes": size, "manifest_sha256": digest})
