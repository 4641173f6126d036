"""A rank over HTTP gets what it gets from the store itself, over a network that loses and doubles messages."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event
from time import sleep

import httpx
import pytest
import torch
from torch import Tensor

from engine.errors import GridError
from engine.outer.fragments import Fragment, divide
from engine.outer.http import bodies
from engine.outer.http import requests as wire
from engine.outer.http.line import LIFE_BITS, HttpLink, joined_lives, life_on
from engine.outer.messages import Offer, PushShare, PushState, StoreLink, StoreRefusedError, StoreStatus
from engine.outer.store.store import Store
from engine.web import retries
from tests.engine.outer.http.served import (
    ELEMENTS,
    TENSORS,
    AppTransport,
    body_of,
    join_request,
    layout_of,
    linked,
    meta_of,
    served,
    settings_of,
)


class Lossy(httpx.BaseTransport):
    """Network that loses requests and replies, and doubles requests."""

    def __init__(self, inner: httpx.BaseTransport, seed: int) -> None:
        self.inner, self.random, self.lost = inner, Random(seed), 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        chance = self.random.random()
        if chance < 0.1:
            self.lost += 1
            raise httpx.ConnectError("lost")
        response = self.inner.handle_request(request)
        if chance < 0.3:
            self.lost += 1
            raise httpx.ReadError("lost")
        return self.inner.handle_request(request) if chance < 0.4 else response


class Breaking(httpx.BaseTransport):
    """Network that breaks at chosen requests of one path."""

    def __init__(self, inner: httpx.BaseTransport, path: str, at: set[int]) -> None:
        self.inner, self.path, self.at, self.count = inner, path, at, 0
        self.asked: list[tuple[str, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append((path, request.headers.get("range", "")))
        if path == self.path:
            self.count += 1
            if self.count in self.at:
                raise httpx.ReadError("broken")
        return self.inner.handle_request(request)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retries, "_LONGEST_PAUSE", 0.002)


def start(link: StoreLink, site: int, settings: dict[str, object]) -> int:
    joined = link.join(join_request(site, settings))
    link.register(joined.life, 0, layout_of())
    if joined.seeds:
        for number, part in enumerate(parts_of(settings)):
            seeds = torch.cat(
                [torch.full(shape, float(len(name))).flatten() for name, shape in TENSORS if name in part.names]
            )
            link.seed(joined.life, 0, number, body_of(seeds))
    return joined.life


def parts_of(settings: dict[str, object]) -> tuple[Fragment, ...]:
    return divide(TENSORS, int(str(settings["fragments"])), int(str(settings["stores"])))


def train(links: list[StoreLink], settings: dict[str, object], rounds: int) -> list[Tensor]:
    """Sites that push numbers of their own and take over what is merged; returns their last weights."""
    sizes = [part.elements for part in parts_of(settings)]
    lives = [start(link, site, settings) for site, link in enumerate(links)]
    versions = {(site, f): 0 for site in range(len(links)) for f in range(len(sizes))}
    weights: dict[tuple[int, int], Tensor] = {}

    def take(site: int, fragment: int) -> Offer:
        link, life = links[site], lives[site]
        offer = link.offer(life, fragment)
        while offer is None:
            offer = link.offer(life, fragment)
        weights[site, fragment] = link.pull(life, 0, fragment, offer.version)
        versions[site, fragment] = offer.version
        return offer

    for site in range(len(links)):
        for fragment in range(len(sizes)):
            take(site, fragment)
    for step in range(rounds):
        for fragment, size in enumerate(sizes):
            for site, link in enumerate(links):
                generator = torch.Generator().manual_seed(100 * step + 10 * fragment + site)
                meta = meta_of(lives[site], step, versions[site, fragment], fragment)
                delta = torch.randn(size, generator=generator)
                assert link.push(meta, 0, PushShare(), body_of(delta)) is not PushState.PARTIAL
            assert [take(site, fragment).merged for site in range(len(links))] == [step] * len(links)
    return [weights[0, fragment] for fragment in range(len(sizes))]


def test_lost_replies_and_doubled_requests_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "RANGE", 50)
    monkeypatch.setattr("engine.outer.http.connection.RANGE", 50)
    monkeypatch.setattr("engine.outer.http.server.RANGE", 50)
    settings = settings_of(rule="diloco", sites=2, period=10, fragments=2)
    quiet = Store(settings)
    expected = train([quiet, quiet], settings, 6)
    with served(Store(settings)) as app:
        lossy = [Lossy(app, seed) for seed in range(2)]
        with linked(lossy[0]) as first, linked(lossy[1]) as second:
            found = train([first, second], settings, 6)
            assert all(map(torch.equal, found, expected))
            assert min(network.lost for network in lossy) > 10
            assert first.traffic.sent == 4 * ELEMENTS * 7 and first.traffic.received == 4 * ELEMENTS * 7
            assert first.traffic.repeated > 0
            assert sorted(first.status().members) == [0, 1]
        assert len(app.server.store.status().members) == 2


def test_two_stores_compute_the_weights_of_one() -> None:
    settings = settings_of(rule="diloco", sites=2, period=10, fragments=2)
    one = Store(settings)
    expected = train([one, one], settings, 3)
    both = {**settings_of(rule="diloco", sites=2, period=10), "stores": 2}
    with served(Store(both, number=0)) as first, served(Store(both, number=1)) as second:
        second.server.store.join(join_request(5, both))  # so that lives differ between the stores
        second.server.store.leave(0)
        apps, parts = (first, second), parts_of(both)
        with linked(*apps, fragments=parts) as site, linked(*apps, fragments=parts) as other:
            found = train([site, other], both, 3)
            assert site.traffic.sent == 4 * ELEMENTS * 4
    assert all(map(torch.equal, found, expected))


def test_lives_of_several_stores_are_one_number() -> None:
    assert joined_lives([7]) == 7 and life_on(0, 1 << LIFE_BITS + 3, 1) == 1 << LIFE_BITS + 3
    whole = joined_lives([3, 0, 5])
    assert [life_on(store, whole, 3) for store in range(3)] == [3, 0, 5]
    with pytest.raises(StoreRefusedError, match="new folders"):
        joined_lives([0, 1 << LIFE_BITS])


def ready(app: AppTransport, elements: int) -> Callable[[httpx.BaseTransport], tuple[HttpLink, int]]:
    """Starts a life of a model with one tensor."""

    def connect(transport: httpx.BaseTransport) -> tuple[HttpLink, int]:
        link = HttpLink(["http://store"], transport=lambda _: transport)
        tensors = (("weight", (elements,)),)
        life = link.join(join_request(0, app.server.store._settings, tensors)).life
        link.register(life, 0, layout_of(tensors))
        return link, life

    return connect


def test_a_large_body_continues_at_the_last_range(monkeypatch: pytest.MonkeyPatch) -> None:
    elements, size = 1 << 18, 1 << 18
    for module in ("bodies", "connection", "server"):
        monkeypatch.setattr(f"engine.outer.http.{module}.RANGE", size)
    weights = torch.randn(elements)
    with served(Store(settings_of(rule="diloco", period=10))) as app:
        breaking = Breaking(app, "/v1/seed", {3})
        link, life = ready(app, elements)(breaking)
        link.seed(life, 0, 0, body_of(weights))
        assert [path for path, _ in breaking.asked].count("/v1/seed") == 5 and ("/v1/arrived", "") in breaking.asked
        assert link.traffic.sent == 4 * elements and link.traffic.repeated == size
        offer = link.offer(life, 0)
        assert offer is not None
        breaking.path, breaking.at, breaking.count = "/v1/pull", {2, 4}, 0
        assert torch.equal(link.pull(life, 0, 0, offer.version), weights)
        starts = [start for path, start in breaking.asked if path == "/v1/pull"]
        assert starts == [f"bytes={size * at}-" for at in (0, 1, 1, 2, 2, 3)]
        assert not app.server._downloads.under_way and not app.server._uploads.under_way
        link.close()


def test_a_body_that_arrives_damaged_is_sent_again() -> None:
    class Damaging(httpx.BaseTransport):
        left = 2

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            data = bytearray(request.read())
            if request.url.path == "/v1/seed" and self.left:
                self.left -= 1
                data[-1] ^= 1
            changed = httpx.Request(request.method, request.url, headers=request.headers, content=bytes(data))
            return app.handle_request(changed)

    with served(Store(settings_of(rule="diloco", period=10))) as app:
        link, life = ready(app, 50)(Damaging())
        link.seed(life, 0, 0, body_of(torch.ones(50)))
        assert torch.equal(link.pull(life, 0, 0, link.offer(life, 0).version), torch.ones(50))  # type: ignore[union-attr]
        link.close()


def test_a_late_double_of_an_offer_does_not_end_the_version_that_is_pulled() -> None:
    settings = settings_of(rule="async", period=10)
    with served(Store(settings)) as app, linked(app) as first, linked(app) as second:
        sent: list[httpx.Request] = []

        class Recording(httpx.BaseTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                sent.append(request)
                return app.handle_request(request)

        with linked(Recording()) as watched:
            life = start(watched, 0, settings)
            other = start(first, 1, settings)
            offer = watched.offer(life, 0)
            assert offer is not None and offer.version == 0
            late = sent[-1]
            second.push(meta_of(other, 0, 0), 0, PushShare(), body_of(torch.ones(ELEMENTS)))
            assert app.server.store.status().versions == (1,)
            assert b'"version":0' in app.handle_request(late).read()
            watched.pull(life, 0, 0, 0)
            newer = watched.offer(life, 0)
            assert newer is not None and newer.version == 1


def test_a_renewal_during_a_long_merge_counts_before_leases_end(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, store = settings_of(rule="diloco", period=10), Store(settings_of(rule="diloco", period=10))
    with served(store) as app, linked(app) as link:
        life = start(link, 0, settings)
        waiting, merging, done, order = app.server._thread._work_queue, Event(), Event(), list[str]()

        def merge() -> StoreStatus:
            merging.set()
            done.wait(10)
            return StoreStatus(())

        def noted(name: str, inner: Callable[..., None]) -> Callable[..., None]:
            def call(*given: object) -> None:
                order.append(name)
                inner(*given)

            return call

        monkeypatch.setattr(store, "status", merge)
        monkeypatch.setattr(store, "renew", noted("renew", store.renew))
        with ThreadPoolExecutor(2) as pool:
            pool.submit(link.status)
            merging.wait(10)
            monkeypatch.setattr(store, "tick", noted("tick", store.tick))
            while not waiting.qsize():
                sleep(0.01)
            pool.submit(link.renew, life)
            while waiting.qsize() < 2:
                sleep(0.01)
            done.set()
        while len(order) < 2:
            sleep(0.01)
    assert order[:2] == ["renew", "tick"]


def test_an_absent_store_is_one_sentence_at_the_join_and_no_error_later() -> None:
    class Absent(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("Connection refused")

    with linked(Absent(), join_seconds=0.05) as link:
        with pytest.raises(
            GridError, match=r"http://store0 does not answer .* \(ConnectError: Connection refused\); st"
        ):
            link.join(join_request(0, {}))
        assert link.offer(0, 0) is None
        with pytest.raises(GridError, match="does not answer"):
            link.renew(0)
        assert "start it with `trine outer`" in link.outage


def test_a_closed_link_ends_calls_that_wait() -> None:
    class Closing(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            link.close()
            raise httpx.ConnectError("gone")

    link = HttpLink(["http://store"], transport=lambda _: Closing())
    with pytest.raises(GridError, match="this process closed its connection"):
        link.push(meta_of(0, 0, 0), 0, PushShare(), body_of(torch.ones(1)))


def test_a_limited_link_waits_no_longer() -> None:
    class Absent(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("gone")

    with linked(Absent()) as link:
        link.limit(0.02)
        with pytest.raises(GridError, match="does not answer"):
            link.push(meta_of(0, 0, 0), 0, PushShare(), body_of(torch.ones(1)))


@pytest.mark.parametrize(("status", "tries"), [(503, 3), (429, 3), (507, 3), (404, 1), (302, 1)])
def test_trouble_is_repeated_and_a_refusal_is_not(status: int, tries: int) -> None:
    class Answering(httpx.BaseTransport):
        count = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            self.count += 1
            return httpx.Response(
                status if self.count < 3 else 200, json={"error": "a reason."} if self.count < 3 else {}
            )

    transport = Answering()
    with linked(transport, join_seconds=9.0) as link:
        if tries == 1:
            with pytest.raises(StoreRefusedError) as refused:
                link.register(0, 0, layout_of())
            assert refused.value.status == status
        else:
            link.register(0, 0, layout_of())
    assert transport.count == tries


def test_a_renewal_describes_a_push_that_the_store_cannot_write() -> None:
    full, tried = Event(), Event()
    full.set()

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == wire.RENEW:
            return httpx.Response(200, json={})
        if not full.is_set():
            return httpx.Response(200, json={"arrived": 4, "state": "complete"})
        tried.set()
        return httpx.Response(507, json={"error": "the store cannot write to its folder; free space there."})

    link = HttpLink(["http://store0"], transport=lambda _: httpx.MockTransport(handle))
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(link.push, meta_of(0, 0, 0), 0, PushShare(), body_of(torch.ones(1)))
        assert tried.wait(30)
        while not link.outage:
            sleep(0.01)
        try:
            with pytest.raises(GridError, match=r"store0 cannot serve for 0 s: the store cannot write to its folder"):
                link.renew(0)
        finally:
            full.clear()
        pushed.result(30)
    link.renew(0)
    link.close()
