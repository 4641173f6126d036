"""The half of a save that runs in the background.

    rank 0     a folder of its own for this attempt                 announced
    all        weights -> their owners
               my files: hashed, written, forced to the disk
               what I wrote -> rank 0                               collected
    rank 0     every tensor covered once? manifest, COMMIT, rename, retention
               the verdict                                          announced

All messages pass the host group. Whatever fails on whichever rank fails the save on all, by the same sentence, and
takes nothing from older checkpoints.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.contents.ownership import ModelTensor, SaveOwnership
from engine.checkpoint.contents.snapshot import Contents, Ours, Snapshot, Snapshots
from engine.checkpoint.format.checked_blocks import BLOCK, DEFAULT_ALGORITHM
from engine.checkpoint.format.filesystem import PAGE, Files, remove_tree
from engine.checkpoint.format.host_image import HostImage, write_file
from engine.checkpoint.format.manifest import CHECKSUMS, Checksum, Manifest, StoredPiece
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.safetensors_file import TensorKind, lay_out
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
from engine.checkpoint.huggingface import INDEX, SINGLE
from engine.checkpoint.rank_report import Report, digests, failure, merge
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.host_group import HostGroup, announce, collect

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


RankReports = Callable[[], list[bytes]]
"""Gets the reports of all ranks, on rank 0."""


class Saver:
    """The saves of one engine, one at a time.

    Args:
        shares: who stores what.
        tensors: the model folder, the same on all ranks.
        host: takes weights to their owners, and the verdict to all.
    """

    def __init__(self, shares: SaveOwnership, tensors: tuple[ModelTensor, ...], host: HostGroup, files: Files) -> None:
        self._tensors, self._host, self._files = tensors, host, files
        self._snapshots = Snapshots(shares, tensors, host.rank)
        self._held = ExitStack()
        """The folder of the save under way, locked, on rank 0."""

    def snapshot(self, ours: Ours, contents: Contents) -> Snapshot:
        """Copy everything that training will change; the next snapshot takes the same memory."""
        return self._snapshots.take(ours, contents)

    def run(self, snapshot: Snapshot | Exception, folder: Path, keep: int | None) -> Path:
        """Write and commit a snapshot; returns the checkpoint's folder. All ranks run it, for the same step.

        Args:
            snapshot: or why this rank could take none; then no rank writes.
            keep: how many checkpoints stay in ``folder``; None: all.

        Raises:
            CheckpointError: what failed, on which rank, with path and bytes; the same on every rank.
            EngineError: a rank that cannot be reached any more.
        """
        snapshot, written = self._begin(snapshot, folder, swept=True)
        contents, report = snapshot.contents, self._report(snapshot, written)
        verdict = self._on_first(report, lambda reports: self._commit(contents, written, reports, keep))
        return Path(verdict.text("folder"))

    def export(self, snapshot: Snapshot | Exception, folder: Path) -> None:
        """Write the model folder alone; files of that name there are replaced. All ranks run it.

        Raises:
            CheckpointError, EngineError: as ``run``; then the folder is as it was.
        """
        snapshot, written = self._begin(snapshot, folder.parent, swept=False)
        self._on_first(self._report(snapshot, written), lambda reports: self._move(written, folder, reports))

    def _move(self, written: Path, folder: Path, reports: RankReports) -> Mapping[str, Any]:
        try:
            merge(reports())
            make_run_folder(self._files, folder)
            self._files.sync_folder(written / "model")
            new = self._files.names(written / "model")
            for name in sorted(new, key=lambda name: name == INDEX):  # the index last: it names the others
                self._files.rename(written / "model" / name, folder / name)
            for name in self._files.names(folder):
                if name not in new and (name == SINGLE or _SHARD.fullmatch(name)):
                    self._files.unlink(folder / name)  # of an older model, which the index does not know
            self._files.sync_folder(folder)
        finally:
            self._discard(written)
        return {}

    def _begin(self, snapshot: Snapshot | Exception, folder: Path, swept: bool) -> tuple[Snapshot, Path]:
        """All ranks have a snapshot: a folder for this attempt.

        ``swept``: ``folder`` is the run's own; beside an export somebody else may be saving.
        """
        if isinstance(snapshot, Snapshot):
            step, tracked = snapshot.contents.step, snapshot.contents.progress.get("tracked", {})
            ready = Report(tracked=digests(tracked)).to_json()
        else:
            step, ready = 0, failure(f"{_described(snapshot)} (on rank {self._host.rank})")
        opened = self._on_first(ready, lambda reports: self._open(folder, step, swept, reports), last=False)
        assert isinstance(snapshot, Snapshot), "rank 0 has refused what is none"
        return snapshot, Path(opened.text("folder"))

    def _on_first(self, report: bytes, action: Callable[[RankReports], Mapping[str, Any]], last: bool = True) -> Fields:
        """Rank 0 gets all reports and acts; all ranks get what came of it, or raise its problem.

        ``last``: this ends the save. Before, a rank that cannot be told does not keep rank 0 from hearing the others,
        who have begun to write; it is missed among them.
        """
        message = b""
        if self._host.rank:
            collect(self._host, report)
        else:
            try:
                message = dump(action(lambda: collect(self._host, report) or []))
            except Exception as error:  # whatever it is, the others wait for an answer
                message = failure(_described(error))
        try:
            message = announce(self._host, message)
        except EngineError:
            if self._host.rank or last:
                raise
        answer = Fields(parse(message, "rank 0's message"), "rank 0's message")
        if answer.any("problem") is not None:
            raise CheckpointError(answer.text("problem"))
        return answer

    def _open(self, folder: Path, step: int, swept: bool, reports: RankReports) -> Mapping[str, Any]:
        merge(reports())
        written = temporary(folder, step, secrets.token_hex(4))
        self._held.close()
        with self._whole_or_gone(written, str(4 * PAGE)):
            make_run_folder(self._files, folder)
            if swept:
                sweep(self._files, folder)
            self._files.make_folder(written)
            self._held.enter_context(self._files.locked(written))
            for name in ("model", "optim", "state"):
                self._files.make_folder(written / name)
        return {"folder": str(written)}

    # ------------------------------------------------------------------ every rank

    def _report(self, snapshot: Snapshot, written: Path) -> bytes:
        """Gather and write this rank's files; says what was written, or what was the problem."""
        try:
            self._gather(snapshot)
            return self._write_files(snapshot, written).to_json()
        except Exception as error:  # whatever it is, rank 0 waits for a report
            return failure(self._on_this_rank(error, written, snapshot))

    def _gather(self, snapshot: Snapshot) -> None:
        """Send every owner its weights, and put those together that this rank owns.

        A rank that is lost is told at the end: the others wait until what they have sent is taken.
        """
        snapshots, lost = self._snapshots, list[EngineError]()
        waits = []
        for owner, data in snapshot.outgoing.items():
            with _noting(lost):
                waits.append(self._host.send(data, owner))
        for source, size in snapshots.incoming():
            message = snapshots.memory.take("from others", size)[:size]
            with _noting(lost):
                self._host.receive(message, source)()
                snapshots.put(snapshot, source, message)
        for wait in waits:
            with _noting(lost):
                wait()
        if lost:
            raise lost[0]

    def _write_files(self, snapshot: Snapshot, written: Path) -> Report:
        report, rank = Report(numbers=snapshot.numbers), self._host.rank
        if snapshot.model.layout.places:
            file = self._model_file(rank)
            self._write(written, file, snapshot.model, report)
            for tensor in self._snapshots.owned:
                kind, _ = snapshot.model.layout.places[tensor.key]
                report.piece(tensor.name, kind, StoredPiece(file, tensor.key, Part(kind.shape).whole()))
        if snapshot.optim.layout.places:
            file = f"optim/optim-{rank:05d}.safetensors"
            self._write(written, file, snapshot.optim, report)
            for name, (kind, piece) in snapshot.pieces.items():
                report.piece(name, kind, StoredPiece(file, name, piece))
        if snapshot.state.layout.places:
            self._write(written, f"state/rank-{rank:05d}.safetensors", snapshot.state, report)
        if rank == 0:
            index = {
                "metadata": {"total_size": sum(tensor.kind.bytes for tensor in self._tensors)},
                "weight_map": {t.key: self._model_file(t.owner).removeprefix("model/") for t in self._tensors},
            }
            for name, data in {**snapshot.contents.model_files, INDEX: dump(index)}.items():
                self._write_bytes(written, f"model/{name}", data, report)
        return report

    def _model_file(self, owner: int) -> str:
        writers = self._snapshots.writers
        return f"model/model-{writers.index(owner) + 1:05d}-of-{len(writers):05d}.safetensors"

    def _write(self, written: Path, file: str, image: HostImage, report: Report) -> None:
        hashes = write_file(self._files, written / file, image.memory, image.layout.size)
        report.file(file, image.layout.size, hashes)

    def _write_bytes(self, written: Path, file: str, data: bytes | bytearray, report: Report) -> None:
        memory = self._snapshots.memory.take("small", len(data))
        memory[: len(data)] = data
        memory[len(data) : -(-len(data) // PAGE) * PAGE] = bytes(-len(data) % PAGE)
        report.file(file, len(data), write_file(self._files, written / file, memory, len(data)))

    def _on_this_rank(self, error: Exception, written: Path, snapshot: Snapshot) -> str:
        if isinstance(error, EngineError):
            return str(error)
        if not isinstance(error, OSError):
            return f"{_described(error)} on rank {self._host.rank}"
        return self._on_disk(error, written, str(sum(image.layout.size for image in snapshot.images)))

    def _on_disk(self, error: OSError, written: Path, needed: str) -> str:
        try:
            free = f"{self._files.free_bytes(written.parent)} are free there"
        except OSError:
            free = "how many are free there is unknown"
        return f"{_described(error)} on rank {self._host.rank}, which has {needed} bytes to write; {free}."

    # ------------------------------------------------------------------ rank 0

    def _commit(self, contents: Contents, written: Path, reports: RankReports, keep: int | None) -> Mapping[str, Any]:
        with self._whole_or_gone(written, "all"):
            received = reports()
        with self._whole_or_gone(written, f"about {sum(map(len, received))}"):
            merged, tensors = merge(received)
            checksum = self._write_checksums(written, merged)
            attempt = written.name.rpartition("-")[2]
            manifest = Manifest(
                contents.step, attempt, tensors, merged.files, checksum, contents.aliases, contents.info,
                contents.progress, {**contents.optimizer, "numbers": merged.numbers}, contents.user,
            )  # fmt: skip
            write_manifest(self._files, written, manifest)
            step = commit(self._files, written, contents.step)
        self._held.close()
        self._tidy(step, attempt, keep)
        return {"folder": str(step)}

    def _write_checksums(self, written: Path, merged: Report) -> Checksum:
        layout = lay_out({name: TensorKind("U64", (len(hashes),)) for name, hashes in merged.hashes.items()})
        data = bytearray(layout.size)
        data[: len(layout.header)] = layout.header
        for name, (kind, start) in layout.places.items():
            data[start : start + kind.bytes] = merged.hashes[name].tobytes()
        self._write_bytes(written, CHECKSUMS, data, Report())
        return Checksum(DEFAULT_ALGORITHM, BLOCK, hashlib.sha256(data).hexdigest(), len(data))

    def _tidy(self, step: Path, attempt: str, keep: int | None) -> None:
        """The checkpoint is there; what fails from here on takes nothing from it."""
        try:
            point_to(self._files, step, attempt)
            if keep is not None:
                retain(self._files, step.parent, keep)
        except OSError as error:
            raise CheckpointError(f"{step} is committed, but cleaning up failed: {_described(error)}") from error

    @contextmanager
    def _whole_or_gone(self, written: Path, needed: str) -> Iterator[None]:
        """Make room when something fails, and say how much there is."""
        try:
            yield
        except OSError as error:
            problem = self._on_disk(error, written, needed)  # how much is free, before there is more
            self._discard(written)
            raise CheckpointError(problem) from error
        except BaseException:
            self._discard(written)
            raise

    def _discard(self, written: Path) -> None:
        """Make room; what cannot be removed is swept by the next save."""
        self._held.close()
        try:
            if self._files.is_folder(written):
                remove_tree(self._files, written)
        except OSError:
            pass


@contextmanager
def _noting(problems: list[EngineError]) -> Iterator[None]:
    """Go on after a problem."""
    try:
        yield
    except EngineError as error:
        problems.append(error)


def _described(error: Exception) -> str:
    """What happened, and to which path."""
    if isinstance(error, EngineError):
        return str(error)
    if not isinstance(error, OSError):
        return f"{type(error).__name__}, {error}"
    return f"{error.strerror or error}: {error.filename or 'a file of the checkpoint'}"
