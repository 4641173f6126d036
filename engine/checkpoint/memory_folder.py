"""Folder of a run in host memory (tmpfs), and reads of checkpoint files from other hosts' memory.

A token file next to the checkpoints on disk is part of its name, so that copies of a removed run are not found.

    rank --- open("optim/optim-00003.safetensors") ---> on this host: the file
                                                        elsewhere: 20 bytes of request, the bytes as answer

During a load, one rank of each host serves its files; requests need a secret that the ranks exchange.
"""

import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

from engine.checkpoint.format.filesystem import Files, read_all, remove_tree, write_new
from engine.checkpoint.format.step_folders import make_run_folder
from engine.errors import CheckpointError

TOKEN = "memory_token"
"""Name of the token file in the folder of a run on disk."""
_TOKEN_FORM = re.compile(rb"[0-9a-f]{16}")


class MemoryFiles(Files):
    """File operations that write a checkpoint into host memory. Folders are created with their first file.

    Args:
        named: rank 0's tmpfs folder, which contains memory folders. On every rank, callers pass paths inside it.
        shared: this host's tmpfs folder. ``create`` puts it in the place of ``named`` in a path; other methods use
            paths unchanged.
    """

    def __init__(self, named: Path, shared: Path) -> None:
        self._named, self._shared = named, shared
        self.sizes: dict[Path, int] = {}
        """Bytes of every file that was created, by its path."""
        self._open: dict[int, Path] = {}

    def create(self, path: Path) -> int:
        """Creates the file ``path``, and missing parent folders; returns the file's descriptor. A path inside rank 0's
        memory folder means the same relative path in this host's. Raises FileExistsError if the file exists.
        """
        if path.is_relative_to(self._named):
            path = self._shared / path.relative_to(self._named)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._open[file] = path
        return file

    def close(self, file: int) -> None:
        """Closes an open file. If ``create`` opened it, adds its path and size to the attribute ``sizes``."""
        if (path := self._open.pop(file, None)) is not None:
            self.sizes[path] = os.fstat(file).st_size
        os.close(file)

    def make_folder(self, path: Path) -> None:
        """Creates the folder ``path``; does nothing if it exists."""
        path.mkdir(exist_ok=True, mode=0o700)


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """Folder for the checkpoints of one run in the memory of one host."""

    root: Path

    def claim(self) -> None:
        """Creates the folder, and deletes memory folders of earlier runs that saved into the same folder on disk. One
        rank of each host calls it.

        Raises:
            CheckpointError: the folder belongs to another user, or its path is a symbolic link.
        """
        run = self.root.name.rpartition("-")[0]
        for other in self.root.parent.glob(f"{run}-*"):
            if other != self.root and other.lstat().st_uid == os.getuid():
                remove_tree(Files(), other)
        self.root.mkdir(mode=0o700, exist_ok=True)
        found = self.root.lstat()
        if found.st_uid != os.getuid() or self.root.is_symlink():
            raise CheckpointError(
                f"{self.root} belongs to another user or is a link; remove it, and the engine creates it again."
            )

    def only(self, kept: Path) -> None:
        """Deletes everything in the folder except the checkpoint ``kept``."""
        for path in self.root.iterdir():
            if path != kept:
                remove_tree(Files(), path)

    def remove(self) -> None:
        """Deletes the folder, which frees its memory."""
        with suppress(OSError):
            remove_tree(Files(), self.root)


def run_token(files: Files, folder: Path) -> str:
    """Returns the random token that identifies the run in ``folder``; creates its file if it is missing. Rank 0 calls
    it.

    Raises:
        CheckpointError: the token file is damaged.
        OSError: the token file cannot be written.
    """
    make_run_folder(files, folder)
    if TOKEN not in files.names(folder):
        write_new(files, folder / TOKEN, [memoryview(secrets.token_hex(8).encode())])
        files.sync_folder(folder)
    token = bytes(read_all(files, folder, TOKEN, 64))
    if not _TOKEN_FORM.fullmatch(token):
        raise CheckpointError(
            f"{folder / TOKEN} is damaged; remove this file, and the engine creates the copies in memory again."
        )
    return token.decode()


def memory_folder(shared: Path, folder: Path, token: str) -> MemoryFolder:
    """Returns the memory folder of the run that saves its checkpoints into ``folder`` on disk. ``shared``: tmpfs folder
    that contains it. ``token``: random id from :func:`run_token`.
    """
    place = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return MemoryFolder(shared / f"trine-memory-{os.getuid()}-{place}-{token}")


_ANSWER = struct.Struct("<q")
"""Length of the answer in bytes, or the negated number of an error."""
_LINE = 1 << 16
_PATIENCE = 60.0
"""Seconds for an answer."""
_POLL_SECONDS = 0.02
"""Seconds that a closed server needs to stop at most."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Address of a host's file server, from which other hosts read its files."""

    address: str
    port: int
    name: str
    """Name of the host, for errors."""


