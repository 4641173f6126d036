"""Random pushes, pulls, silences and deaths of sites under SSP: bounded reads, no deadlock, each push merged once."""

import random

import pytest
import torch

from engine.config.optim_sections import OptimizerConfig, SgdParams
from engine.config.reader import stored
from engine.outer.messages import PushShare, PushState
from engine.outer.store.records import Event
from engine.outer.store.store import Store
from tests.engine.outer.store.sites import SiteOfTests, settings_of, whole_layout

SITES, STALENESS, LEASE = 5, 3, 10.0
COUNTS = (("counts", (SITES,)),)
ADDS = OptimizerConfig(type="SGD", params=stored(SgdParams(lr=1.0)))


class RandomSites:
    """Sites that push one number each: the weights of a version count the pushes that are in it."""

    def __init__(self, seed: int) -> None:
        self.random, self.now, self.events = random.Random(seed), 0.0, list[Event]()
        self.settings = settings_of(
            rule="ssp", period=2, staleness=STALENESS, lease=LEASE, optimizer=ADDS, weights="equal"
        )
        self.store = Store(self.settings, clock=lambda: self.now)
        self.store.listeners.append(self.events.append)
        self.sites: dict[int, SiteOfTests] = {}
        self.heard: dict[int, float] = {}
        """Time of the last message of each site that has not left."""
        self.clocks: dict[int, int] = {}
        """Pushes of each site, counted from those of the slowest one when it joined or came back."""
        self.owed: set[int] = set()
        """Sites whose push is in no version that they have taken over."""
        self.acknowledged: list[tuple[int, int]] = []
        self.pushes = [0] * SITES
        self.reads = self.blocked = 0
        self.join(0)
        self.sites[0].seed({"counts": torch.zeros(SITES)})
        for site in range(1, SITES):
            self.join(site)

    def live(self, site: int) -> bool:
        """Returns True if the lease of a site has not ended."""
        return site in self.heard and self.now - self.heard[site] <= LEASE

    def slowest(self, apart: int = -1) -> int | None:
        """Returns the smallest clock of the live sites other than ``apart``."""
        return min((self.clocks[site] for site in range(SITES) if site != apart and self.live(site)), default=None)

    def hear(self, site: int, clock: int) -> None:
        """Counts a message; a site that was gone starts at the clock of the slowest one."""
        if not self.live(site):
            slowest = self.slowest(apart=site)
            clock = clock if slowest is None else max(clock, slowest)
        self.clocks[site], self.heard[site] = clock, self.now

    def join(self, number: int) -> None:
        """Kills the processes of a site, and starts new ones."""
        self.heard.pop(number, None)
        self.sites[number] = SiteOfTests(
            self.store, self.settings, number, tensors=COUNTS, layouts=whole_layout(COUNTS)
        )
        self.hear(number, 0)
        assert self.clocks[number] == self.sites[number].joined.clock
        self.owed.discard(number)

    def push(self, number: int) -> None:
        """Pushes one number, sometimes twice."""
        site, delta = self.sites[number], torch.zeros(SITES)
        delta[number] = -1.0
        self.hear(number, self.clocks[number])
        meta, body = site.meta(), site.body({"counts": delta})
        assert site.push({"counts": delta}) is PushState.COMPLETE
        if self.random.random() < 0.1:
            assert self.store.push(meta, 0, PushShare(), body) is PushState.MERGED
        self.acknowledged.append((site.life, meta.key.seq))
        self.clocks[number] += 1
        self.pushes[number] += 1
        self.owed.add(number)

    def take(self, number: int) -> bool:
        """Takes a version over if the rule allows it; checks what is in it."""
        self.hear(number, self.clocks[number])
        site, slowest = self.sites[number], self.slowest()
        assert slowest is not None
        newer = site.base < len(self.acknowledged) or number in self.owed
        found = site.take()
        if found is None:
            assert not newer or self.clocks[number] - slowest > STALENESS
            self.blocked += 1
            return False
        assert self.clocks[number] - slowest <= STALENESS
        offer, weights = found
        assert offer.version == len(self.acknowledged)
        assert weights["counts"].tolist() == self.pushes
        self.owed.discard(number)
        self.reads += 1
        return True

    def act(self) -> None:
        """Makes one random request, or lets time pass."""
        number, chance = self.random.randrange(SITES), self.random.random()
        if chance < 0.02:
            self.join(number)
        elif chance < 0.04:
            self.now += self.random.choice((1.0, 4.0, 11.0))
            self.store.tick()
        elif chance < 0.05:
            self.hear(number, self.clocks[number])
            self.store.renew(self.sites[number].life)
        elif number in self.owed or chance < 0.5:
            self.take(number)
        else:
            self.push(number)

    def finish(self, rounds: int) -> None:
        """Lets all sites push; nobody waits forever."""
        for _ in range(rounds):
            for number in range(SITES):
                if number not in self.owed or self.take(number):
                    self.push(number)
            assert any(number not in self.owed or self.take(number) for number in range(SITES))


@pytest.mark.parametrize("requests", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_random_sites_read_bounded_versions_and_lose_nothing(requests: int) -> None:
    run = RandomSites(seed=requests)
    for _ in range(requests):
        run.act()
    run.finish(rounds=2 * STALENESS + 2)
    merged = [
        (push["life"], push["seq"]) for event in run.events if event["kind"] == "merge" for push in event["pushes"]
    ]
    assert sorted(merged) == sorted(run.acknowledged) and len(merged) == len(set(merged))
    assert run.reads > requests // 10 and run.blocked > requests // 100
    assert run.store.status().waiting == []
