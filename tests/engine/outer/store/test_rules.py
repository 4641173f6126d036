"""Rules of merges: when pushes are merged, and when a site may take a version over."""

from typing import Any

import pytest

from engine.outer.messages import PushShare
from engine.outer.store.records import Event
from engine.outer.store.store import Store
from tests.engine.outer.store.sites import SiteOfTests, data_parallel_layout, settings_of, values_of


class Clock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Meeting:
    """Store with sites that have taken the initial weights over; lists the sites of each merge."""

    def __init__(self, count: int, **outer: Any) -> None:
        self.clock, self.merges = Clock(), list[list[int]]()
        self.settings = settings_of(period=10, lease=10.0, **outer)
        self.store = Store(self.settings, clock=self.clock)
        self.store.listeners.append(self._note)
        self.lives: dict[int, int] = {}
        self.sites = [self.join(site) for site in range(count)]
        self.sites[0].seed(values_of(99))
        for site in self.sites:
            assert site.take() is not None

    def _note(self, event: Event) -> None:
        if event["kind"] == "merge":
            self.merges.append([self.lives[push["life"]] for push in event["pushes"]])

    def join(self, number: int) -> SiteOfTests:
        """Starts a life of a site."""
        site = SiteOfTests(self.store, self.settings, number)
        self.lives[site.life] = number
        return site

    def push(self, *numbers: int) -> None:
        """Pushes from sites, in order."""
        for number in numbers:
            self.sites[number].push(values_of(number))

    def wait(self, seconds: float, *alive: int) -> None:
        """Moves the clock; the sites ``alive`` renew their leases."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 1.0)
            for number in alive:
                self.store.renew(self.sites[number].life)
            self.store.tick()


@pytest.mark.parametrize("rule", ["average", "diloco"])
def test_a_merge_waits_for_every_live_site(rule: Any) -> None:
    meeting = Meeting(3, rule=rule, sites=3)
    meeting.push(2, 0)
    assert meeting.merges == [] and meeting.sites[0].take() is None
    meeting.push(1)
    assert meeting.merges == [[0, 1, 2]]
    assert all(site.take() is not None and site.take() is None for site in meeting.sites)


def test_the_first_merge_waits_until_all_sites_have_joined() -> None:
    meeting = Meeting(2, rule="diloco", sites=3)
    meeting.push(0, 1)
    assert meeting.merges == []
    third = meeting.join(2)
    assert third.take() is not None
    third.push(values_of(2))
    assert meeting.merges == [[0, 1, 2]]


def test_nobody_waits_for_a_site_that_is_silent_and_it_may_come_back() -> None:
    meeting = Meeting(3, rule="diloco", sites=3)
    meeting.push(0, 1)
    meeting.wait(9.0, 0, 1)
    assert meeting.merges == []
    meeting.wait(2.0, 0, 1)
    assert meeting.merges == [[0, 1]]
    meeting.push(2)  # the life has a lease again, and the others wait for it
    meeting.sites[0].take()
    meeting.push(0)
    assert meeting.merges == [[0, 1]]
    meeting.push(1)
    assert meeting.merges[1:] == [[0, 1, 2]]
    assert meeting.store.status().members.keys() == {0, 1, 2}


def test_a_partial_push_of_a_dead_site_is_never_merged() -> None:
    meeting = Meeting(1, rule="quorum", least=1, grace=0.0)
    dead = SiteOfTests(meeting.store, meeting.settings, 1, data_parallel_layout())
    dead.take()
    meeting.store.push(dead.meta(), 0, PushShare(), dead.body(values_of(1), 0))
    again = SiteOfTests(meeting.store, meeting.settings, 1, data_parallel_layout())
    assert again.joined.rows == 0
    again.take()
    meeting.lives |= {dead.life: 1, again.life: 1}
    again.push(values_of(1))
    meeting.push(0)
    assert meeting.merges == [[1], [0]]
    assert not meeting.store._state.fragments[0].pushes


def test_a_complete_push_of_a_dead_site_is_merged_once() -> None:
    meeting = Meeting(2, rule="diloco", sites=2)
    meeting.push(1)
    assert meeting.merges == []
    again = meeting.join(1)  # the old life has ended; its push stays
    assert again.joined.rows == 1
    meeting.push(0)
    assert meeting.merges == [[0, 1]]
    assert meeting.store.status().waiting == []


def test_a_site_that_leaves_is_waited_for_no_longer() -> None:
    meeting = Meeting(2, rule="average")
    meeting.push(0)
    meeting.store.leave(meeting.sites[1].life)
    assert meeting.merges == [[0]]


def test_fewer_live_sites_than_least_make_no_merge() -> None:
    meeting = Meeting(3, rule="average", least=2)
    meeting.push(0)
    meeting.wait(20.0, 0)
    assert meeting.merges == []
    meeting.push(1)
    assert meeting.merges == [[0, 1]]


def test_a_bounded_site_waits_for_the_slowest_live_one() -> None:
    meeting = Meeting(2, rule="ssp", staleness=2)
    fast, slow = meeting.sites
    for _ in range(2):
        fast.push(values_of(0))
        assert fast.take() is not None
    fast.push(values_of(0))
    assert fast.take() is None and meeting.merges == [[0]] * 3
    slow.push(values_of(1))
    assert fast.take() is not None
    fast.push(values_of(0))
    assert fast.take() is None
    meeting.wait(11.0, 0)  # the slow one is gone
    assert fast.take() is not None
    for _ in range(5):
        fast.push(values_of(0))
        assert fast.take() is not None
    assert slow.take() is not None  # it is back, and nobody waits for the pushes that it has missed
    fast.push(values_of(0))
    assert fast.take() is not None


def test_a_new_site_starts_at_the_clock_of_the_slowest() -> None:
    meeting = Meeting(2, rule="ssp", staleness=1)
    for _ in range(3):
        for site in meeting.sites:
            site.push(values_of(site.site))
            site.take()
    assert meeting.join(2).joined.clock == 3
    assert meeting.store.status().clocks == {0: 3, 1: 3, 2: 3}


def test_nobody_waits_under_async() -> None:
    meeting = Meeting(2, rule="async")
    for _ in range(6):
        meeting.push(0)
        offer = meeting.sites[0].take()
        assert offer is not None and offer[0].staleness == 0
    meeting.push(1)
    offer = meeting.sites[1].take()
    assert offer is not None and offer[0].staleness == 6
    assert meeting.merges == [[0]] * 6 + [[1]]


def test_a_quorum_waits_for_its_grace() -> None:
    meeting = Meeting(3, rule="quorum", least=2, grace=5.0)
    meeting.push(0)
    meeting.wait(8.0, 0, 1, 2)
    assert meeting.merges == []
    meeting.push(2)
    meeting.wait(4.0, 0, 1, 2)
    assert meeting.merges == []
    meeting.wait(2.0, 0, 1, 2)
    assert meeting.merges == [[0, 2]]


def test_a_quorum_of_all_live_sites_has_no_grace() -> None:
    meeting = Meeting(3, rule="quorum", least=2, grace=5.0)
    meeting.push(0, 1, 2)
    assert meeting.merges == [[0, 1, 2]]


def test_a_late_site_of_a_quorum_takes_over_once_its_own_push_is_merged() -> None:
    meeting = Meeting(3, rule="quorum", least=2, grace=0.0)
    assert meeting.sites[2].take() is None
    meeting.push(0, 1)
    meeting.store.tick()
    assert meeting.merges == [[0, 1]]
    meeting.sites[2].push(values_of(2))
    assert meeting.sites[2].take() is None  # its push is under way
    meeting.sites[0].take()
    meeting.push(0)
    meeting.store.tick()
    assert meeting.merges[1:] == [[0, 2]]
    found = meeting.sites[2].take()
    assert found is not None and (found[0].version, found[0].merged, found[0].staleness) == (2, 0, 1)


def test_a_site_of_a_quorum_without_a_push_takes_any_newer_version_over() -> None:
    meeting = Meeting(3, rule="quorum", least=2, grace=0.0)
    meeting.push(0, 1)
    found = meeting.sites[2].take()
    assert found is not None and (found[0].version, found[0].merged) == (1, -1)


def test_the_adaptive_grace_is_one_and_a_half_usual_spreads() -> None:
    meeting = Meeting(3, rule="quorum", least=2)
    meeting.push(0)
    meeting.wait(4.0, 0, 1, 2)
    meeting.push(1)
    meeting.wait(1.0, 0, 1, 2)  # the first grace is a second
    assert meeting.merges == [[0, 1]]
    for site in meeting.sites[:2]:
        site.take()
    meeting.push(0, 1)
    meeting.wait(5.0, 0, 1, 2)
    assert len(meeting.merges) == 1
    meeting.wait(1.0, 0, 1, 2)  # 1.5 times 4 seconds
    assert len(meeting.merges) == 2


def test_an_offered_version_stays_until_the_next_offer() -> None:
    meeting = Meeting(2, rule="async")
    offer = None
    for _ in range(3):
        meeting.push(0)
        offer = offer or meeting.store.offer(meeting.sites[1].life, 0)
        meeting.sites[0].take()
    assert offer is not None and offer.version == 1
    pulled = meeting.store.pull(meeting.sites[1].life, 0, 0, 1)
    assert pulled.numel() == 31
    newer = meeting.store.offer(meeting.sites[1].life, 0)
    assert newer is not None and newer.version == 3
