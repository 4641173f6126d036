"""Shared memory of the ranks on one host, and a barrier in which they wait in the kernel instead of spinning.

    exchange   host, address, secret   all on one host? then every rank knows where the others listen
    connect    to lower indices        Unix sockets in the abstract namespace: no file is created
    accept     higher indices          only ranks that present the secret of the exchange
    hand out   memory of index 0       memfd, an unnamed file that ends with the last process holding it
    hand out   bells                   eventfds: who waits for a rank in the barrier gives it one to ring

So a rank that ends leaves no files, and its closed sockets inform the others at once. Eventfds signal arrival, because
a byte through a socket makes the kernel wake the receiver on the sender's processor, where both run in turn. No torch.
"""

import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

Exchange = Callable[[bytes], Sequence[bytes]]
"""Function that all-gathers bytes of equal length, in order of index."""

_PART = 32
"""Bytes of each of the three parts of a rank's announcement: host, address, secret."""
NO_HOST = bytes(_PART)
"""Host identity of a rank that shares no memory."""
_SETUP_SECONDS = 30.0
"""Timeout for a setup step that a peer has done already or does next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """Connections to the other ranks of an axis: sockets, eventfds that this rank writes and eventfds that it reads,
    each in a dict by index of the other rank.
    """

    sockets: dict[int, socket.socket] = field(default_factory=dict)
    """Connected Unix sockets; the system closes them when a rank ends."""
    rung: dict[int, int] = field(default_factory=dict)
    """Eventfds that this rank writes to signal other ranks."""
    heard: dict[int, int] = field(default_factory=dict)
    """Eventfds that this rank reads for signals of other ranks."""

    def close(self) -> None:
        """Closes all sockets and eventfds."""
        for link in self.sockets.values():
            link.close()
        for bell in (*self.rung.values(), *self.heard.values()):
            os.close(bell)
        for found in (self.sockets, self.rung, self.heard):
            found.clear()


class HostBarrier:
    """Shared memory of the ranks of one host, with a dissemination barrier (Hensgen, Finkel and Manber 1988).

    The barrier has log2(ranks) rounds d = 1, 2, 4, ..: index i signals i + d and waits for i - d, modulo the number of
    ranks.

    Args:
        links: sockets to every other rank, and the eventfds that ranks signal; ``close`` closes them.
        memory: the shared memory, the same on all ranks.
        seconds: timeout of waiting for a rank.
    """

    def __init__(self, index: int, size: int, links: RankLinks, memory: mmap.mmap, seconds: float) -> None:
        self.index, self.size = index, size
        self.memory = memory
        """The shared memory until ``close``; it is unmapped once no tensor uses it either."""
        self._links, self._seconds = links, seconds
        self._leave = weakref.finalize(self, links.close)
        self._told = [(told, links.rung[told]) for told in told_ranks(index, size)]
        self._heard = [(heard, links.heard[heard], _poll(links, heard)) for heard in heard_ranks(index, size)]

    @property
    def descriptors(self) -> dict[int, int]:
        """File descriptor of the socket to each other rank, by index; the connection closes when that rank ends."""
        return {index: link.fileno() for index, link in self._links.sockets.items()}

    def arrive(self) -> None:
        """Signals that this rank has reached the barrier; the caller must call ``meet`` next.

        Raises:
            RuntimeError: this rank has closed the barrier.
        """
        self._tell(*self._told[0])

    def meet(self) -> None:
        """Blocks until all ranks have arrived; their earlier writes to shared memory are then visible.

        Raises:
            RuntimeError: a rank has ended or did not arrive in time.
        """
        self._hear(*self._heard[0])
        for told, heard in zip(self._told[1:], self._heard[1:], strict=True):
            self._tell(*told)
            self._hear(*heard)

    def close(self) -> None:
        """Closes this rank's sockets and eventfds and releases the shared memory. Waiting ranks then raise an error."""
        self._leave()
        vars(self).pop("memory", None)

    def _tell(self, index: int, bell: int) -> None:
        self._check_open(index)
        os.eventfd_write(bell, 1)  # of one that has ended, who hears it fails, and then whoever hears that one

    def _hear(self, index: int, bell: int, ready: select.poll) -> None:
        self._check_open(index)
        events = [descriptor for descriptor, _ in ready.poll(round(1e3 * self._seconds))]
        if bell in events:
            os.eventfd_read(bell)
        elif events:
            raise RuntimeError(f"index {index} of this axis has ended or given up (connection closed)")
        else:
            raise RuntimeError(f"index {index} of this axis did not arrive within {self._seconds:g} s")

    def _check_open(self, index: int) -> None:
        if not self._leave.alive:  # its descriptors may belong to other files by now
            raise RuntimeError(f"this rank has left index {index} of this axis")


