"""Every operation on files that a checkpoint makes: one small class, so that tests can record, replay and fail them.

Paths are absolute. Nothing is overwritten: files are created anew, folders appear by rename.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import CheckpointError

PAGE = 4096
"""What O_DIRECT asks of addresses, offsets and lengths."""


class Files:
    """The operations, on the real file system."""

    def make_folder(self, path: Path) -> None:
        """A new folder; its parent exists."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new, empty file, open for writing past the page cache where the file system can."""
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
        """Append ``data``, whole pages at page-aligned addresses while the file is written past the page cache."""
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
        """Cut the file to ``size`` bytes."""
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Force the file to the disk."""
        os.fsync(file)

    def sync_folder(self, path: Path) -> None:
        """Force the names in a folder to the disk."""
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with named(path):
                os.fsync(file)
        finally:
            os.close(file)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file or folder another name in the same file system; a file there is replaced, a folder is not."""
        os.rename(path, target)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    # ------------------------------------------------------------------ reading

    def open(self, root: Path, name: str) -> int:
        """The regular file ``name`` ("model/x.safetensors") under ``root``, open for reading; links are not followed.

        Raises:
            CheckpointError: it is a link, a folder or a device, or lies behind a link.
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
                    f"{root / name} is a link or lies behind one; copy the file itself there."
                ) from error
            raise
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise CheckpointError(f"{root / name} is not a regular file; copy the checkpoint anew.")
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # read what is asked for, no 8 MiB window around it
        return file

    def size(self, file: int) -> int:
        """Bytes of an open file."""
        return os.fstat(file).st_size

    def read_into(self, file: int, target: memoryview, offset: int) -> int:
        """Fill ``target`` from ``offset`` on; returns how many bytes there were."""
        done = 0
        while done < len(target):
            count = os.preadv(file, [target[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def is_cached(self, file: int, offset: int) -> bool:
        """Whether the byte at ``offset`` lies in the page cache; True where the system does not tell."""
        try:
            os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def read_direct(self, file: int, target: memoryview, offset: int) -> int:
        """As ``read_into`` but past the page cache: what is read once need not take, and clear, its pages.

        ``target`` and ``offset`` are aligned to pages, and so is the length, whatever the end of the file is.
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
        """Close an open file."""
        os.close(file)

    def names(self, path: Path) -> list[str]:
        """What a folder holds, sorted."""
        return sorted(os.listdir(path))

    def is_folder(self, path: Path) -> bool:
        """A folder, or a link to one: a run may lie on another disk."""
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        """A link, to whatever."""
        return path.is_symlink()

    @contextmanager
    def locked(self, path: Path) -> Iterator[bool]:
        """Keep a folder for this process; gives whether nobody else has it. A process that ends lets go."""
        file, free = os.open(path, os.O_RDONLY | os.O_NOFOLLOW), True
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # what the file system cannot lock nobody has
                free = error.errno != errno.EWOULDBLOCK
            yield free
        finally:
            os.close(file)

    def free_bytes(self, path: Path) -> int:
        """What this user may still write."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def resolved(path: str | os.PathLike[str]) -> Path:
    """One spelling for a path, however it is given and wherever the process goes from here; links are followed."""
    return Path(os.path.realpath(path))


def read_all(files: Files, root: Path, name: str, limit: int) -> bytearray:
    """A small file, whole.

    Raises:
        CheckpointError: it cannot be read, or is larger than ``limit`` bytes, which no sound file is.
    """
    with opened(files, root, name) as file:
        size = files.size(file)
        if size > limit:
            raise CheckpointError(
                f"{root / name} is damaged: it has {size} bytes, more than the {limit} that it may have."
            )
        data = bytearray(size)
        with memoryview(data) as target:
            count = files.read_into(file, target, 0)
        del data[count:]
        return data


def write_new(files: Files, path: Path, chunks: Iterable[memoryview]) -> int:
    """A new file of these chunks, forced to the disk; returns its bytes."""
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


@contextmanager
def opened(files: Files, root: Path, name: str) -> Iterator[int]:
    """A file open for reading, closed again at the end.

    Raises:
        CheckpointError: names it, and why it cannot be read.
    """
    try:
        file = files.open(root, name)
        try:
            yield file
        finally:
            files.close(file)
    except OSError as error:
        raise CheckpointError(f"{root / name} cannot be read: {error.strerror or error}.") from error


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Say of which file an error is: the system does not, once the file is open."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def remove_tree(files: Files, path: Path) -> None:
    """A folder with all that is in it, or a file; links are removed, not followed."""
    if files.is_link(path) or not files.is_folder(path):
        files.unlink(path)
        return
    for name in files.names(path):
        remove_tree(files, path / name)
    files.remove_folder(path)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _buffered(file: int) -> None:
    """Go on through the page cache: after a short write nothing is aligned any more."""
    if _is_direct(file):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
