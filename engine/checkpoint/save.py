"""Collective phases of a save, which run in a background thread, over the host group.

    rank 0     create a folder for this attempt                 announced
    all        send weights to their owners
               hash, write and fsync this rank's files
               report them to rank 0                            collected
    rank 0     check that every tensor is covered once; manifest, COMMIT, rename, retention
               announce success or failure                      announced

A failure on any rank raises the same sentence on all ranks, and older checkpoints are unchanged.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.contents.local_tensors import ModelTensor, SaveOwnership
from engine.checkpoint.contents.optimizer_state import arranged, merge_numbers
from engine.checkpoint.contents.snapshot import Contents, Ours, Snapshot, Snapshots
from engine.checkpoint.format.checked_blocks import Hashes, hash_blocks, hash_slices
from engine.checkpoint.format.filesystem import PAGE, Files, remove_tree, write_new
from engine.checkpoint.format.host_image import HostImage, write_file
from engine.checkpoint.format.manifest import (
    CHECKSUMS,
    Manifest,
    StoredPiece,
    StoredTensor,
    check_cover,
    hashes_file,
    piece_from_json,
    piece_to_json,
)
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import INDEX, SINGLE, TensorKind, read_kind, repack
from engine.checkpoint.format.step_folders import (
    commit,
    make_run_folder,
    point_to,
    retain,
    sweep,
    temporary,
    write_manifest,
)
from engine.checkpoint.format.strict_json import Fields, dump, parse
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.host_group import HostGroup, announce, collect, noting


@dataclass(slots=True)
class Report:
    """Message to rank 0 about the files that a rank has written in a save: sizes, hashes and pieces of tensors."""

    files: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, Hashes] = field(default_factory=dict)
    pieces: dict[str, list[Any]] = field(default_factory=dict)
    """JSON of the pieces that this rank has written, by tensor."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Scalars of optimizer state, by parameter."""
    tracked: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the state of each registered object, which must be equal on all ranks."""
    folder: str = ""
    """Temporary folder of the save on this rank."""

    def file(self, name: str, size: int, hashes: Hashes) -> None:
        """Adds a written file to the report, with its size in bytes and the hashes of its blocks."""
        self.files[name] = size
        self.hashes[name] = hashes

    def piece(self, tensor: str, kind: TensorKind, stored: StoredPiece) -> None:
        """Adds a written piece of a tensor to the report. ``kind``: dtype and full shape of the tensor."""
        entry = {"dtype": kind.dtype, "shape": list(kind.shape), **piece_to_json(stored, stored.file)}
        self.pieces.setdefault(tensor, []).append(entry)

    def to_json(self) -> bytes:
        """Returns the report as JSON bytes."""
        hashes = {name: value.tobytes().hex() for name, value in self.hashes.items()}
        numbers, tracked = dict(self.numbers), dict(self.tracked)
        return dump({
            "files": self.files, "hashes": hashes, "pieces": self.pieces, "numbers": numbers, "tracked": tracked,
            "folder": self.folder,
        })  # fmt: skip


def digests(tracked: Mapping[str, Any]) -> dict[str, str]:
    """Returns the hex sha256 of the JSON state of each object registered for checkpointing, by name."""
    return {name: hashlib.sha256(dump({"state": state})).hexdigest() for name, state in tracked.items()}


def failure(problem: str) -> bytes:
    """Returns, as JSON bytes, the report that this rank could not write its files because of ``problem``."""
    return dump({"problem": problem})


def merge(reports: Iterable[bytes]) -> tuple[Report, dict[str, StoredTensor]]:
    """Merges the reports of all ranks, in rank order. Returns the merged report, and all tensors with their written
    pieces.

    Raises:
        CheckpointError: a rank has failed; ranks differ in the save folder, in optimizer scalars or in the state of a
            registered object (such as a sampler); an element of a tensor was not written exactly once.
    """
    merged, numbers = Report(), []
    kinds: dict[str, TensorKind] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    for rank, data in enumerate(reports):
        fields = Fields(parse(data, f"the report of rank {rank}"), f"the report of rank {rank}")
        if fields.any("problem") is not None:
            raise CheckpointError(f"not saved: {fields.text('problem')}")
        _check_folder(rank, fields.text("folder"), merged)
        numbers.append(fields.object("numbers"))
        _check_tracked(rank, fields.object("tracked"), merged)
        for name, text in fields.object("hashes").items():
            merged.file(name, fields.object("files")[name], np.frombuffer(bytes.fromhex(text), dtype="<u8"))
        for name, entries in fields.object("pieces").items():
            kinds[name] = read_kind(Fields(entries[0], name))
            pieces.setdefault(name, []).extend(_pieces(entries, kinds[name], name))
    for name, found in pieces.items():
        check_cover(f"not saved: {name}", kinds[name].shape, found)
    merged.numbers = merge_numbers(numbers)
    return merged, {name: StoredTensor(kinds[name], tuple(found)) for name, found in pieces.items()}


def _check_folder(rank: int, folder: str, merged: Report) -> None:
    if rank == 0:
        merged.folder = folder
    if folder != merged.folder:
        raise CheckpointError(
            f"not saved: rank {rank} was to save into {folder!r} and rank 0 into {merged.folder!r}, but all ranks "
            "write one checkpoint; pass the same folder on every rank."
        )


def _check_tracked(rank: int, tracked: Mapping[str, str], merged: Report) -> None:
    if rank == 0:
        merged.tracked = tracked
    for name in sorted({*tracked, *merged.tracked}):
        if tracked.get(name) != merged.tracked.get(name):
            raise CheckpointError(
                f"not saved: the state of {name!r} differs between rank {rank} and rank 0, but one state is stored for "
                "all ranks; register objects with the same state on every rank, such as engine.data.Sampler."
            )


def _pieces(entries: Sequence[Any], kind: TensorKind, name: str) -> list[StoredPiece]:
    return [piece_from_json(entry, kind.shape, entry["file"], name) for entry in entries]


_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


RankReports = Callable[[], list[bytes]]
"""Function that collects the reports of all ranks on rank 0."""


class Saver:
    """Writer of one engine's checkpoints, one save at a time.

    Args:
        ownership: assignment of elements to the ranks that save them.
        tensors: tensors of a checkpoint's folder ``model/``, the same on all ranks.
        host: process group of CPU tensors for all messages of a save.
        lock: callback that locks the folder of a run on rank 0, or raises.
    """

    def __init__(
        self,
        ownership: SaveOwnership,
        tensors: tuple[ModelTensor, ...],
        host: HostGroup,
        files: Files,
        lock: Callable[[Path], None],
    ) -> None:
        self.tensors, self._files, self._lock = tensors, files, lock
        self.host = host
        """Group of the next save."""
        self._snapshots = Snapshots(ownership, tensors, host.rank)
        self._whole = False
        """True: the manifest is one file of any length, because hosts store all of a checkpoint in memory."""
        self._held = ExitStack()
        """Lock on the folder of the pending save; rank 0 only."""

    def elsewhere(self, files: Files) -> "Saver":
        """Returns a second saver that writes this saver's snapshots with ``files`` (for example into host memory), and
        takes no locks.
        """
        other = copy(self)
        other._files, other._lock, other._held, other._whole = files, lambda folder: None, ExitStack(), True
        return other

    def snapshot(self, ours: Ours, contents: Contents) -> Snapshot:
        """Copies into host memory all state that training will change, and returns the copy.

        The next call reuses the memory, which makes the earlier snapshot invalid.
        """
        return self._snapshots.take(ours, contents)

    def run(self, snapshot: Snapshot | Exception, folder: Path, keep: int | None) -> Path:
        """Writes the snapshots of all ranks as one checkpoint into a run's folder, and commits it. Collective over the
        host group.

        Returns the checkpoint's folder.

        Args:
            snapshot: this rank's snapshot, or the error that prevented it; then no rank writes.
            keep: number of checkpoints that remain in ``folder``; None: all.

        Raises:
            CheckpointError: a rank has failed; names the rank, the path and the bytes to write. All ranks raise the
                same error.
            EngineError: a rank can no longer be reached.
        """
        snapshot, written = self._begin(snapshot, folder, swept=True)
        contents, report = snapshot.contents, self._report(snapshot, written)
        verdict = self._on_first(report, lambda reports: self._commit(contents, written, reports, keep))
        return Path(verdict.text("folder"))

    def export(self, snapshot: Snapshot | Exception, folder: Path, shard_bytes: int | None = None) -> None:
        """Writes the weights into ``folder`` in Hugging Face's format, replacing the model there. Collective over the
        host group.

        ``shard_bytes``: largest size of a file with several tensors, in bytes; rank 0 then writes all files. None: one
        file for each rank.

        Raises:
            CheckpointError, EngineError: a rank has failed or cannot be reached; the folder is then unchanged.
        """
        snapshot, written = self._begin(snapshot, folder, swept=False)
        self._on_first(
            self._report(snapshot, written), lambda reports: self._move(written, folder, reports, shard_bytes)
        )

    def _move(self, written: Path, folder: Path, reports: RankReports, shard_bytes: int | None) -> Mapping[str, Any]:
        try:
            merge(reports())
            if shard_bytes is not None:
                self._repack(written, shard_bytes)
            make_run_folder(self._files, folder)
            self._files.sync_folder(written / "model")
            new = self._files.names(written / "model")
            for name in sorted(new, key=lambda name: name == INDEX):  # the index last, because it names the others
                self._files.rename(written / "model" / name, folder / name)
            for name in self._files.names(folder):
                if name not in new and (name in (SINGLE, INDEX) or _SHARD.fullmatch(name)):
                    self._files.unlink(folder / name)  # a shard of an older model, absent from the new index
            self._files.sync_folder(folder)
        finally:
            self._discard(written)
        return {}

    def _repack(self, written: Path, shard_bytes: int) -> None:
        """Replaces the files of all ranks by files of a set size."""
        model, packed = written / "model", written / "optim"  # empty in an export
        repack(
            self._files, model, packed, [part.key for tensor in self.tensors for part in tensor.entries], shard_bytes
        )
        for name in self._files.names(model):
            if name == INDEX or name.endswith(".safetensors"):
                self._files.unlink(model / name)
        for name in self._files.names(packed):
            self._files.rename(packed / name, model / name)

    def _begin(self, snapshot: Snapshot | Exception, folder: Path, swept: bool) -> tuple[Snapshot, Path]:
        """Creates the folder of this attempt once every rank has a snapshot.

        ``swept``: ``folder`` is a run's; it is locked, and leftovers of interrupted saves are removed. An export writes
        next to its folder and removes nothing there, because another engine may be saving.
        """
        if isinstance(snapshot, Snapshot):
            step, tracked = snapshot.contents.step, snapshot.contents.progress.get("tracked", {})
            ready = Report(tracked=digests(tracked), folder=str(folder)).to_json()
        else:
            step, ready = 0, failure(f"{_described(snapshot)} (on rank {self.host.rank})")
        inside = folder if swept else folder.parent
        opened = self._on_first(ready, lambda reports: self._open(inside, step, swept, reports), last=False)
        assert isinstance(snapshot, Snapshot), "rank 0 has refused a save without a snapshot"
        return snapshot, Path(opened.text("folder"))

    def _on_first(self, report: bytes, action: Callable[[RankReports], Mapping[str, Any]], last: bool = True) -> Fields:
        """Collects all reports on rank 0, which runs ``action``; every rank gets the result or raises its problem.

        ``last``: this exchange ends the save. In an earlier exchange, rank 0 continues if it cannot reach a rank: the
        other ranks have started to write, and the lost one will be missing among their reports.
        """
        message = b""
        if self.host.rank:
            collect(self.host, report)
        else:
            try:
                message = dump(action(lambda: collect(self.host, report) or []))
            except Exception as error:  # any failure: the other ranks wait for an answer
                message = failure(_described(error))
        try:
            message = announce(self.host, message)
        except EngineError:
            if self.host.rank or last:
                raise
        answer = Fields(parse(message, "rank 0's message"), "rank 0's message")
        if answer.any("problem") is not None:
            raise CheckpointError(answer.text("problem"))
        return answer

    def _open(self, folder: Path, step: int, swept: bool, reports: RankReports) -> Mapping[str, Any]:
        merge(reports())
        written = temporary(folder, step, secrets.token_hex(4))
        self._held.close()
        with self._whole_or_gone(written, f"{4 * PAGE:,}"):
            make_run_folder(self._files, folder)
            if swept:
                self._lock(folder)
                sweep(self._files, folder)
            self._files.make_folder(written)
            self._held.enter_context(self._files.locked(written))
            for name in ("model", "optim", "state"):
                self._files.make_folder(written / name)
        return {"folder": str(written)}

    # ------------------------------------------------------------------ every rank

    def _report(self, snapshot: Snapshot, written: Path) -> bytes:
        """Gathers and writes this rank's files; returns the report of the files, or of the failure."""
        try:
            self._gather(snapshot)
            return self._write_files(snapshot, written).to_json()
        except Exception as error:  # any failure: rank 0 waits for a report
            return failure(self._on_this_rank(error, written, snapshot))

    def _gather(self, snapshot: Snapshot) -> None:
        """Sends every owner its weights and assembles the tensors that this rank owns.

        A lost rank is reported at the end, because the other ranks wait until their messages are received.
        """
        snapshots, lost = self._snapshots, list[EngineError]()
        waits = []
        for owner, data in snapshot.outgoing.items():
            with noting(lost):
                waits.append(self.host.send(data, owner))
        for source, size in snapshots.incoming():
            message = snapshots.memory.take("from others", size)[:size]
            with noting(lost):
                self.host.receive(message, source)()
                snapshots.put(snapshot, source, message)
        for wait in waits:
            with noting(lost):
                wait()
        if lost:
            raise lost[0]

    def _write_files(self, snapshot: Snapshot, written: Path) -> Report:
        report, rank = Report(numbers=snapshot.numbers), self.host.rank
        if snapshot.model.layout.places:
            file = self._model_file(rank)
            self._write(written, file, snapshot.model, report)
            for tensor in self._snapshots.owned:
                kind, _ = snapshot.model.layout.places[tensor.key]
                whole = Part(kind.shape)
                for part in replace(tensor, kind=kind).entries:
                    piece = Piece(whole, part.start, part.start + part.elements)
                    report.piece(tensor.name, kind, StoredPiece(file, part.key, piece))
        if snapshot.optim.layout.places:
            file = f"optim/optim-{rank:05d}.safetensors"
            self._write(written, file, snapshot.optim, report)
            for name, (kind, piece) in snapshot.pieces.items():
                report.piece(name, kind, StoredPiece(file, name, piece))
        if snapshot.state.layout.places:
            self._write(written, f"state/rank-{rank:05d}.safetensors", snapshot.state, report)
        if rank == 0:
            index = {
                "metadata": {"total_size": sum(tensor.kind.bytes for tensor in self.tensors)},
                "weight_map": {
                    part.key: self._model_file(tensor.owner).removeprefix("model/")
                    for tensor in self.tensors
                    for part in tensor.entries
                },
            }
            for name, data in {**snapshot.contents.model_files, INDEX: dump(index)}.items():
                size = write_new(self._files, written / "model" / name, [memoryview(data)])
                report.file(f"model/{name}", size, hash_blocks(memoryview(data)))
        return report

    def _model_file(self, owner: int) -> str:
        writers = self._snapshots.writers
        return f"model/model-{writers.index(owner) + 1:05d}-of-{len(writers):05d}.safetensors"

    def _write(self, written: Path, file: str, image: HostImage, report: Report) -> None:
        hashes = write_file(self._files, written / file, image.memory, image.layout.size)
        report.file(file, image.layout.size, hashes)

    def _on_this_rank(self, error: Exception, written: Path, snapshot: Snapshot) -> str:
        if isinstance(error, EngineError):
            return str(error)
        if not isinstance(error, OSError):
            return f"{_described(error)} on rank {self.host.rank}"
        return self._on_disk(error, written, f"{sum(image.layout.size for image in snapshot.images):,}")

    def _on_disk(self, error: OSError, written: Path, needed: str) -> str:
        try:
            free = f"{self._files.free_bytes(written.parent):,} are free there"
        except OSError:
            free = "the number of free bytes there is unknown"
        return f"{_described(error)} on rank {self.host.rank}, which has {needed} bytes to write; {free}."

    # ------------------------------------------------------------------ rank 0

    def _commit(self, contents: Contents, written: Path, reports: RankReports, keep: int | None) -> Mapping[str, Any]:
        with self._whole_or_gone(written, "all"):
            received = reports()
        with self._whole_or_gone(written, f"about {sum(map(len, received)):,}"):
            merged, tensors = merge(received)
            tensors, numbers = arranged(tensors, contents.optimizer.get("groups", ()), merged.numbers)
            hashes, checksum = hashes_file(merged.hashes)
            write_new(self._files, written / CHECKSUMS, [memoryview(hashes)])
            attempt = written.name.rpartition("-")[2]
            manifest = Manifest(
                step=contents.step,
                attempt=attempt,
                tensors=tensors,
                files=merged.files,
                checksum=checksum,
                aliases=contents.aliases,
                info=contents.info,
                progress=contents.progress,
                optimizer={**contents.optimizer, **numbers},
                user=contents.user,
            )
            slices = None if self._whole else hash_slices(merged.hashes)
            write_manifest(self._files, written, manifest, slices)
            step = commit(self._files, written, contents.step)
        self._held.close()
        self._tidy(step, attempt, keep)
        return {"folder": str(step)}

    def _tidy(self, step: Path, attempt: str, keep: int | None) -> None:
        """Updates ``latest`` and applies retention; the checkpoint is committed and stays even if this fails."""
        try:
            point_to(self._files, step, attempt)
            if keep is not None:
                retain(self._files, step.parent, keep)
        except OSError as error:
            raise CheckpointError(
                f"{step} is committed, but old checkpoints could not be removed: {_described(error)}; remove them by "
                "hand, and check the disk."
            ) from error

    @contextmanager
    def _whole_or_gone(self, written: Path, needed: str) -> Iterator[None]:
        """Removes the unfinished folder if the block fails; an OSError also states the free space."""
        try:
            yield
        except OSError as error:
            problem = self._on_disk(error, written, needed)  # free space is read before the removal adds to it
            self._discard(written)
            raise CheckpointError(problem) from error
        except BaseException:
            self._discard(written)
            raise

    def _discard(self, written: Path) -> None:
        """Removes an unfinished folder; the next save sweeps any rest of it."""
        self._held.close()
        try:
            if self._files.is_folder(written):
                remove_tree(self._files, written)
        except OSError:
            pass


def _described(error: Exception) -> str:
    """Returns the error with its path."""
    if isinstance(error, EngineError):
        return str(error)
    if not isinstance(error, OSError):
        return f"{type(error).__name__}, {error}"
    return f"{error.strerror or error}: {error.filename or 'a file of the checkpoint'}"
