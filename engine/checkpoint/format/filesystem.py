"""File operations of a checkpoint, all in one small class, so that tests can record, replay and fail them.

Paths are absolute. Nothing is overwritten: files are always created, and folders appear by rename.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import COPY_AGAIN, CheckpointError

PAGE = 4096
"""Alignment in bytes that O_DIRECT requires of addresses, offsets and lengths."""


class Files:
    """File operations that checkpoints use, on the local file system. A subclass can read from other hosts."""

    def make_folder(self, path: Path) -> None:
        """Creates the folder ``path``. Raises OSError if its parent is missing, or if ``path`` exists."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Creates the file ``path`` for writing, with O_DIRECT if possible, and returns its descriptor.

        Raises FileExistsError if ``path`` exists.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        with suppress(FileNotFoundError):  # some file systems create the file and then refuse O_DIRECT
            os.unlink(path)
        return os.open(path, flags, 0o644)

    def write(self, file: int, data: memoryview) -> None:
        """Appends all of ``data`` to an open file. With O_DIRECT, ``data`` must begin at a page boundary of memory, and
        be whole pages.
        """
        while data:
            try:
                written = os.write(file, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not _is_direct(file):
                    raise
                written = 0
            if written < len(data):
                _buffered(file)
            data = data[written:]

    def truncate(self, file: int, size: int) -> None:
        """Cuts an open file to ``size`` bytes."""
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Calls fsync on a file."""
        os.fsync(file)

    def sync_folder(self, path: Path) -> None:
        """Calls fsync on the folder ``path``, so that the names of its files survive a crash of the machine."""
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with named(path):
                os.fsync(file)
        finally:
            os.close(file)

    def rename(self, path: Path, target: Path) -> None:
        """Renames a file or folder within a file system. Replaces an existing file; raises OSError if ``target`` is a
        folder that is not empty.
        """
        os.rename(path, target)

    def unlink(self, path: Path, parent: int | None = None) -> None:
        """Removes the file or link ``path``. ``parent``: open descriptor of its folder, in which the name is looked
        up.
        """
        os.unlink(path if parent is None else path.name, dir_fd=parent)

    def remove_folder(self, path: Path, parent: int | None = None) -> None:
        """Removes an empty folder. ``parent``: open descriptor of its parent folder, in which the name is looked up."""
        os.rmdir(path if parent is None else path.name, dir_fd=parent)

    # ------------------------------------------------------------------ reading

    def open(self, root: Path, name: str) -> int:
        """Opens the regular file ``name`` (such as "model/x.safetensors") under ``root`` for reading; returns its
        descriptor.

        Raises:
            CheckpointError: ``name`` is a link, a folder or a device, or its path contains a link.
        """
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            *parents, leaf = name.split("/")
            for parent in parents:
                inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            file = os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # a pipe must not block
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise CheckpointError(
                    f"{root / name} is a link, or its path contains one, but checkpoints are read without links; put a "
                    "copy of the file or folder in place of the link."
                ) from error
            raise
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise CheckpointError(f"{root / name} is not a regular file; copy the checkpoint again.")
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # read only what is requested, without 8 MiB of readahead
        return file

    def size(self, file: int) -> int:
        """Returns the size of an open file in bytes."""
        return os.fstat(file).st_size

    def read_into(self, file: int, target: memoryview, offset: int) -> int:
        """Reads an open file into ``target``, beginning at byte ``offset``; returns the number of bytes read.

        A short read means the end of the file.
        """
        done = 0
        while done < len(target):
            count = os.preadv(file, [target[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def is_cached(self, file: int, offset: int) -> bool:
        """Returns True if the byte at ``offset`` of an open file is in the page cache, or if the file system cannot
        answer.
        """
        try:
            os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def read_direct(self, file: int, target: memoryview, offset: int) -> int:
        """Reads an open file into ``target`` from byte ``offset``; returns the number of bytes read. Opens the file
        again with O_DIRECT, if the file system allows it.

        A short read means the end of the file. ``target`` must begin at a page boundary; its length and ``offset`` must
        be multiples of the page size.
        """
        try:
            direct = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return self.read_into(file, target, offset)
        try:
            done = 0
            while done < len(target):
                count = os.preadv(direct, [target[done:]], offset + done)
                done += count
                if count % PAGE or not count:  # the end of the file
                    break
            return done
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.read_into(file, target, offset)
        finally:
            os.close(direct)

    def close(self, file: int) -> None:
        """Closes an open file."""
        os.close(file)

    def names(self, path: Path) -> list[str]:
        """Returns the sorted names of the files and folders in a folder."""
        return sorted(os.listdir(path))

    def is_folder(self, path: Path) -> bool:
        """Returns True for a folder or a link to a folder."""
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        """Returns True for a symbolic link, even a broken one."""
        return path.is_symlink()

    @contextmanager
    def locked(self, path: Path) -> Iterator[bool]:
        """Locks the folder ``path`` inside this context, without waiting; yields False if another process has the lock.

        Yields True on a file system without locks. The lock ends with the context or the process.
        """
        file, free = os.open(path, os.O_RDONLY | os.O_NOFOLLOW), True
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # a file system without locks: treat the folder as free
                free = error.errno != errno.EWOULDBLOCK
            yield free
        finally:
            os.close(file)

    def free_bytes(self, path: Path) -> int:
        """Returns the free bytes that this user may use on the file system of ``path``."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def resolved(path: str | os.PathLike[str]) -> Path:
    """Returns ``path`` as an absolute path with all symbolic links resolved. The path need not exist."""
    return Path(os.path.realpath(path))


def read_all(files: Files, root: Path, name: str, limit: int) -> bytearray:
    """Returns the contents of the file ``name`` under ``root``.

    Raises:
        CheckpointError: the file cannot be read, or has more than ``limit`` bytes.
    """
    with opened(files, root, name) as file:
        size = files.size(file)
        if size > limit:
            raise CheckpointError(
                f"{root / name} is damaged: it has {size:,} bytes, but at most {limit:,} are allowed; {COPY_AGAIN}"
            )
        data = bytearray(size)
        with memoryview(data) as target:
            count = files.read_into(file, target, 0)
        del data[count:]
        return data


def write_new(files: Files, path: Path, chunks: Iterable[memoryview]) -> int:
    """Writes ``chunks`` one after the other into the new file ``path`` and calls fsync. Returns the number of bytes."""
    count = 0
    with named(path):
        file = files.create(path)
        try:
            for chunk in chunks:
                files.write(file, chunk)
                count += len(chunk)
            files.sync(file)
        finally:
            files.close(file)
    return count


def replace_file(files: Files, path: Path, data: bytes) -> None:
    """Replaces the file ``path`` by one with the contents ``data``; a crash leaves the old file or the new one."""
    new = path.with_name(f".{path.name}.tmp")
    new.unlink(missing_ok=True)
    write_new(files, new, [memoryview(data)])
    files.rename(new, path)
    files.sync_folder(path.parent)


@contextmanager
def opened(files: Files, root: Path, name: str) -> Iterator[int]:
    """Opens the file ``name`` under ``root`` for reading inside this context; yields its descriptor.

    Raises:
        CheckpointError: names the file and the reason why it cannot be read.
    """
    try:
        file = files.open(root, name)
        try:
            yield file
        finally:
            files.close(file)
    except OSError as error:
        raise CheckpointError(
            f"{root / name} cannot be read ({error.strerror or error}); check its path and permissions, or load "
            "another checkpoint."
        ) from error


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Opens a context that adds ``path`` to an OSError from its block, if the error has no file name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def follow_umask(path: Path) -> None:
    """Gives the file ``path`` the permissions of a new file in its folder; safetensors and tempfile write mode 0600."""
    probe = path.with_name(f"{path.name}.{os.getpid()}")
    probe.touch()
    try:
        path.chmod(stat.S_IMODE(probe.stat().st_mode))
    finally:
        probe.unlink()


def remove_tree(files: Files, path: Path) -> None:
    """Removes a file, or a folder with its contents, without following links.

    It is safe if another process replaces a folder by a link during the removal.
    """
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _remove(files, path, parent)
    finally:
        os.close(parent)


def _remove(files: Files, path: Path, parent: int) -> None:
    """Removes the entry with the name of ``path`` from the open folder ``parent``."""
    try:
        folder = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        with _at(path):
            files.unlink(path, parent)
        return
    try:
        for name in sorted(os.listdir(folder)):
            _remove(files, path / name, folder)
    finally:
        os.close(folder)
    with _at(path):
        files.remove_folder(path, parent)


@contextmanager
def _at(path: Path) -> Iterator[None]:
    """Sets the whole path in an OSError, which has only the name in the open folder."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _buffered(file: int) -> None:
    """Continues through the page cache: after a short write the rest is no longer aligned."""
    if _is_direct(file):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
