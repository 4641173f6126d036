"""Checkpoints in the memory of hosts: for the loss of one host, every few steps, in addition to checkpoints on disk.

    host 0  /dev/shm   files of its ranks   copies of host 1's        every rank sends its files to one rank
    host 1  /dev/shm   files of its ranks   copies of host 2's        of the next host
    host 2  /dev/shm   files of its ranks   copies of host 0's

The idea is from Gemini (Wang et al., SOSP 2023): processes end more often than hosts, and hosts one at a time.

save   every ``checkpoint.memory_every`` steps, in the background
find   at a start: the newest one with every file on some host, if it is newer than the newest on disk
"""

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.manifest import CHECKSUMS, COMMIT, NAME
from engine.checkpoint.format.step_folders import committed, read_manifest
from engine.checkpoint.format.strict_json import dump, parse
from engine.checkpoint.memory.memory_folder import (
    FileServer,
    Holder,
    MemoryFiles,
    MemoryFolder,
    RemoteFiles,
    memory_folder,
    run_token,
)
from engine.checkpoint.memory.mirror import SHARED, HostMap, Mirror, find_hosts, memory_identity
from engine.errors import EngineError
from engine.parallel.comm.agreement import raise_together
from engine.parallel.comm.host_group import HostGroup, announce, collect
from engine.parallel.comm.launcher import own_address

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """Checkpoint in the memory of the hosts, opened for reading."""

    folder: Path
    """Name of its folder; absent on a host without any of its files."""
    number: int
    files: RemoteFiles


@dataclass(frozen=True, slots=True)
class _Offer:
    """Files of one checkpoint on one host."""

    step: int
    attempt: str
    folder: str
    needed: Mapping[str, int]
    """Bytes of all files of the checkpoint."""
    held: Sequence[str]
    """Files that are complete on this host."""


