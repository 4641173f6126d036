"""A disk that forgets: records what a save does to the files of a run, and says what a power cut may leave of it.

A file keeps what it had at its last fsync, or all that was written. A folder keeps the names that it had at its last
fsync, and of the later changes (make, create, rename, remove) any one, or all but any one, or all, or none: each
reaches the disk by itself, in any order.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from engine.checkpoint.format.filesystem import Files

Tree = dict[str, Union["Tree", bytes]]
"""Names of a folder -> files and folders."""
Operation = tuple[str, Path, object]
"""(what, path, argument); paths are below the folder of the run."""


class Recorder(Files):
    """Does everything, and notes it in ``operations``. Ranks in threads may share one."""

    def __init__(self, root: Path) -> None:
        self.operations: list[Operation] = []
        self._root, self._lock = root, threading.Lock()
        self._open: dict[int, Path] = {}

    def _note(self, what: str, path: Path, argument: object = None) -> None:
        with self._lock:
            self.operations.append((what, path.relative_to(self._root), argument))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._note("make", path)

    def create(self, path: Path) -> int:
        file = super().create(path)
        self._open[file] = path
        self._note("create", path)
        return file

    def write(self, file: int, data: memoryview) -> None:
        half = len(data) // 2 // 4096 * 4096
        for part in (data[:half], data[half:]):  # a write may be cut anywhere
            super().write(file, part)
            self._note("write", self._open[file], bytes(part))

    def truncate(self, file: int, size: int) -> None:
        super().truncate(file, size)
        self._note("truncate", self._open[file], size)

    def sync(self, file: int) -> None:
        super().sync(file)
        self._note("sync", self._open[file])

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        if path.is_relative_to(self._root):
            self._note("sync folder", path)

    def rename(self, path: Path, target: Path) -> None:
        super().rename(path, target)
        self._note("rename", path, target.relative_to(self._root))

    def unlink(self, path: Path, parent: int | None = None) -> None:
        super().unlink(path, parent)
        self._note("unlink", path)

    def remove_folder(self, path: Path, parent: int | None = None) -> None:
        super().remove_folder(path, parent)
        self._note("remove", path)


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    kept: bytes = b""
    """At the last fsync."""


@dataclass(eq=False)
class _Folder:
    names: dict[str, "_File | _Folder"] = field(default_factory=dict)
    kept: dict[str, "_File | _Folder"] = field(default_factory=dict)
    changes: list[dict[str, "_File | _Folder | None"]] = field(default_factory=list)
    """Since the last fsync, in order; each happens as a whole or not at all."""

    def change(self, change: dict[str, "_File | _Folder | None"]) -> None:
        self.changes.append(change)
        _apply(self.names, change)

    def after(self, chosen: Sequence[dict[str, "_File | _Folder | None"]]) -> dict[str, "_File | _Folder"]:
        names = dict(self.kept)
        for change in chosen:
            _apply(names, change)
        return names


def _apply(names: dict[str, "_File | _Folder"], change: dict[str, "_File | _Folder | None"]) -> None:
    for name, thing in change.items():
        if thing is None:
            names.pop(name, None)
        else:
            names[name] = thing


class CrashDisk:
    """Plays operations one by one; ``states`` are the trees that a power cut now could leave."""

    def __init__(self, before: Tree) -> None:
        self._root = _durable(before)

    def play(self, operation: Operation) -> None:
        what, path, argument = operation
        folder = self._folder(path.parent)
        if what == "make":
            folder.change({path.name: _Folder()})
        elif what == "create":
            folder.change({path.name: _File()})
        elif what in ("unlink", "remove"):
            folder.change({path.name: None})
        elif what == "rename":
            assert isinstance(argument, Path) and argument.parent == path.parent, "only inside a folder"
            folder.change({path.name: None, argument.name: folder.names[path.name]})
        elif what == "sync folder":
            synced = self._folder(path)
            synced.kept, synced.changes = dict(synced.names), []
        else:
            self._play_file(what, path, argument)

    def states(self) -> Iterator[Tree]:
        """A process that is killed leaves the first one."""
        yield _tree(self._root, {}, everything=True, contents=True)
        yield _tree(self._root, {}, everything=True, contents=False)
        yield _tree(self._root, {}, everything=False, contents=False)
        for folder in _folders(self._root):
            for index in range(len(folder.changes)):
                without = [*folder.changes[:index], *folder.changes[index + 1 :]]
                yield _tree(self._root, {folder: without}, everything=True, contents=True)
                yield _tree(self._root, {folder: without}, everything=True, contents=False)
                yield _tree(self._root, {folder: [folder.changes[index]]}, everything=False, contents=False)
                yield _tree(self._root, {folder: [folder.changes[index]]}, everything=False, contents=True)

    def _play_file(self, what: str, path: Path, argument: object) -> None:
        file = self._folder(path.parent).names[path.name]
        assert isinstance(file, _File)
        if what == "write":
            assert isinstance(argument, bytes)
            file.data += argument
        elif what == "truncate":
            assert isinstance(argument, int)
            file.data = file.data[:argument].ljust(argument, b"\0")
        else:
            assert what == "sync"
            file.kept = bytes(file.data)

    def _folder(self, path: Path) -> _Folder:
        folder = self._root
        for name in path.parts:
            inner = folder.names[name]
            assert isinstance(inner, _Folder)
            folder = inner
        return folder


def read_tree(path: Path) -> Tree:
    """What is on the disk."""
    return {p.name: read_tree(p) if p.is_dir() else p.read_bytes() for p in sorted(path.iterdir())}


def write_tree(tree: Tree, path: Path) -> None:
    """Put a tree into a new folder."""
    path.mkdir()
    for name, thing in tree.items():
        if isinstance(thing, bytes):
            (path / name).write_bytes(thing)
        else:
            write_tree(thing, path / name)


def _durable(tree: Tree) -> _Folder:
    names: dict[str, _File | _Folder] = {
        name: _File(bytearray(thing), thing) if isinstance(thing, bytes) else _durable(thing)
        for name, thing in tree.items()
    }
    return _Folder(names, dict(names))


def _folders(folder: _Folder) -> Iterator[_Folder]:
    yield folder
    for thing in {**folder.kept, **folder.names}.values():
        if isinstance(thing, _Folder):
            yield from _folders(thing)


def _tree(folder: _Folder, chosen: dict[_Folder, Sequence[dict[str, _File | _Folder | None]]], **kept: bool) -> Tree:
    """``chosen``: the changes of single folders; of the others all (``everything``) or none are there."""
    names = folder.after(chosen.get(folder, folder.changes if kept["everything"] else []))
    return {
        name: _tree(thing, chosen, **kept)
        if isinstance(thing, _Folder)
        else bytes(thing.data if kept["contents"] else thing.kept)
        for name, thing in sorted(names.items())
    }


class TreeFiles(Files):
    """Reads a tree in memory as if it lay at ``root``."""

    def __init__(self, root: Path, tree: Tree) -> None:
        self._root, self._tree = root, tree
        self._open: dict[int, bytes] = {}

    def open(self, root: Path, name: str) -> int:
        thing = self._at(root / name)
        if not isinstance(thing, bytes):
            raise FileNotFoundError(2, "No such file or directory", str(root / name))
        self._open[len(self._open)] = thing
        return len(self._open) - 1

    def size(self, file: int) -> int:
        return len(self._open[file])

    def read_into(self, file: int, target: memoryview, offset: int) -> int:
        part = self._open[file][offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def close(self, file: int) -> None:
        pass

    def names(self, path: Path) -> list[str]:
        thing = self._at(path)
        assert isinstance(thing, dict)
        return sorted(thing)

    def is_folder(self, path: Path) -> bool:
        return isinstance(self._at(path), dict)

    def is_link(self, path: Path) -> bool:
        return False

    def _at(self, path: Path) -> Tree | bytes | None:
        thing: Tree | bytes | None = self._tree
        for name in path.relative_to(self._root).parts:
            thing = thing.get(name) if isinstance(thing, dict) else None
        return thing
