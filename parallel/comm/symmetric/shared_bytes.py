"""Memory of equal size on every rank of an axis, as a backend gives it, and how much a kernel needs of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

_WORD: Final = 4
_ALIGNED: Final = 256
"""Bytes; parts of the memory begin at multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBytes:
    """Memory of equal size on every rank of an axis, which all of them can write; zeros at first."""

    own: Tensor
    """This rank's part, uint8 [n]."""
    addresses: tuple[int, ...]
    """Of each rank's part, as this rank reaches it."""
    index: int
    """Of this rank."""
    looks_a_second: float
    """How often a kernel can look at a signal, about."""
    close: Callable[[], None]
    """Release the memory; a second call does nothing."""
    multicast: int = 0
    """Address of all parts at once, for loads that add and stores that reach all (NVLink SHARP); 0: there is none."""
    links: Mapping[int, int] = field(default_factory=dict)
    """By index of another rank, the descriptor of a socket that the system closes when that rank ends; ranks without
    one are not watched."""


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


def padded_bytes(size: int) -> int:
    """``size`` rounded up to where the next part of the memory may begin."""
    return -(-size // _ALIGNED) * _ALIGNED
