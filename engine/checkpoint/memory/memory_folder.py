"""The folder of a run in the memory of a host.

It has the name of a token that lies beside the checkpoints on disk: where the folder of a run was removed or is another
one, no copy of the old run is found, and the next start removes it.
"""

import hashlib
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.format.filesystem import Files, read_all, remove_tree, write_new
from engine.checkpoint.format.step_folders import make_run_folder
from engine.errors import CheckpointError

TOKEN = "memory_token"
"""File in the folder of a run."""
_TOKEN = re.compile(rb"[0-9a-f]{16}")


class MemoryFiles(Files):
    """Files in memory: a folder is made where the first file of a rank needs it, and nothing waits for a disk.

    Args:
        named: the folder under which rank 0 names files.
        shared: where these files lie on this host.
    """

    def __init__(self, named: Path, shared: Path) -> None:
        self._named, self._shared = named, shared
        self.sizes: dict[Path, int] = {}
        """Bytes of every file that was created, by its path."""
        self._open: dict[int, Path] = {}

    def create(self, path: Path) -> int:
        """Create a file and its folders, on this host."""
        if path.is_relative_to(self._named):
            path = self._shared / path.relative_to(self._named)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._open[file] = path
        return file

    def close(self, file: int) -> None:
        """Close an open file, and note its size if it was created."""
        if (path := self._open.pop(file, None)) is not None:
            self.sizes[path] = os.fstat(file).st_size
        os.close(file)

    def make_folder(self, path: Path) -> None:
        """Create a folder, unless another rank of this host was faster."""
        path.mkdir(exist_ok=True, mode=0o700)


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """Where the copies of one run lie, on every host."""

    root: Path

    def claim(self) -> None:
        """Make the folder, and remove those of earlier runs in the same place. One rank of each host calls it.

        Raises:
            CheckpointError: somebody else's folder has its name.
        """
        run = self.root.name.rpartition("-")[0]
        for other in self.root.parent.glob(f"{run}-*"):
            if other != self.root and other.lstat().st_uid == os.getuid():
                remove_tree(Files(), other)
        self.root.mkdir(mode=0o700, exist_ok=True)
        found = self.root.lstat()
        if found.st_uid != os.getuid() or self.root.is_symlink():
            raise CheckpointError(f"{self.root} belongs to another user or is a link; remove it.")

    def only(self, kept: Path) -> None:
        """Remove everything but this checkpoint."""
        for path in self.root.iterdir():
            if path != kept:
                remove_tree(Files(), path)

    def remove(self) -> None:
        """Give the memory back."""
        with suppress(OSError):
            remove_tree(Files(), self.root)


def run_token(files: Files, folder: Path) -> str:
    """The token of a run, made where it has none. Rank 0 calls it.

    Raises:
        CheckpointError: it is damaged.
        OSError: it cannot be written.
    """
    make_run_folder(files, folder)
    if TOKEN not in files.names(folder):
        write_new(files, folder / TOKEN, [memoryview(secrets.token_hex(8).encode())])
        files.sync_folder(folder)
    token = bytes(read_all(files, folder, TOKEN, 64))
    if not _TOKEN.fullmatch(token):
        raise CheckpointError(f"{folder / TOKEN} is damaged; remove it, and the copies in memory are made anew.")
    return token.decode()


def memory_folder(shared: Path, folder: Path, token: str) -> MemoryFolder:
    """Where the run of ``folder`` keeps its copies in the memory of a host."""
    place = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return MemoryFolder(shared / f"trine-memory-{os.getuid()}-{place}-{token}")
