"""Checkpoints in host memory every few steps, with a copy on another host, from which a run survives losing one host.

    host 0  /dev/shm   files of its ranks   copies of host 1's        every rank sends its files to one rank
    host 1  /dev/shm   files of its ranks   copies of host 2's        of the next host
    host 2  /dev/shm   files of its ranks   copies of host 0's

The idea is from Gemini (Wang et al., SOSP 2023): processes end more often than hosts, and hosts one at a time.

save   every ``checkpoint.memory_every`` steps, in the background
find   at a start: the newest with every file on some host, if it is newer than the newest on disk

A save:

    every rank   writes its files                              as on disk; rank 0 commits on its own host
    rank 0       announces manifest and files of each rank     announced
    every rank   reserves memory for the copies                agreed
                 sends its files, receives the copies          agreed
    every host   commits                                       agreed
    every host   removes the older checkpoint                  agreed

So one checkpoint is always complete. A failure on any rank raises on all ranks, and the older checkpoint stays.
"""

import base64
import logging
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from engine.checkpoint.format.filesystem import Files, read_all, write_new
from engine.checkpoint.format.manifest import CHECKSUMS, COMMIT, LIMIT, NAME
from engine.checkpoint.format.step_folders import commit, committed, read_manifest, temporary
from engine.checkpoint.format.strict_json import dump, parse
from engine.checkpoint.memory_folder import (
    FileServer,
    Holder,
    MemoryFiles,
    MemoryFolder,
    RemoteFiles,
    memory_folder,
    run_token,
)
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.agreement import raise_together
from engine.parallel.comm.host_barrier import host_identity
from engine.parallel.comm.host_group import HostGroup, Wait, announce, collect, noting
from engine.parallel.comm.launcher import own_address

SHARED = Path("/dev/shm")
"""Folder in host memory (tmpfs) that outlives processes."""


@dataclass(frozen=True)
class HostMap:
    """Ranks of each host, in ascending order. Each host also stores copies of the previous host's files, in a ring."""

    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}

    def is_first(self, rank: int) -> bool:
        """Returns True if ``rank`` is the first rank of its host."""
        return self.hosts[self._host_of[rank]][0] == rank

    def keeper(self, rank: int) -> int | None:
        """Returns the rank on the next host that stores copies of the files of ``rank``; None for a single host."""
        host = self._host_of[rank]
        following = self.hosts[(host + 1) % len(self.hosts)]
        return following[self.hosts[host].index(rank) % len(following)] if len(self.hosts) > 1 else None

    def kept(self, rank: int) -> list[int]:
        """Returns the ranks for which ``rank`` stores copies of their files, in ascending order."""
        return [other for other in sorted(self._host_of) if self.keeper(other) == rank]


def find_hosts(host: HostGroup, identity: str) -> HostMap:
    """Groups all ranks by host. Ranks with the same ``identity``, from :func:`memory_identity`, share host memory.
    Collective.

    ``host``: process group of all ranks for CPU messages.

    Raises:
        EngineError: a rank cannot be reached.
    """
    told = collect(host, identity.encode())
    groups: dict[bytes, list[int]] = {}
    for rank, other in enumerate(told or []):
        groups.setdefault(other, []).append(rank)
    answer = parse(announce(host, dump({"hosts": list(groups.values())})), "rank 0's message")
    return HostMap(tuple(tuple(ranks) for ranks in answer["hosts"]))


def memory_identity(shared: Path) -> str:
    """Returns a text that is equal for two processes if they share the memory folder ``shared``.

    Raises:
        CheckpointError: there is no such folder.
    """
    try:
        return f"{host_identity().hex()} {os.stat(shared).st_dev} {shared}"
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.memory_every keeps copies in {shared}, which is not there ({error.strerror}); mount a tmpfs "
            "there, or leave checkpoint.memory_every out."
        ) from error


_PUBLIC = (NAME, COMMIT, CHECKSUMS)
"""Files that every host has: they say what the others are."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Facts of one save that all ranks share."""

    step: int
    attempt: str
    sizes: Sequence[Mapping[str, int]]
    """Bytes of the files that each rank has written, by name."""
    public: Mapping[str, bytes]
    """The files that every host has."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A file that a rank of another host sends."""

    source: int
    name: str
    memory: memoryview


