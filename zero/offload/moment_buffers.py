"""Host memory for the buckets that are read, updated or written: a few pages that all buckets share."""

from collections import deque
from typing import Protocol

from torch import Tensor

from engine.zero.offload.block_file import sector_memory


class PageUse(Protocol):
    """What still needs a page."""

    def result(self) -> object:
        """Wait until it has ended."""


class MomentBuffers:
    """``count`` pages of ``size`` bytes; one that is being written is free afterwards."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._pages = [sector_memory(size) for _ in range(count)]
        self._free = list(self._pages)
        self._busy: deque[tuple[Tensor, PageUse]] = deque()

    @property
    def spare(self) -> bool:
        """A page is free, or will be when a write ends."""
        return bool(self._free or self._busy)

    def take(self) -> Tensor:
        """A page, uint8 [size]; waits for the oldest write if none is free, and raises its failure."""
        if not self._free:
            page, write = self._busy.popleft()
            write.result()
            return page
        return self._free.pop()

    def give_back(self, page: Tensor, write: PageUse) -> None:
        """Free a page when ``write`` has ended."""
        self._busy.append((page, write))

    def free_all(self) -> None:
        """Take back every page; nothing is read or written any more."""
        self._busy.clear()
        self._free = list(self._pages)
