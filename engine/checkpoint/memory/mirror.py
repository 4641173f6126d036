"""Save into the memory of all hosts: the files of every rank also go to a rank of the next host.

    every rank   writes its files                          as on disk; rank 0 commits in the memory of its own host
    rank 0       announces the files of each rank, and the files that make them a checkpoint    announced
    every rank   reserves memory for its copies                                       agreed
                 sends its files, receives the copies                                 agreed
    every host   commits                                                              agreed
    every host   removes the older checkpoint                                         agreed

So at each moment one checkpoint is complete on every host and in its copies. A failure on any rank fails all of them
with the same sentence, and leaves the older checkpoint.
"""

import base64
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from engine.checkpoint.format.filesystem import read_all, write_new
from engine.checkpoint.format.manifest import CHECKSUMS, COMMIT, LIMIT, NAME
from engine.checkpoint.format.step_folders import commit, read_manifest, temporary
from engine.checkpoint.format.strict_json import dump, parse
from engine.checkpoint.memory.memory_folder import MemoryFiles, MemoryFolder
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.agreement import raise_together
from engine.parallel.comm.host_barrier import host_identity
from engine.parallel.comm.host_group import HostGroup, Wait, announce, collect, noting

SHARED = Path("/dev/shm")
"""Folder of a host in memory, which outlives its processes."""


@dataclass(frozen=True)
class HostMap:
    """Ranks of each host, in order."""

    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}

    def is_first(self, rank: int) -> bool:
        """Returns True if this rank acts for its host."""
        return self.hosts[self._host_of[rank]][0] == rank

    def keeper(self, rank: int) -> int | None:
        """Returns the rank on the next host that stores the copy of ``rank``; None with one host."""
        host = self._host_of[rank]
        following = self.hosts[(host + 1) % len(self.hosts)]
        return following[self.hosts[host].index(rank) % len(following)] if len(self.hosts) > 1 else None

    def kept(self, rank: int) -> list[int]:
        """Returns the ranks with copies on ``rank``, ascending."""
        return [other for other in sorted(self._host_of) if self.keeper(other) == rank]


def find_hosts(host: HostGroup, identity: str) -> HostMap:
    """Finds ranks that share a memory, from the ``memory_identity`` of every rank. Collective, some bytes a rank.

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
    """Returns a text that is equal for processes with the same folder in memory; containers of one machine differ.

    Raises:
        CheckpointError: there is no such folder.
    """
    try:
        return f"{host_identity().hex()} {os.stat(shared).st_dev} {shared}"
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.memory_every stores copies in {shared}, which does not exist ({error.strerror}); mount a "
            "tmpfs there, or remove checkpoint.memory_every."
        ) from error


_PUBLIC = (NAME, COMMIT, CHECKSUMS)
"""Files on every host; they describe the others."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Facts of one save that all ranks know."""

    step: int
    attempt: str
    sizes: Sequence[Mapping[str, int]]
    """Bytes of the files that each rank has written, by name."""
    public: Mapping[str, bytes]
    """Files of every host."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """File from a rank of another host."""

    source: int
    name: str
    memory: memoryview


class Mirror:
    """Copier of one save's files to other hosts. Every rank makes one for each save."""

    def __init__(self, host: HostGroup, hosts: HostMap, folder: MemoryFolder, files: MemoryFiles) -> None:
        self._host, self._hosts, self._folder, self._files = host, hosts, folder, files
        self._with_rank_0 = any({0, host.rank} <= set(ranks) for ranks in hosts.hosts)

    def spread(self, step: Path) -> None:
        """Copies and commits the checkpoint that rank 0 has committed as ``step``. Collective.

        It sends over the host group: the manifest and the hashes of all blocks to every rank, and each rank's files to
        one rank of another host.

        Raises:
            CheckpointError: a rank has failed, or does not answer; equal on all ranks.
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
        """Collects the files of each rank on rank 0, and announces them with the files that make them a checkpoint."""
        root = self._folder.root
        named = {"/".join(path.relative_to(root).parts[1:]): size for path, size in self._files.sizes.items()}
        # "" is the hint "latest", next to the checkpoint
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
        """Returns memory for this rank's copies; a file gets its final name once all of it has arrived."""
        kept: list[_Copy] = []
        for source in self._hosts.kept(self._host.rank):
            for name, size in sorted(sizes[source].items()):
                path = _unfinished(here / name)
                file = self._files.create(path)
                try:
                    if size:  # full memory is an error here, but a signal once the file is mapped
                        os.posix_fallocate(file, 0, size)
                finally:
                    self._files.close(file)
                kept.append(_Copy(source, name, _mapped(path, size, mmap.ACCESS_WRITE)))
        return kept

    def _exchange(self, here: Path, sizes: Sequence[Mapping[str, int]], kept: Sequence[_Copy]) -> EngineError | None:
        """Sends the files of this rank and receives its copies.

        An error is returned after all messages have ended: other ranks wait until their messages are received.
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
    """Returns the path of a copy until all of it has arrived."""
    return path.with_name(f"{path.name}.part")


def _mapped(path: Path, size: int, access: int) -> memoryview:
    """Returns the bytes of a file, which are unmapped with their last reference."""
    if not size:
        return memoryview(bytearray())
    with path.open("r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), size, access=access))
