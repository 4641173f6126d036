"""Shared memory of the ranks on one host, and a barrier in which they wait in the kernel instead of spinning.

    exchange   host, address, secret   all on one host? then every rank knows where the others listen
    connect    to lower indices        Unix sockets in the abstract namespace: no file is created
    accept     higher indices          only those that present the secret of the exchange
    hand out   memory of index 0       memfd, an unnamed file that ends with the last process holding it

So nothing is left behind however a rank ends, and the kernel closes its sockets, which informs the others at once. No
torch here.
"""

import mmap
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

Exchange = Callable[[bytes], Sequence[bytes]]
"""Sends this rank's bytes to all ranks and returns those of all, by index; all ranks give the same number of bytes."""

_PART = 32
"""Bytes of each of the three parts of a rank's announcement: host, address, secret."""
NO_HOST = bytes(_PART)
"""Replaces the host's identity for a rank that shares no memory."""
_SETUP_SECONDS = 30.0
"""Timeout for a setup step that a peer has done already or does next."""


class HostBarrier:
    """Memory that all ranks see, and a barrier in which a rank sends and receives log2(ranks) bytes.

    The dissemination barrier of Hensgen, Finkel and Manber 1988 ("Two algorithms for barrier synchronization"): in
    rounds d = 1, 2, 4, .. < ranks, index i signals i + d and waits for i - d; a signal means that its sender has
    arrived and has received all signals of the rounds before.

    Args:
        links: a connected stream socket to every other rank, by its index; ``close`` closes them.
        memory: the shared memory, the same on all ranks.
        seconds: timeout of waiting for a rank.
    """

    def __init__(
        self, index: int, size: int, links: dict[int, socket.socket], memory: mmap.mmap, seconds: float
    ) -> None:
        self.index, self.size = index, size
        self.memory = memory
        """The shared memory until ``close``; it is unmapped once no tensor uses it either."""
        self._links, self._seconds = links, seconds
        self._leave = weakref.finalize(self, _close, tuple(links.values()))
        distances = [1 << turn for turn in range((size - 1).bit_length())]
        self._told = [(index + distance) % size for distance in distances]
        self._heard = [(index - distance) % size for distance in distances]
        for link in links.values():
            link.settimeout(None)  # Python's own timeout needs two system calls for each byte
            link.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(int(seconds * 1e6), 10**6))
            )

    @property
    def descriptors(self) -> dict[int, int]:
        """By index, that of the link to each other rank, which the system closes when that rank ends."""
        return {index: link.fileno() for index, link in self._links.items()}

    def arrive(self) -> None:
        """Signal that this rank has arrived at the barrier; ``meet`` must follow.

        Raises:
            RuntimeError: a rank has ended.
        """
        self._tell(self._told[0])

    def meet(self) -> None:
        """Return when all ranks have arrived; what they wrote before can then be read.

        Raises:
            RuntimeError: a rank has ended or did not arrive in time.
        """
        self._hear(self._heard[0])
        for told, heard in zip(self._told[1:], self._heard[1:], strict=True):
            self._tell(told)
            self._hear(heard)

    def close(self) -> None:
        """Leave the barrier, which fails for every rank that waits for this one. Garbage collection closes it too."""
        self._leave()
        vars(self).pop("memory", None)

    def _tell(self, index: int) -> None:
        try:
            self._links[index].send(b"\0")
        except OSError as error:
            raise RuntimeError(f"index {index} of this axis has ended or given up ({error.strerror})") from error

    def _hear(self, index: int) -> None:
        try:
            if self._links[index].recv(1):
                return
        except BlockingIOError:
            raise RuntimeError(f"index {index} of this axis did not arrive within {self._seconds:g} s") from None
        except OSError as error:
            raise RuntimeError(f"index {index} of this axis has ended or given up ({error.strerror})") from error
        raise RuntimeError(f"index {index} of this axis has ended or given up (connection closed)")


def _close(links: Iterable[socket.socket]) -> None:
    for link in links:
        link.close()


