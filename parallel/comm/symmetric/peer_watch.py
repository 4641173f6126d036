"""Who of the ranks has ended: a thread that the operating system wakes, and a word that kernels look at.

    a rank ends, however    the kernel of the system closes its sockets
    every other rank        poll returns at once, the thread writes ended[index] = 1
    a kernel that waits     looks at the word every so often, and gives up

It costs nothing while nobody ends. Ranks of other hosts are not watched; their end is found by time.
"""

import os
import select
import threading
from collections.abc import Mapping

from torch import Tensor


class PeerEndedError(RuntimeError):
    """What was waited for cannot come: the rank that had to send it has ended."""


class PeerWatch:
    """Watches the other ranks of an axis until ``close``.

    Args:
        links: by index of a rank, the descriptor of a socket whose other end that rank alone holds.
        ended: int32 [W] in memory of the host, zeros; a word is set when its rank has ended, or closed its end.
    """

    def __init__(self, links: Mapping[int, int], ended: Tensor) -> None:
        self._ended, self._indices = ended, {link: index for index, link in links.items()}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="trine-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; call it before the links are closed. A second call does nothing."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def _run(self) -> None:
        poll = select.poll()
        for link in (self._wake, *self._indices):
            poll.register(link, select.POLLIN | select.POLLRDHUP)
        while True:
            for link, _ in poll.poll():
                if link == self._wake:
                    return
                poll.unregister(link)
                self._ended[self._indices[link]] = 1
