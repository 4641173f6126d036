"""Who of the ranks has ended: a thread that the operating system wakes, and a word that kernels look at.

    a rank ends, however    the system closes its sockets, and tells those who hold a descriptor of its process
    every other rank        poll returns at once, the thread writes ended[index] = 1, of the next one that ends 2, ..
    a kernel that waits     looks at the word every so often, and gives up

The descriptor is for a rank that leaves children behind, such as workers that load data: they keep its sockets open.
The socket is for a rank that closes its engine and goes on, and where processes are hidden from each other. It costs
nothing while nobody ends. Ranks of other hosts are not watched; their end is found by time.
"""

import os
import select
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor


class PeerEndedError(RuntimeError):
    """What was waited for cannot come: the rank that had to send it has ended."""


class PeerWatch:
    """Watches the other ranks of an axis until ``close``.

    Args:
        links: by index of a rank, the descriptor of a socket whose other end that rank alone holds.
        ended: int32 [W] in memory of the host, zeros; a word is set when its rank has ended, or closed its end, to how
            many had by then.
    """

    def __init__(self, links: Mapping[int, int], ended: Tensor) -> None:
        self._ended, self._indices = ended, {link: index for index, link in links.items()}
        self._processes = {process: index for index, link in links.items() for process in _process_of(link)}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="trine-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; call it before the links are closed. A second call does nothing."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            for descriptor in (self._wake, *self._processes):
                os.close(descriptor)

    def _run(self) -> None:
        poll, indices, count = select.poll(), self._indices | self._processes, 0
        for descriptor in (self._wake, *indices):
            poll.register(descriptor, select.POLLIN | select.POLLRDHUP)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    return
                poll.unregister(descriptor)
                if self._ended[indices[descriptor]] == 0:
                    count += 1
                    self._ended[indices[descriptor]] = count


def _process_of(link: int) -> list[int]:
    """A descriptor of the process at the other end, or none where it is not visible from here."""
    with suppress(OSError), socket.socket(fileno=os.dup(link)) as other:
        process, _, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return [os.pidfd_open(process)] if process > 0 else []
    return []