def told_ranks(index: int, size: int) -> list[int]:
    """Returns, for each round of a barrier of ``size`` ranks, the index that rank ``index`` signals."""
    return [(index + distance) % size for distance in _distances(size)]


def heard_ranks(index: int, size: int) -> list[int]:
    """Returns, for each round of a barrier of ``size`` ranks, the index that rank ``index`` waits for."""
    return [(index - distance) % size for distance in _distances(size)]


def _distances(size: int) -> list[int]:
    return [1 << turn for turn in range((size - 1).bit_length())]


def _poll(links: RankLinks, index: int) -> select.poll:
    """Returns a poll that is ready once the rank of ``index`` has signalled or ended."""
    ready = select.poll()
    ready.register(links.heard[index], select.POLLIN)
    ready.register(links.sockets[index], select.POLLIN)
    return ready


def open_neighbours(
    index: int, size: int, host: bytes, shared_bytes: int, seconds: float, exchange: Exchange
) -> HostBarrier | None:
    """Opens memory, with a barrier, that all ``size`` ranks of an axis share; every rank calls it.

    Returns None on all ranks if they run on several hosts or cannot share memory.

    Args:
        index: index of this rank on the axis.
        host: this host's :func:`host_identity`; if any rank passes ``NO_HOST``, no rank shares.
        shared_bytes: size of the memory, the same on all ranks.
        seconds: timeout of a rank's wait in the barrier.
        exchange: callback that all-gathers bytes of equal length over the axis.
    """
    opening = _Opening(index, size, host, shared_bytes)
    try:
        opening.peers = exchange(opening.listen())
        if not opening.has_one_host() or not all(map(any, exchange(bytes([opening.connect()])))):
            return None
        memory = opening.share()
        if not all(map(any, exchange(bytes([memory is not None])))) or memory is None:
            return None
        links, opening.links = opening.links, RankLinks()
        return HostBarrier(index, size, links, memory, seconds)
    finally:
        opening.close()


class _Opening:
    """The steps of :func:`open_neighbours` on one rank. They return failures, so that all ranks go on."""

    def __init__(self, index: int, size: int, host: bytes, shared_bytes: int) -> None:
        self.peers: Sequence[bytes] = ()
        self.links = RankLinks()
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
                link = self.links.sockets[index] = socket.socket(socket.AF_UNIX)
                link.settimeout(_SETUP_SECONDS)
                link.connect(b"\0" + peer[_PART : 2 * _PART])
                link.send(peer[2 * _PART :] + struct.pack("i", self._index))
            return True
        return False

    def share(self) -> mmap.mmap | None:
        """Accept all higher indices, which have connected by now, map the memory of index 0, and hand out bells."""
        with suppress(OSError, ValueError):
            while len(self.links.sockets) < self._size - 1:
                self._accept()
            descriptor = self._receive(0) if self._index else self._send_memory()
            try:
                memory = mmap.mmap(descriptor, self._shared_bytes)
            finally:
                os.close(descriptor)
            self._hand_out_bells()
            return memory
        self.close()  # closed links keep the other ranks from waiting for this one
        return None

    def close(self) -> None:
        """Close the listener and all links that have not been handed over."""
        self.links.close()
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
            self.links.sockets[struct.unpack("i", told[_PART:])[0]] = link
        else:
            link.close()

    def _send_memory(self) -> int:
        descriptor = os.memfd_create("trine")
        os.ftruncate(descriptor, self._shared_bytes)
        for link in self.links.sockets.values():
            socket.send_fds(link, [b"\0"], [descriptor])
        return descriptor

    def _hand_out_bells(self) -> None:
        for index in heard_ranks(self._index, self._size):
            bell = self.links.heard[index] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
            socket.send_fds(self.links.sockets[index], [b"\0"], [bell])
        for index in told_ranks(self._index, self._size):
            self.links.rung[index] = self._receive(index)

    def _receive(self, index: int) -> int:
        _, descriptors, _, _ = socket.recv_fds(self.links.sockets[index], 1, 1)
        if not descriptors:
            raise OSError(f"index {index} has ended")
        return descriptors[0]


def host_identity(shares: bool = True) -> bytes:
    """Returns 32 bytes that are equal for processes of the same user on the same running host.

    Returns ``NO_HOST`` if ``shares`` is False, or if this host cannot share memory.
    """
    if not shares:
        return NO_HOST
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not (hasattr(os, "memfd_create") and hasattr(os, "eventfd") and hasattr(socket, "AF_UNIX") and boot.exists()):
        return NO_HOST
    return sha256(f"{socket.gethostname()} {boot.read_text(encoding='ascii')} {os.getuid()}".encode()).digest()
