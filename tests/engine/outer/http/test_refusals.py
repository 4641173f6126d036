"""Requests that a store refuses: the right status at once, one sentence, and an unchanged state."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import torch

from engine.errors import ConfigError
from engine.outer.http import requests as wire
from engine.outer.http.bodies import HEAD_BYTES, RANGE, BodyRange, digest, frame
from engine.outer.messages import PushKey, PushShare
from engine.outer.store.store import Store
from engine.web.json_text import dump_json, parse_json
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

TOKEN = "of-this-test"
BODY = bytes(body_of(torch.ones(ELEMENTS)).numpy())
SETTINGS = settings_of(rule="diloco", sites=2, period=10)


@dataclass
class Bench:
    """A store with two sites after one merge; life 0 of site 0 has ended, and life 2 continues it."""

    app: AppTransport
    client: httpx.Client
    life: int = 2

    @property
    def weights(self) -> list[tuple[int, str]]:
        """Hash of every version."""
        return [
            (number, digest(version.flats[0].numpy().tobytes()))
            for part in self.app.server.store._state.fragments.values()
            for number, version in part.versions.items()
        ]

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that a refused request leaves as it is."""
        status, kept = self.app.server.store.status(), self.app.server.store._state
        pushes = [
            (str(key), sorted(push.bodies)) for part in kept.fragments.values() for key, push in part.pushes.items()
        ]
        lives = [(life.number, life.ended, len(life.layouts)) for life in kept.members.lives.values()]
        return status, self.weights, pushes, lives, dict(self.app.server._uploads.under_way)

    def post(self, path: str, call: object = None, content: bytes | None = None) -> httpx.Response:
        return self.client.post(path, content=dump_json(call) if content is None else content)

    def join(self, settings: dict[str, Any], tensors: Any = TENSORS) -> httpx.Response:
        return self.post(wire.JOIN, wire.JoinCall(join_request(0, settings, tensors), "a"))

    def pull(self, version: object) -> httpx.Response:
        return self.client.get(wire.PULL, params={"life": 2, "rank": 0, "fragment": 0, "version": str(version)})

    def push(self, data: bytes = BODY, *, life: int = 2, seq: int = 0, base: int = 1, **part: Any) -> httpx.Response:
        meta = replace(meta_of(life, seq, base), key=PushKey(life, 0, seq))
        position = replace(BodyRange(0, len(data), digest(data), digest(data)), **part)
        return self.post(wire.PUSH, content=frame(wire.PushHead(meta, 0, PushShare(), position), data))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with served(Store(SETTINGS), TOKEN) as app:
        bench = started(app)
        yield bench
        bench.client.close()


def started(app: AppTransport) -> Bench:
    """Two sites join, push once and are merged; then site 0 starts again."""
    with linked(app, token=TOKEN) as link:
        for site in range(2):
            joined = link.join(join_request(site, SETTINGS))
            link.register(joined.life, 0, layout_of())
            if joined.seeds:
                link.seed(joined.life, 0, 0, body_of(torch.zeros(ELEMENTS)))
        for life in range(2):
            link.offer(life, 0)
            link.pull(life, 0, 0, 0)
            link.push(meta_of(life, 0, 0), 0, PushShare(), body_of(torch.ones(ELEMENTS)))
        link.join(join_request(0, SETTINGS))
        link.register(2, 0, layout_of())
    header = {"authorization": f"Bearer {TOKEN}"}
    return Bench(app, httpx.Client(base_url="http://store", transport=app, headers=header))