def open_neighbours(
    index: int, size: int, host: bytes, shared_bytes: int, seconds: float, exchange: Exchange
) -> HostBarrier | None:
    """Set up the barrier; None on all ranks if they are on several hosts or one of them cannot take part.

    Every rank calls it; it calls ``exchange`` up to three times.

    Args:
        host: identity of this rank's host, from :func:`host_identity`; ``NO_HOST`` keeps all ranks from sharing.
        shared_bytes: size of the memory, the same on all ranks.
        seconds: timeout of a barrier.
    """
    opening = _Opening(index, size, host, shared_bytes)
    try:
        opening.peers = exchange(opening.listen())
        if not opening.has_one_host() or not all(map(any, exchange(bytes([opening.connect()])))):
            return None
        memory = opening.share()
        if not all(map(any, exchange(bytes([memory is not None])))) or memory is None:
            return None
        links, opening.links = opening.links, {}
        return HostBarrier(index, size, links, memory, seconds)
    finally:
        opening.close()


class _Opening:
    """The steps of :func:`open_neighbours` on one rank. They return failures, so that all ranks go on."""

    def __init__(self, index: int, size: int, host: bytes, shared_bytes: int) -> None:
        self.peers: Sequence[bytes] = ()
        self.links: dict[int, socket.socket] = {}
        self._index, self._size, self._host, self._shared_bytes = index, size, host, shared_bytes
        self._listener: socket.socket | None = None
        self._word = b""

    def listen(self) -> bytes:
        """Host, address and secret of this rank; zeros if it cannot take part."""
        address, word = f"trine-{secrets.token_hex(_PART)}".encode()[:_PART], secrets.token_bytes(_PART)
        if self._host != NO_HOST:
            with suppress(OSError):
                self._listener = socket.socket(socket.AF_UNIX)
                self._listener.bind(b"\0" + address)
                self._listener.listen(self._size)
                self._word = word
                return self._host + address + word
        return bytes(3 * _PART)

    def has_one_host(self) -> bool:
        """True if all ranks, including this one, can take part and run on one host."""
        hosts = {peer[:_PART] for peer in self.peers}
        return len(hosts) == 1 and NO_HOST not in hosts

    def connect(self) -> bool:
        """Connect to all lower indices; their kernel accepts, so no rank waits."""
        with suppress(OSError):
            for index, peer in enumerate(self.peers[: self._index]):
                link = self.links[index] = socket.socket(socket.AF_UNIX)
                link.settimeout(_SETUP_SECONDS)
                link.connect(b"\0" + peer[_PART : 2 * _PART])
                link.send(peer[2 * _PART :] + struct.pack("i", self._index))
            return True
        return False

    def share(self) -> mmap.mmap | None:
        """Accept all higher indices, which have connected by now, and map the same memory on all ranks."""
        with suppress(OSError, ValueError):
            while len(self.links) < self._size - 1:
                self._accept()
            descriptor = self._receive_memory() if self._index else self._send_memory()
            try:
                return mmap.mmap(descriptor, self._shared_bytes)
            finally:
                os.close(descriptor)
        self.close()  # closed links keep the other ranks from waiting for this one
        return None

    def close(self) -> None:
        """Close the listener and all links that have not been handed over."""
        _close(self.links.values())
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        """Accept one connection if it presents the secret, since every process of the host can see the address."""
        assert self._listener is not None
        self._listener.settimeout(_SETUP_SECONDS)
        link, _ = self._listener.accept()
        link.settimeout(_SETUP_SECONDS)
        told = link.recv(_PART + struct.calcsize("i"))
        if told[:_PART] == self._word:
            self.links[struct.unpack("i", told[_PART:])[0]] = link
        else:
            link.close()

    def _send_memory(self) -> int:
        descriptor = os.memfd_create("trine")
        os.ftruncate(descriptor, self._shared_bytes)
        for link in self.links.values():
            socket.send_fds(link, [b"\0"], [descriptor])
        return descriptor

    def _receive_memory(self) -> int:
        _, descriptors, _, _ = socket.recv_fds(self.links[0], 1, 1)
        if not descriptors:
            raise OSError("index 0 has ended")
        return descriptors[0]


def host_identity() -> bytes:
    """Equal for processes of one user on one booted system; ``NO_HOST`` if memory cannot be shared this way."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not (hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX") and boot.exists()):
        return NO_HOST
    return sha256(f"{socket.gethostname()} {boot.read_text(encoding='ascii')} {os.getuid()}".encode()).digest()
