"""Memory of equal size on every rank of an axis, as a backend gives it, and how much a kernel needs of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from engine.kernels.device import is_host

_LOOKS_A_SECOND: Final = (1e4, 1e6)
"""Of an interpreted kernel at memory of its host, and of a GPU's at that of a peer, about."""
_WORD: Final = 4
_ALIGNED: Final = 256
"""Bytes; parts of the memory begin at multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBytes:
    """Memory of equal size on every rank of an axis, which all of them can write; zeros at first."""

    parts: tuple[Tensor, ...]
    """Each rank's part, uint8 [n], as this rank reaches it."""
    index: int
    """Of this rank."""
    close: Callable[[], None]
    """Release the memory; a second call does nothing."""
    multicast: int = 0
    """Address of all parts at once, for loads that add and stores that reach all (NVLink SHARP); 0: there is none."""
    links: Mapping[int, int] = field(default_factory=dict)
    """By index of another rank, the descriptor of a socket that the system closes when that rank ends; ranks without
    one are not watched."""

    @property
    def own(self) -> Tensor:
        """This rank's part."""
        return self.parts[self.index]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of each rank's part, as this rank reaches it."""
        return tuple(part.data_ptr() for part in self.parts)

    @property
    def looks_a_second(self) -> float:
        """How often a kernel can look at a signal, about."""
        return _LOOKS_A_SECOND[not is_host(self.own.device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """How much a rank can send to another in one call."""

    ranks: int
    capacity: int
    """Bytes."""
    most: int
    """Tiles."""

    @property
    def slots(self) -> int:
        """Bytes of all slots of a rank."""
        return 2 * self.ranks * padded_bytes(self.capacity)

    @property
    def total(self) -> int:
        """Bytes of a rank's part."""
        return self.slots + self.arrivals

    @property
    def arrivals(self) -> int:
        """Bytes of the arrivals of a rank."""
        return padded_bytes(2 * _WORD * self.ranks * self.most)


def virtual_bytes(ranks: int, size: int, device: torch.device) -> tuple[SharedBytes, ...]:
    """Memory of ranks that are parts of this process and share ``device``: an allocation for each of them."""
    parts = tuple(torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks))
    return tuple(SharedBytes(parts=parts, index=index, close=_nothing) for index in range(ranks))


def _nothing() -> None:
    """Memory that goes with its tensors."""


def padded_bytes(size: int) -> int:
    """``size`` rounded up to where the next part of the memory may begin."""
    return -(-size // _ALIGNED) * _ALIGNED