JOIN = wire.JoinCall(join_request(0, SETTINGS), "attempt")
OTHER_SHAPES = (("layer.weight", (6, 5)), ("layer.bias", (6,)))
OTHER_NAMES = (("layer.weight", (6, 4)), ("layer.offset", (6,)))
REFUSED: dict[str, tuple[Callable[[Bench], httpx.Response], int, str]] = {
    "half a body": (lambda b: b.push(BODY[:60], total=120, hash=digest(BODY), whole=digest(BODY)), 422, "another hash"),
    "a shorter body": (lambda b: b.push(BODY[:60]), 422, "60 bytes, and its pieces take 120"),
    "wrong hash": (lambda b: b.push(whole=digest(b"x")), 422, "another hash than its sender's"),
    "repeated number with another body": (lambda b: b.push(bytes(120), life=1, seq=0, base=0), 409, "another body"),
    "a number too high": (lambda b: b.push(seq=4), 409, "the next one of this life and fragment is 0"),
    "a dead life": (lambda b: b.push(life=0, seq=1), 410, "life 0 has ended"),
    "a future version": (lambda b: b.push(base=7), 400, "based on version 7"),
    "a body too large": (lambda b: b.push(BODY * 2), 413, "240 bytes, and its pieces take 120"),
    "a range beyond its body": (lambda b: b.push(BODY * 2, total=120), 413, "a range ends at byte 240"),
    "an unknown life": (lambda b: b.push(life=99), 404, "life 99 is not known"),
    "an unknown life that renews": (lambda b: b.post(wire.RENEW, wire.LifeCall(99)), 404, "life 99 is not known"),
    "other names": (lambda b: b.join(SETTINGS, OTHER_NAMES), 409, "offset"),
    "other shapes": (lambda b: b.join(SETTINGS, OTHER_SHAPES), 409, "[6, 5]"),
    "other settings": (lambda b: b.join({**SETTINGS, "period": 11}), 409, '"period" 11'),
    "a missing field": (lambda b: b.post(wire.RENEW, {}), 400, "request.life is missing"),
    "a wrong type": (lambda b: b.post(wire.RENEW, {"life": "2"}), 400, "request.life is '2' instead of a number"),
    "a negative number": (lambda b: b.post(wire.RENEW, {"life": -1}), 400, "outside of 0 to 2^62"),
    "no JSON": (lambda b: b.post(wire.JOIN, content=b"{"), 400, "is no JoinCall"),
    "a frame without JSON": (lambda b: b.post(wire.PUSH, content=b"\x09"), 400, "ends before its JSON"),
    "JSON too long": (lambda b: b.post(wire.PUSH, content=b"\xff" * 4), 413, "bytes of JSON before its range"),
    "a range too long": (lambda b: b.push(bytes(RANGE + 1)), 413, f"range of more than {RANGE:,} bytes"),
    "a request too long": (lambda b: b.post(wire.PUSH, content=bytes(HEAD_BYTES + RANGE + 5)), 413, "may have 5,242"),
    "an unknown path": (lambda b: b.client.get("/v1/../etc/passwd"), 404, "no request to a store"),
    "a wrong method": (lambda b: b.client.get(wire.PUSH), 405, "no request to a store"),
    "a pull without an offer": (lambda b: b.pull(1), 409, "no offer"),
    "a pull without a version": (lambda b: b.pull("../1"), 400, "no number version"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_request_has_a_status_and_a_sentence_and_changes_nothing(bench: Bench, name: str) -> None:
    request, status, words = REFUSED[name]
    before, began = bench.state, monotonic()
    response = request(bench)
    assert monotonic() - began < 1
    sentence = parse_json(response.content)["error"]
    assert (response.status_code, words in sentence) == (status, True), sentence
    assert sentence.endswith(".") and ". " not in sentence.replace("trine. ", "") and len(sentence) < 400
    assert bench.state == before
    assert bench.push().status_code == 200


def test_a_repeated_push_is_harmless(bench: Bench) -> None:
    assert bench.push().json()["state"] == "complete"
    before = bench.state
    bench.app.server._uploads.finished.clear()  # as after a restart of the store
    assert bench.push().json()["state"] == "complete"
    assert bench.push(life=1, base=0).json()["state"] == "merged"
    assert bench.state == before


def test_a_repeated_join_starts_one_life(bench: Bench) -> None:
    first, second = bench.post(wire.JOIN, JOIN), bench.post(wire.JOIN, JOIN)
    assert first.json() == second.json() and first.json()["life"] == 3
    assert bench.post(wire.JOIN, replace(JOIN, attempt="another")).json()["life"] == 4


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer of-this-tes"}, {"authorization": TOKEN}])
def test_without_the_token_nothing_is_read(bench: Bench, header: dict[str, str]) -> None:
    with httpx.Client(base_url="http://store", transport=bench.app, headers=header) as client:
        for path in (wire.STATUS, wire.PUSH, "/v1/none"):
            response = client.get(path)
            assert response.status_code == 401 and "TRINE_OUTER_TOKEN" in response.json()["error"]
        assert client.get(wire.HEALTH).json() == {"status": "ok"}


@pytest.mark.parametrize("token", ["two words", "a\nb", "ü"])
def test_a_token_is_one_word(token: str) -> None:
    with pytest.raises(ConfigError, match="one word of printable ASCII"):
        wire.authorization(token)


def test_a_full_disk_is_one_sentence_and_the_push_follows_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with served(Store(SETTINGS, tmp_path), TOKEN) as app:
        bench = started(app)
        before = bench.weights
        with monkeypatch.context() as patched:
            patched.setattr("engine.outer.store.journal.Journal.write_body", full)
            for _ in range(2):
                response = bench.push()
                assert response.status_code == 507
                assert "the store cannot write to its folder ([Errno 28] No space left" in response.json()["error"]
            assert bench.client.get(wire.HEALTH).status_code == 507
            assert bench.weights == before
        monkeypatch.setattr("engine.outer.store.store._MEND_SECONDS", 0.0)
        while bench.client.get(wire.HEALTH).status_code != 200:
            sleep(0.01)
        assert bench.weights == before
        where = wire.ArrivedCall(2, 0, 0, 0, digest(BODY))
        assert bench.post(wire.ARRIVED, where).json() == {"arrived": len(BODY), "state": None}
        assert bench.push(b"", offset=len(BODY), total=len(BODY), whole=digest(BODY)).json()["state"] == "complete"
        bench.client.close()


def fuzzed(random: Random, bench: Bench) -> tuple[str, bytes]:
    """A request that no site sends: noise, a cut, or a changed byte or value of a right one."""
    position = BodyRange(0, len(BODY), digest(BODY), digest(BODY))
    right: dict[str, bytes] = {
        wire.JOIN: dump_json(JOIN),
        wire.REGISTER: dump_json(wire.RegisterCall(2, 0, layout_of())),
        wire.PUSH: frame(wire.PushHead(meta_of(2, 0, 1), 0, PushShare(), position), BODY),
        wire.SEED: frame(wire.SeedHead(2, 0, 0, position), BODY),
        wire.OFFER: dump_json(wire.OfferCall(2, 0, 1)),
        wire.ARRIVED: dump_json(wire.ArrivedCall(2, 0, 0, 0, digest(BODY))),
        wire.LEAVE: dump_json(wire.LifeCall(2)),
    }
    path = random.choice(list(right))
    data = bytearray(right[path])
    kind = random.randrange(4)
    if kind == 0:
        return path, random.randbytes(random.randrange(300))
    if kind == 1:
        return path, bytes(data[: random.randrange(len(data))])
    start = data.index(b"{")
    if kind == 2:  # a structural character, so that no right request remains
        places = [at for at in range(start, len(data)) if data[at] in b'"{}:,']
        data[random.choice(places[: places.index(data.rindex(b"}")) + 1])] = random.choice(b"x[\x00\xff")
        return path, bytes(data)
    text = data[start : data.rindex(b"}") + 1]
    value = parse_json(bytes(text))
    holder: Any = value
    while True:
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not isinstance(holder[key], dict | list) or not holder[key] or random.random() < 0.3:
            break
        holder = holder[key]
    wrong: list[Any] = [[[]], {"x": 1}, 2**63, True]
    if not isinstance(holder[key], str) and key != "loss":
        wrong += ["../../etc/passwd", -1, 1e400]
    holder[key] = random.choice(wrong)
    return path, bytes(data[:start]) + dump_json(value) + bytes(data[start + len(text) :])


def test_fuzzed_requests_are_refused(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random, before = Random(0), bench.state
    for _ in range(2000):
        path, data = fuzzed(random, bench)
        response = bench.client.post(path, content=data)
        assert 400 <= response.status_code < 500, (path, data, response.content)
        assert parse_json(response.content)["error"].endswith(".")
    assert bench.state == before and not list(tmp_path.iterdir())