class MemoryCheckpoints:
    """Checkpoints in memory: saves and finds them. ``save`` and ``find`` are collective over the host group.

    Args:
        run_folder: the folder of the run's checkpoints on disk.
        shared: a folder in the memory of a host.
    """

    def __init__(self, run_folder: Path, files: Files, shared: Path = SHARED) -> None:
        self._run_folder, self._disk, self._shared = run_folder, files, shared
        self._folder: MemoryFolder | None = None
        self._named = shared
        """``shared`` of rank 0."""
        self._hosts = HostMap(((0,),))
        self._rank = 0
        self._server: FileServer | None = None
        self._found: MemoryStep | None = None
        self._saved = False

    def save(self, host: HostGroup, write: Callable[[Files, Path], Path]) -> Path:
        """Saves into the memory of this host and of the next one; returns the folder of rank 0's host.

        Args:
            write: saves with these files into this folder, and returns the folder that rank 0 has committed.

        Raises:
            CheckpointError, EngineError: as ``write``; the older copy is still complete.
        """
        folder = self._open(host)
        files = MemoryFiles(self._named, self._shared)
        step = write(files, self._named / folder.root.name)
        Mirror(host, self._hosts, folder, files).spread(step)
        if not self._saved and self._rank == 0:
            hosts = len(self._hosts.hosts)
            logger.info(
                "checkpoint: step %s and later ones are copied into the memory of %d host(s), under %s%s",
                step.name.removeprefix("step-"), hosts, folder.root,
                "" if hosts > 1 else "; there is only one host, and its loss loses them",
            )  # fmt: skip
        self._saved = True
        return step

    def find(self, host: HostGroup, beyond: int) -> MemoryStep | None:
        """Returns the newest checkpoint after step ``beyond`` with every file on some host, opened; None without one.

        Raises:
            CheckpointError: a host cannot answer; equal on all ranks.
        """
        folder = self._open(host)
        ours = list(_offers(folder.root))
        told = collect(host, dump({"offers": [asdict(offer) for offer in ours] if self._acts else []}))
        message = b""
        if told is not None:
            offers = [_Offer(**given) for text in told for given in parse(text, "a rank's offers")["offers"]]
            chosen = newest_whole(offers, beyond)
            message = dump({"chosen": None if chosen is None else asdict(chosen), "secret": secrets.token_hex(16)})
        answer = parse(announce(host, message), "rank 0's message")
        if answer["chosen"] is None:
            return None
        return self._reach(host, _Offer(**answer["chosen"]), ours, answer["secret"])

    def close(self) -> None:
        """Stops answering other hosts. All ranks have read their data by then."""
        if self._found is not None:
            self._found.files.hang_up()
        if self._server is not None:
            self._server.close()
        self._found = self._server = None

    def remove(self) -> None:
        """Frees the memory after a run that has ended well. Communicates nothing."""
        self.close()
        if self._folder is not None and self._acts:
            self._folder.remove()

    @property
    def _acts(self) -> bool:
        return self._hosts.is_first(self._rank)

    def _open(self, host: HostGroup) -> MemoryFolder:
        """Finds the folder of this run and the ranks that share it, once."""
        if self._folder is not None:
            return self._folder
        self._rank, token = host.rank, ""
        with raise_together(host, _described):
            identity = memory_identity(self._shared)
            if self._rank == 0:
                token = run_token(self._disk, self._run_folder)
        told = parse(announce(host, dump({"token": token, "shared": str(self._shared)})), "rank 0's message")
        self._named = Path(told["shared"])
        self._hosts = find_hosts(host, identity)
        folder = memory_folder(self._shared, self._run_folder, told["token"])
        with raise_together(host, _described):
            if self._acts:
                folder.claim()
        self._folder = folder
        return folder

    def _reach(self, host: HostGroup, chosen: _Offer, ours: Iterable[_Offer], secret: str) -> MemoryStep:
        """Starts a server on every host with a part, and announces its address to all ranks."""
        assert self._folder is not None, "it was opened"
        same = [offer for offer in ours if (offer.step, offer.attempt) == (chosen.step, chosen.attempt)]
        here = self._folder.root / (same[0].folder if same else chosen.folder)
        entry: dict[str, Any] = {}
        with raise_together(host, _described):
            if same and self._acts:
                self._server = FileServer(own_address(), secret, here, same[0].held)
                entry = {
                    "address": own_address(), "port": self._server.port, "name": socket.gethostname(),
                    "held": same[0].held,
                }  # fmt: skip
        reports = collect(host, dump(entry))
        message = dump({"hosts": [parse(report, "a rank's address") for report in reports or ()]})
        held: dict[str, list[Holder]] = {}
        for given in parse(announce(host, message), "rank 0's message")["hosts"]:
            for name in given.get("held", ()):
                held.setdefault(name, []).append(Holder(given["address"], given["port"], given["name"]))
        files = RemoteFiles(here, held, chosen.needed, secret)
        self._found = MemoryStep(self._folder.root / chosen.folder, chosen.step, files)
        return self._found


def newest_whole(offers: Iterable[_Offer], beyond: int) -> _Offer | None:
    """Returns the newest checkpoint after step ``beyond`` with all files on some host."""
    held: dict[tuple[int, str], set[str]] = {}
    found: dict[tuple[int, str], _Offer] = {}
    for offer in offers:
        held.setdefault((offer.step, offer.attempt), set()).update(offer.held)
        found.setdefault((offer.step, offer.attempt), offer)
    whole = [offer for key, offer in found.items() if offer.step > beyond and held[key] >= offer.needed.keys()]
    return max(whole, key=lambda offer: offer.step, default=None)


def _offers(root: Path) -> Iterable[_Offer]:
    """Yields the committed checkpoints in the memory of this host; logs and skips unreadable ones."""
    files = Files()
    for step in committed(files, root):
        try:
            manifest = read_manifest(files, step)
            public = {name: (step / name).stat().st_size for name in (NAME, COMMIT, CHECKSUMS)}
        except (EngineError, OSError) as error:
            logger.warning("checkpoint: a copy in memory is skipped: %s", error)
            continue
        needed = {**manifest.files, **public}
        held = [name for name, size in needed.items() if _size(step / name) == size]
        yield _Offer(manifest.step, manifest.attempt, step.name, needed, held)


def _size(path: Path) -> int:
    """Returns the bytes of a file; -1 if it is absent."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return -1


def _described(error: Exception) -> str:
    if isinstance(error, EngineError):
        return str(error)
    if isinstance(error, OSError):
        return f"checkpoint.memory_every: {error.filename or 'the network'}: {error.strerror or error}."
    return f"checkpoint.memory_every: {type(error).__name__}, {error}."