class Mirror:
    """Distributor of one saved checkpoint over host memories, so that each file is on two hosts. Every save needs a new
    object.
    """

    def __init__(self, host: HostGroup, hosts: HostMap, folder: MemoryFolder, files: MemoryFiles) -> None:
        self._host, self._hosts, self._folder, self._files = host, hosts, folder, files
        self._with_rank_0 = any({0, host.rank} <= set(ranks) for ranks in hosts.hosts)

    def spread(self, step: Path) -> None:
        """Copies each host's files of the committed checkpoint ``step`` to the memory of the next host, and commits
        them there. Collective over the host group.

        Each rank sends its files to one rank of the next host.

        Raises:
            CheckpointError: a rank has failed, or does not answer; all ranks raise the same error.
        """
        told = self._tell(step)
        here = step
        if not self._with_rank_0:
            here = temporary(self._folder.root, told.step, told.attempt)
        acts = self._hosts.is_first(self._host.rank)
        with self._together("reserving memory"):
            kept = self._reserve(here, told.sizes)
        problem = self._exchange(here, told.sizes, kept)
        with self._together("copying"):
            if problem is not None:
                raise problem
            for copy in kept:
                self._files.rename(_unfinished(here / copy.name), here / copy.name)
        with self._together("committing"):
            if acts and not self._with_rank_0:
                for name, data in told.public.items():
                    write_new(self._files, here / name, [memoryview(data)])
                here = commit(self._files, here, told.step)
        with self._together("removing the older copy"):
            if acts:
                self._folder.only(here)

    def _together(self, doing: str) -> AbstractContextManager[None]:
        def describe(error: Exception) -> str:
            told = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}, {error}"
            return f"{doing} failed on rank {self._host.rank}: {told}."

        return raise_together(self._host, describe)

    def _tell(self, step: Path) -> _Told:
        """Gathers the files of each rank on rank 0, which sends the list and the files of the commit to all ranks."""
        root = self._folder.root
        named = {"/".join(path.relative_to(root).parts[1:]): size for path, size in self._files.sizes.items()}
        # "" is the hint "latest", which lies beside the checkpoint
        reports = collect(self._host, dump({name: size for name, size in named.items() if name not in ("", *_PUBLIC)}))
        message = b""
        if reports is not None:
            files = {name: base64.b64encode(read_all(self._files, step, name, LIMIT)).decode() for name in _PUBLIC}
            manifest = read_manifest(self._files, step)
            sizes = [parse(report, "a rank's files") for report in reports]
            told = {"step": manifest.step, "attempt": manifest.attempt, "sizes": sizes, "public": files}
            message = dump(told)
        answer = parse(announce(self._host, message), "rank 0's message")
        public = {name: base64.b64decode(text) for name, text in answer["public"].items()}
        return _Told(answer["step"], answer["attempt"], answer["sizes"], public)

    def _reserve(self, here: Path, sizes: Sequence[Mapping[str, int]]) -> list[_Copy]:
        """Allocates memory for the copies of this rank; a file has its name once all of it has arrived."""
        kept: list[_Copy] = []
        for source in self._hosts.kept(self._host.rank):
            for name, size in sorted(sizes[source].items()):
                path = _unfinished(here / name)
                file = self._files.create(path)
                try:
                    if size:  # a full memory is an error here, and a signal once it is mapped
                        os.posix_fallocate(file, 0, size)
                finally:
                    self._files.close(file)
                kept.append(_Copy(source, name, _mapped(path, size, mmap.ACCESS_WRITE)))
        return kept

    def _exchange(self, here: Path, sizes: Sequence[Mapping[str, int]], kept: Sequence[_Copy]) -> EngineError | None:
        """Sends the files of this rank and receives the files of its copies.

        An error is returned when all messages have ended: the other ranks wait until theirs are taken.
        """
        keeper, calls = self._hosts.keeper(self._host.rank), list[Callable[[], Wait]]()
        if keeper is not None:
            for name, size in sorted(sizes[self._host.rank].items()):
                calls.append(partial(self._host.send, _mapped(here / name, size, mmap.ACCESS_COPY), keeper))
        calls += [partial(self._host.receive, copy.memory, copy.source) for copy in kept]
        waits, lost = list[Wait](), list[EngineError]()
        for call in calls:
            with noting(lost):
                waits.append(call())
        for wait in waits:
            with noting(lost):
                wait()
        return lost[0] if lost else None


def _unfinished(path: Path) -> Path:
    """Returns the folder of a copy before all of it has arrived."""
    return path.with_name(f"{path.name}.part")


def _mapped(path: Path, size: int, access: int) -> memoryview:
    """Returns the bytes of a file, which are unmapped after the last reference to them."""
    if not size:
        return memoryview(bytearray())
    with path.open("r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), size, access=access))


logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """Checkpoint in the memory of the hosts, open for reading on every rank."""

    folder: Path
    """Path of the checkpoint; it does not exist on a host without any of its files."""
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
    """Store of checkpoints in host memory, with a copy of each file on another host. ``save`` and ``find`` are
    collective over the host group.

    Args:
        run_folder: folder of the run's checkpoints on disk.
        shared: folder in host memory (tmpfs).
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
        """Saves a checkpoint into the memory of the hosts, then copies each host's files to the next host.

        Returns the checkpoint's folder on rank 0's host.

        Args:
            write: called with file operations and the run's folder in memory; saves a checkpoint as a subfolder there,
                and returns its path.

        Raises:
            CheckpointError, EngineError: ``write`` or the copy has failed on a rank. The previous checkpoint remains.
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
        """Opens the newest checkpoint that is complete over all hosts and later than step ``beyond``; None if there is
        none.

        Raises:
            CheckpointError: a host cannot answer; all ranks raise the same error.
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
        """Stops the server from which other hosts read this host's checkpoints. Call it after all ranks have read."""
        if self._found is not None:
            self._found.files.hang_up()
        if self._server is not None:
            self._server.close()
        self._found = self._server = None

    def remove(self) -> None:
        """Deletes the checkpoints in this host's memory, at the end of a run. Communicates nothing."""
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
    """Returns the newest checkpoint that is complete over all hosts and later than step ``beyond``; None if there is
    none.

    ``offers``: the checkpoints in the memory of each host.
    """
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
