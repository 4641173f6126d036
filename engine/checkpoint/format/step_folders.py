"""Step folders of a run: listed, committed, retained, and cleaned up.

    write files into   step-00001200.tmp-ATTEMPT/      no loader reads such a name
    manifest, COMMIT, fsync of every file and folder
    rename to          step-00001200/                  from here on the checkpoint exists
    retention          rename to .trash-..., then unlink

A folder ``step-N`` that cannot be read is reported as damaged, never skipped. A step that is saved again gets a
revision, ``step-00001200-r1``. Later steps of an abandoned continuation are renamed to ``abandoned-...`` first, so that
the newest folder is always the one to resume from.

A lock on the folder excludes other engines:

    RUN/.trine.lock    {"host": ..., "pid": ..., "since": ...} of the last holder; the lock is flock's, not the file

``close`` or the end of the process releases it. On NFS (Linux, version 3 with lockd or version 4) and on Lustre with
``flock`` it holds on all machines, with ``localflock`` on one. Without lock support the engine logs a warning.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from engine.checkpoint.format.checked_blocks import HashSlice
from engine.checkpoint.format.filesystem import Files, read_all, remove_tree, write_new
from engine.checkpoint.format.manifest import COMMIT, LIMIT, NAME, Manifest, from_fields, to_json
from engine.checkpoint.format.manifest_parts import FOLDER, from_index, is_indexed, to_parts
from engine.checkpoint.format.strict_json import Fields, dump, parse
from engine.errors import COPY_AGAIN, CheckpointError

logger = logging.getLogger("trine")


_STEP = re.compile(r"step-([0-9]{8,18})(?:-r([0-9]{1,9}))?")
_LEFTOVER = re.compile(r"\.trash-step-[0-9]{8,18}(-r[0-9]{1,9})?|(step-[0-9]{8,18}|latest)\.tmp-[0-9a-f]{8}")
"""Names that only a save creates; everything else in a folder belongs to the user."""
_SMALL = 1 << 12
WHOLE_PIECES = 1 << 14
"""Most pieces of a manifest that is one file, about 2 MiB."""


def step_of(name: str) -> tuple[int, int] | None:
    """Returns (step, revision) of a checkpoint's folder name, such as (20, 1) for "step-00000020-r1"; else None.

    The revision counts repeated saves of one step, from 0.
    """
    found = _STEP.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def committed(files: Files, folder: Path) -> list[Path]:
    """Returns the folders of the complete checkpoints in a run's folder, the newest last; [] if ``folder`` does not
    exist.
    """
    if not files.is_folder(folder):
        return []
    found = [(key, folder / name) for name in files.names(folder) if (key := step_of(name)) is not None]
    return [path for _, path in sorted(found)]


def make_run_folder(files: Files, folder: Path) -> None:
    """Creates the folder of a run and its missing parents, with fsync."""
    if files.is_folder(folder):
        return
    make_run_folder(files, folder.parent)
    try:
        files.make_folder(folder)
    except FileExistsError:  # another process was faster, or it is a file, which the next operation reports
        return
    files.sync_folder(folder.parent)


def temporary(folder: Path, step: int, attempt: str) -> Path:
    """Returns the path of the temporary folder for a save of ``step``. ``attempt``: random id of the save."""
    return folder / f"step-{step:08d}.tmp-{attempt}"


def is_step(files: Files, path: Path) -> bool:
    """Returns True if ``path`` is one checkpoint's folder: it has a name such as "step-00000020", or a manifest."""
    return step_of(path.name) is not None or (files.is_folder(path) and NAME in files.names(path))


def steps_of(files: Files, path: Path) -> list[Path]:
    """Returns ``path`` itself if it is a checkpoint's folder, else the checkpoint folders in it; the newest is last."""
    return [path] if is_step(files, path) else committed(files, path)


def read_manifest(files: Files, step: Path) -> Manifest:
    """Reads the manifest of the checkpoint in ``step``, and checks it against the file COMMIT.

    Raises:
        CheckpointError: COMMIT is missing, the manifest differs from the committed one, or its step differs from the
            step in the folder's name.
    """
    text = read_all(files, step, COMMIT, _SMALL)
    commit = Fields(parse(text, str(step / COMMIT)), str(step / COMMIT))
    size, digest = commit.count("manifest_bytes"), commit.text("manifest_sha256")
    if text != _commit_text(size, digest):
        raise CheckpointError(
            f"{step / COMMIT} is damaged: it must contain the length and sha256 of {NAME} and nothing else; "
            f"{COPY_AGAIN}"
        )
    data = read_all(files, step, NAME, min(size, LIMIT))
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(
            f"{step / NAME} is damaged: its length or sha256 differs from that in {COMMIT}; {COPY_AGAIN}"
        )
    fields = Fields(parse(data, str(step / NAME)), str(step / NAME))
    manifest = from_index(fields, partial(read_all, files, step)) if is_indexed(fields) else from_fields(fields)
    named_step = step_of(step.name)
    if named_step is not None and named_step[0] != manifest.step:
        raise CheckpointError(
            f"{step / NAME} is of step {manifest.step}; the folder was renamed, or mixed with another; restore its "
            "name and files."
        )
    return manifest


def write_manifest(files: Files, step: Path, manifest: Manifest, slices: Mapping[str, HashSlice] | None = None) -> None:
    """Writes the files ``manifest.json`` and then ``COMMIT`` into the folder ``step``, each with fsync.

    ``slices``: file name -> position of the file's block hashes in ``checksums.safetensors``. With it, a manifest of
    more than 16,384 pieces is split into several files, which store the positions.
    """
    if slices is not None and sum(len(tensor.pieces) for tensor in manifest.tensors.values()) > WHOLE_PIECES:
        data, parts = to_parts(manifest, slices)
        files.make_folder(step / FOLDER)
        for name, part in parts.items():
            write_new(files, step / name, [memoryview(part)])
    else:
        data = to_json(manifest)
    write_new(files, step / NAME, [memoryview(data)])
    record = _commit_text(len(data), hashlib.sha256(data).hexdigest())
    write_new(files, step / COMMIT, [memoryview(record)])


