"""Ways to die in the middle of a save or a load: at a counted operation on files or message to another host."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from engine.checkpoint.format.filesystem import Files
from engine.parallel.comm.host_group import TorchHostGroup, Wait

SAVING = ("make_folder", "create", "write", "truncate", "sync", "sync_folder", "rename", "unlink", "remove_folder")
LOADING = ("names", "open", "read_into")
MESSAGES = ("send", "receive")


@dataclass
class Fate:
    """Kills this process before its ``count``-th operation of a kind (from 1); a write is begun before."""

    kind: str = ""
    count: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    """How many there were of each kind."""

    def meets(self, kind: str) -> bool:
        """Count an operation; true if it is the last one."""
        self.seen[kind] = self.seen.get(kind, 0) + 1
        return kind == self.kind and self.seen[kind] == self.count

    def strike(self, kind: str) -> None:
        """Count an operation, and die if it is the one."""
        if self.meets(kind):
            os.kill(os.getpid(), signal.SIGKILL)


class FatalFiles(Files):
    """The real file system, up to the fatal operation."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate

    def make_folder(self, path: Path) -> None:
        self._fate.strike("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._fate.strike("create")
        return super().create(path)

    def write(self, file: int, data: memoryview) -> None:
        if self._fate.meets("write"):
            super().write(file, data[: len(data) // 2])  # a torn file
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(file, data)

    def truncate(self, file: int, size: int) -> None:
        self._fate.strike("truncate")
        super().truncate(file, size)

    def sync(self, file: int) -> None:
        self._fate.strike("sync")
        super().sync(file)

    def sync_folder(self, path: Path) -> None:
        self._fate.strike("sync_folder")
        super().sync_folder(path)

    def rename(self, path: Path, target: Path) -> None:
        self._fate.strike("rename")
        super().rename(path, target)

    def unlink(self, path: Path, parent: int | None = None) -> None:
        self._fate.strike("unlink")
        super().unlink(path, parent)

    def remove_folder(self, path: Path, parent: int | None = None) -> None:
        self._fate.strike("remove_folder")
        super().remove_folder(path, parent)

    def names(self, path: Path) -> list[str]:
        self._fate.strike("names")
        return super().names(path)

    def open(self, root: Path, name: str) -> int:
        self._fate.strike("open")
        return super().open(root, name)

    def read_into(self, file: int, target: memoryview, offset: int) -> int:
        self._fate.strike("read_into")
        return super().read_into(file, target, offset)


def fatal_host(fate: Fate) -> Callable[[int, int, float], TorchHostGroup]:
    """A host group whose messages count."""

    class FatalHost(TorchHostGroup):
        def send(self, data: memoryview, to: int) -> Wait:
            fate.strike("send")
            return super().send(data, to)

        def receive(self, target: memoryview, source: int) -> Wait:
            fate.strike("receive")
            return super().receive(target, source)

    return FatalHost


@contextmanager
def doomed(fate: Fate) -> Iterator[None]:
    """Engines that are made inside save and load through fatal files and messages."""
    with (
        patch("engine.checkpoint.coordinator.Files", lambda: FatalFiles(fate)),
        patch("engine.checkpoint.coordinator.TorchHostGroup", fatal_host(fate)),
    ):
        yield