class FileServer:
    """Server that sends checkpoint files in this host's memory to other hosts. It runs in separate threads until
    ``close``.
    """

    def __init__(self, address: str, secret: str, folder: Path, names: Sequence[str]) -> None:
        server = self

        class Handler(StreamRequestHandler):
            """One connection."""

            def handle(self) -> None:
                """Answers until the other side disconnects."""
                while line := self.rfile.readline(_LINE):
                    if not server.answer(self.connection, line):
                        return

        self._secret, self._folder, self._names, self._files = secret, folder, frozenset(names), Files()
        self._server = ThreadingTCPServer((address, 0), Handler, bind_and_activate=True)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="memory checkpoint", daemon=True
        )
        self._thread.start()

    def answer(self, link: socket.socket, line: bytes) -> bool:
        """Sends the requested bytes of a file, or an error number; returns False if the request has a wrong secret or
        file name.

        ``line``: request as a JSON object with this server's secret, file name, offset and length.
        """
        asked = json.loads(line)
        if not hmac.compare_digest(str(asked["secret"]), self._secret) or asked["name"] not in self._names:
            return False
        try:
            file = self._files.open(self._folder, asked["name"])
            try:
                size = max(0, min(asked["length"], self._files.size(file) - asked["offset"]))
                link.sendall(_ANSWER.pack(size))
                start = asked["offset"]
                while size:
                    sent = os.sendfile(link.fileno(), file, start, size)
                    start, size = start + sent, size - sent
            finally:
                self._files.close(file)
        except OSError as error:
            with suppress(OSError):
                link.sendall(_ANSWER.pack(-(error.errno or errno.EIO)))
        return True

    def close(self) -> None:
        """Stops the server and its threads."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class RemoteFiles(Files):
    """File operations that read a checkpoint from this host's memory, or over the network from other hosts. Descriptors
    of files on other hosts are negative.
    """

    def __init__(self, here: Path, held: Mapping[str, Sequence[Holder]], sizes: Mapping[str, int], secret: str) -> None:
        self._here, self._held, self._sizes, self._secret = here, held, sizes, secret
        self._numbers, self._remote = count(1), dict[int, str]()
        self._links: dict[Holder, socket.socket] = {}
        self._asking = threading.Lock()
        self.bytes_received = 0
        """Bytes received from other hosts."""

    def open(self, root: Path, name: str) -> int:
        """Opens the file ``name`` of the checkpoint, on this host or another one; returns its descriptor. ``root`` is
        not used.
        """
        if (self._here / name).exists():
            return super().open(self._here, name)
        if name not in self._held:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        number = -next(self._numbers)
        self._remote[number] = name
        return number

    def size(self, file: int) -> int:
        """Returns the size of an open file, on this host or another one, in bytes."""
        return super().size(file) if file >= 0 else self._sizes[self._remote[file]]

    def read_into(self, file: int, target: memoryview, offset: int) -> int:
        """Reads an open file into ``target``, beginning at byte ``offset``; returns the number of bytes read."""
        return super().read_into(file, target, offset) if file >= 0 else self._fetch(file, target, offset)

    def read_direct(self, file: int, target: memoryview, offset: int) -> int:
        """Calls ``read_into``, because files in memory have no page cache to bypass."""
        return self.read_into(file, target, offset)

    def is_cached(self, file: int, offset: int) -> bool:
        """Returns True, because all files are in memory."""
        return True

    def close(self, file: int) -> None:
        """Closes an open file of this host or another one."""
        if file >= 0:
            super().close(file)
        else:
            self._remote.pop(file, None)

    def hang_up(self) -> None:
        """Closes the connections to other hosts."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _fetch(self, file: int, target: memoryview, offset: int) -> int:
        name, problem = self._remote[file], OSError(errno.EIO, "no host has it")
        with self._asking:
            for holder in self._held[name]:
                try:
                    return self._ask(holder, name, target, offset)
                except OSError as error:
                    problem = OSError(error.errno or errno.EIO, f"{holder.name} does not answer ({error})")
                    if (link := self._links.pop(holder, None)) is not None:
                        link.close()
        raise problem

    def _ask(self, holder: Holder, name: str, target: memoryview, offset: int) -> int:
        if holder not in self._links:
            self._links[holder] = socket.create_connection((holder.address, holder.port), _PATIENCE)
        link = self._links[holder]
        asked = {"secret": self._secret, "name": name, "offset": offset, "length": len(target)}
        link.sendall(json.dumps(asked).encode() + b"\n")
        header = bytearray(_ANSWER.size)
        _fill(link, memoryview(header))
        (length,) = _ANSWER.unpack(header)
        if length < 0:
            raise OSError(-length, os.strerror(-length))
        _fill(link, target[:length])
        self.bytes_received += length
        return int(length)


def _fill(link: socket.socket, target: memoryview) -> None:
    """Receives exactly ``len(target)`` bytes."""
    while target:
        got = link.recv_into(target)
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        target = target[got:]
