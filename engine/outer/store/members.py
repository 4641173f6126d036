"""Lives of sites: a life is one run of a site's processes, with a lease, and with a clock for each fragment.

    join -> live -- no message for the seconds of a lease --> lost -- a message --> live
                 \\- leave, or a newer life of the same site --> ended

Merges and clocks wait for live sites alone. A lost life may come back with its push; an ended one may not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.outer.messages import RankLayout, StoreRefusedError


@dataclass(slots=True)
class Progress:
    """Progress of one run of a training site in one fragment (group of tensors), as counters of its pushes and
    downloads.
    """

    clock: int = 0
    """Merged pushes, plus those that the life has been credited with when it joined or came back."""
    next: int = 0
    """``seq`` of the next push."""
    merged: int = -1
    """Highest ``seq`` in a merge; -1: none."""
    merged_in: int = -1
    """Version that the merge of push ``merged`` made."""
    staleness: int = 0
    """Versions that other sites made between the base of that push and its merge."""
    hashes: list[str] = field(default_factory=list)
    """Hashes of the bodies of that push, in the order of ranks."""
    offered: int = -1
    """Version that is retained for this life, also while it is lost."""
    taken: int = -1
    """Newest version that all ranks of the life have; -1: none."""
    pulled: list[int] = field(default_factory=list)
    """Ranks that have pulled the offered version."""


@dataclass(slots=True)
class Life:
    """One run of a training site's processes, with its lease and its progress in each fragment."""

    number: int
    site: int
    ranks: int
    progress: tuple[Progress, ...]
    """Progress in each fragment."""
    layouts: dict[int, RankLayout] = field(default_factory=dict)
    """Layouts by rank."""
    expires: float = 0.0
    """Time at which the lease ends."""
    lost: bool = False
    """True after the lease has ended, until the next message."""
    ended: bool = False
    """True after ``leave``, or after a newer life of the same site has joined."""

    @property
    def live(self) -> bool:
        """True if merges wait for pushes of this run: it is neither lost nor ended."""
        return not self.lost and not self.ended

    @property
    def registered(self) -> bool:
        """True once all ranks of the site have registered their elements."""
        return len(self.layouts) == self.ranks


@dataclass(slots=True)
class Members:
    """All runs (lives) of training sites by number, and for each site the number of data rows trained up to its last
    merged push.
    """

    lives: dict[int, Life] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)

    def live(self) -> Iterator[Life]:
        """Yields the lives (runs of sites) that are neither lost nor ended."""
        return (life for life in self.lives.values() if life.live)

    def sites(self) -> int:
        """Returns the number of training sites that have joined at least once."""
        return len({life.site for life in self.lives.values()})

    def minimum_clock(self, fragment: int, apart: Life | None = None) -> int | None:
        """Returns the lowest clock (number of merged pushes of ``fragment``) of all live runs of sites; None without
        live runs.

        ``apart``: run that is left out.
        """
        clocks = (life.progress[fragment].clock for life in self.live() if life is not apart)
        return min(clocks, default=None)

    def credit(self, life: Life) -> None:
        """Increases the clock (number of merged pushes) of ``life`` in each fragment to the lowest clock of the other
        live sites.

        Other sites then do not wait for pushes that this run has missed.
        """
        for fragment, own in enumerate(life.progress):
            slowest = self.minimum_clock(fragment, apart=life)
            own.clock = max(own.clock, own.clock if slowest is None else slowest)

    def of_site(self, site: int) -> Iterator[Life]:
        """Yields all runs (lives) of site number ``site``, also ended ones."""
        return (life for life in self.lives.values() if life.site == site)

    def find(self, number: int) -> Life:
        """Returns the run of a site (life) with this number.

        Raises:
            StoreRefusedError: there is no such life (status 404), or it has ended (410).
        """
        life = self.lives.get(number)
        if life is None:
            raise StoreRefusedError(
                f"life {number} is not known to this store, and every site joins first; join again.", 404
            )
        if life.ended:
            newer = max(other.number for other in self.of_site(life.site))
            reason = f"life {newer} of site {life.site} has replaced it" if newer > number else "it has left"
            raise StoreRefusedError(
                f"life {number} has ended, since {reason}; start it again, with a number that no other site has.", 410
            )
        return life