def commit(files: Files, written: Path, step: int) -> Path:
    """Commits a checkpoint: renames its temporary folder ``written`` to the name of its step, and returns the new path.

    Renames checkpoints of later steps in the same run to "abandoned-...".

    Raises:
        OSError: the folder was not committed.
        CheckpointError: it was committed, but a power failure may still lose the new name.
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
            f"{target} is committed, but a power failure may still lose it ({error.strerror or error}); check the "
            "disk, and save again."
        ) from error
    return target


def point_to(files: Files, step: Path, attempt: str) -> None:
    """Records ``step`` as the run's newest checkpoint, in the file ``latest``. ``attempt``: random id of the save."""
    hint = step.parent / f"latest.tmp-{attempt}"
    write_new(files, hint, [memoryview(dump({"newest": step.name}))])
    files.rename(hint, step.parent / "latest")


def retain(files: Files, folder: Path, keep: int) -> list[Path]:
    """Deletes all but the newest ``keep`` checkpoints of a run; at least one remains. Returns the deleted folders."""
    old = committed(files, folder)[: -max(1, keep)]
    for path in old:
        trash = folder / f".trash-{path.name}"
        files.rename(path, trash)
        files.sync_folder(folder)  # otherwise a power failure may keep the old name and lose the contents
        remove_tree(files, trash)
    return old


def sweep(files: Files, folder: Path) -> None:
    """Deletes the temporary folders that interrupted saves and deletions have left in a run's folder."""
    for name in files.names(folder) if files.is_folder(folder) else ():
        path = folder / name
        if not _LEFTOVER.fullmatch(name):
            continue
        if files.is_link(path) or not files.is_folder(path):
            files.unlink(path)
            continue
        with files.locked(path) as free:  # locked while another engine saves there
            if free:
                remove_tree(files, path)


def _commit_text(size: int, digest: str) -> bytes:
    return dump({"manifest_bytes": size, "manifest_sha256": digest})


LOCK = ".trine.lock"
"""Name of the lock file in the folder of a run."""


class FolderLocks:
    """Locks of one engine on run folders, so that no other engine, in this or another process, saves there."""

    def __init__(self) -> None:
        self._held: dict[Path, int | None] = {}
        """Open lock file of each folder; None if the file system has no locks."""
        self._closed = False

    def hold(self, folder: Path, early: bool = False) -> None:
        """Locks the existing folder ``folder`` until ``close``. A second call for the same folder does nothing, unless
        the folder was deleted and created again.

        ``early``: True before the first save. The folder then stays unlocked, without an error, if another engine in
        this process has the lock, because that engine may be about to close.

        Raises:
            CheckpointError: another engine has the lock (with ``early``: in another process); the message names its
                process and machine.
        """
        if self._closed:
            raise CheckpointError(
                f"{folder} cannot be locked after close(), which ends the engine; build a new engine with "
                "engine.initialize."
            )
        if not self._held:
            self._forget_in_children()
        file = self._held.get(folder)
        if file is not None:
            if _is_same(file, folder):
                return
            self._held.pop(folder)
            os.close(file)
        try:
            self._held[folder] = _locked(folder)
        except _HeldHereError:
            if not early:
                raise
        except OSError as error:
            if folder not in self._held:
                logger.warning(
                    "checkpoint: %s cannot be locked (%s); make sure that no other engine saves there",
                    folder,
                    error.strerror or error,
                )
            self._held[folder] = None

    def close(self) -> None:
        """Unlocks all folders. A second call does nothing."""
        self._closed = True
        while self._held:
            _, file = self._held.popitem()
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have the file open
                os.close(file)

    def _forget_in_children(self) -> None:
        """Makes forked children close their copies: a data loader's workers must not keep a killed run's lock."""
        this = weakref.ref(self)

        def forget() -> None:
            locks = this()
            while locks is not None and locks._held:
                _, file = locks._held.popitem()
                if file is not None:
                    os.close(file)

        os.register_at_fork(after_in_child=forget)


class _HeldHereError(CheckpointError):
    """Another engine of this process has the lock."""


def _locked(folder: Path) -> int:
    """Opens and locks the lock file of a folder, and writes its holder into it.

    Raises:
        CheckpointError: another engine has the lock.
        OSError: the file cannot be written, or the file system has no locks.
    """
    while True:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(file, folder):
                _write_holder(file)
                return file
        except BlockingIOError as error:
            here, holder = _holder(file)
            os.close(file)
            raise (_HeldHereError if here else CheckpointError)(
                f"{folder}: {holder} saves its checkpoints there, and a second engine would set them aside; end that "
                "engine first, or name another folder."
            ) from error
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the folder was replaced between the two calls


def _is_same(file: int, folder: Path) -> bool:
    try:
        there = os.stat(folder / LOCK, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(file), there)


def _write_holder(file: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)


def _holder(file: int) -> tuple[bool, str]:
    """Returns whether the lock's engine is in this process, and words for it."""
    try:
        found = json.loads(os.pread(file, 1 << 12, 0))
        host, pid, since = found["host"], int(found["pid"]), found["since"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False, "another engine"
    here = (host, pid) == (socket.gethostname(), os.getpid())
    process = "this process" if here else f"process {pid} on {host!r:.80}"
    return here, f"another engine ({process}, since {since!r:.40})"
