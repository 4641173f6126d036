"""Rules of merges: when pushes are due, and when a life may take a version over.

    average, diloco, bsp    one push of every live site                       a newer version, after the own push
    ssp                     every push at once                                while its clock is at most s ahead
    async                   every push at once                                always
    quorum                  ``least`` sites and a grace, or all live sites    a newer version, after the own push

The first merge of average, diloco and bsp waits until ``sites`` sites have joined; no rule merges while fewer than
``least`` sites are live. A merge takes at most one push of a site, the oldest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from engine.outer.messages import PushKey
from engine.outer.store.members import Life, Members

ADAPTIVE = "adaptive"
_REMEMBERED = 20
"""Merges whose spreads decide the adaptive grace."""
_FIRST_GRACE = 1.0
"""Seconds of the adaptive grace before the first merge."""
_GRACE_OF_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class WaitingPush:
    """Push that has arrived from all ranks of its training site and waits for a merge."""

    key: PushKey
    site: int
    arrived: float
    """Time of its last body."""


@dataclass(frozen=True, slots=True)
class FragmentView:
    """Read-only state of one fragment (group of tensors) for the decisions of a merge rule."""

    index: int
    version: int
    waiting: Sequence[WaitingPush]
    """Complete pushes, in the order of their completion."""
    under_way: frozenset[int]
    """Lives with a push that is in no merge."""
    spreads: Sequence[float]
    """Seconds between the first and the last push of each merge."""

    def oldest(self) -> dict[int, WaitingPush]:
        """Returns each training site's longest-waiting push, by number of the site."""
        found: dict[int, WaitingPush] = {}
        for push in self.waiting:
            found.setdefault(push.site, push)
        return found


class MergeRule(Protocol):
    """Rule that decides when the store merges pushes, and when a site may download the result."""

    def due(self, fragment: FragmentView, members: Members, now: float) -> tuple[PushKey, ...]:
        """Returns the keys of the pushes of ``fragment`` to merge at time ``now`` (seconds); empty if no merge is due.

        Args:
            members: runs of the training sites, with their progress.
        """

    def answerable(self, fragment: FragmentView, members: Members, life: Life) -> bool:
        """Returns True if ``life``, one run of a training site, may download the newest version of ``fragment`` now.

        Args:
            members: runs of all training sites, with their progress.
        """


def make_merge_rule(settings: Mapping[str, Any]) -> MergeRule:
    """Returns the merge rule that ``settings["rule"]`` names: average, diloco, bsp, ssp, async or quorum."""
    least = int(settings["least"])
    match settings["rule"]:
        case "quorum":
            grace = settings["grace"]
            return _Quorum(least, None if grace == ADAPTIVE else float(grace))
        case "ssp":
            return _Bounded(least, int(settings["staleness"]))
        case "async":
            return _Bounded(least, None)
    return _Together(least, int(settings["sites"]))


@dataclass(frozen=True, slots=True)
class _Together:
    """Rule by which all live sites meet."""

    least: int
    sites: int

    def due(self, fragment: FragmentView, members: Members, now: float) -> tuple[PushKey, ...]:
        live, oldest = {life.site for life in members.live()}, fragment.oldest()
        started = fragment.version > 0 or members.sites() >= self.sites
        if not started or len(live) < self.least or not live <= oldest.keys():
            return ()
        return _keys(oldest)

    def answerable(self, fragment: FragmentView, members: Members, life: Life) -> bool:
        return _has_no_push_outside(fragment, life)


@dataclass(frozen=True, slots=True)
class _Bounded:
    """Rule by which nobody waits for a merge; with ``staleness``, the fastest waits for the slowest live site."""

    least: int
    staleness: int | None

    def due(self, fragment: FragmentView, members: Members, now: float) -> tuple[PushKey, ...]:
        if not fragment.waiting or len(list(members.live())) < self.least:
            return ()
        return (fragment.waiting[0].key,)

    def answerable(self, fragment: FragmentView, members: Members, life: Life) -> bool:
        own = life.progress[fragment.index]
        if fragment.version <= own.taken:
            return False
        slowest = members.minimum_clock(fragment.index)
        return self.staleness is None or slowest is None or own.clock - slowest <= self.staleness


@dataclass(frozen=True, slots=True)
class _Quorum:
    """Rule by which ``least`` sites, and all that come within a grace, meet."""

    least: int
    grace: float | None
    """Seconds; None: from the spreads of earlier merges."""

    def due(self, fragment: FragmentView, members: Members, now: float) -> tuple[PushKey, ...]:
        oldest = fragment.oldest()
        if len(oldest) < self.least:
            return ()
        opened = sorted(push.arrived for push in oldest.values())[self.least - 1]
        live = {life.site for life in members.live()}
        return _keys(oldest) if live <= oldest.keys() or now - opened >= self._seconds(fragment) else ()

    def answerable(self, fragment: FragmentView, members: Members, life: Life) -> bool:
        return _has_no_push_outside(fragment, life)

    def _seconds(self, fragment: FragmentView) -> float:
        if self.grace is not None:
            return self.grace
        spreads = fragment.spreads[-_REMEMBERED:]
        return _GRACE_OF_SPREAD * median(spreads) if spreads else _FIRST_GRACE


def _has_no_push_outside(fragment: FragmentView, life: Life) -> bool:
    """Returns True if there is a newer version than the life's own, and the life's last push is in it."""
    own = life.progress[fragment.index]
    starts = fragment.version >= 0 and own.taken < 0
    newer = fragment.version > own.taken and life.number not in fragment.under_way
    return starts or own.merged_in > own.taken or newer


def _keys(pushes: Mapping[int, WaitingPush]) -> tuple[PushKey, ...]:
    return tuple(pushes[site].key for site in sorted(pushes))
