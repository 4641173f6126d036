"""Crashes of a store at any write, rename or fsync: nothing acknowledged is lost, and every bit is as without them."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.config.optim_sections import AdamWParams, OptimizerConfig
from engine.config.reader import stored
from engine.errors import CheckpointError
from engine.outer.messages import PushState, StoreLink, StoreRefusedError
from engine.outer.store.journal import read_events
from engine.outer.store.replay import replay
from engine.outer.store.store import Store
from tests.engine.outer.store.sites import SiteOfTests, Values, data_parallel_layout, settings_of, values_of

ADAMW = OptimizerConfig(type="AdamW", params=stored(AdamWParams(lr=1e-2)))
SETTINGS: dict[str, dict[str, Any]] = {
    "bsp": settings_of(rule="bsp", sites=2, training=ADAMW, clipping=0.5),
    "diloco": settings_of(rule="diloco", period=10, sites=2, wire="int8"),
    "average": settings_of(rule="average", period=1, sites=2),
}
CALLS = ("fsync", "rename", "write", "unlink", "ftruncate", "mkdir")


class CrashError(OSError):
    """End of the store's process at one call of the system."""


class Disk:
    """Calls of the system that change the disk, of which one fails; a failing write is half made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fails = 0, -1
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.fails:
                if name == "write":
                    with suppress(OSError):  # with O_DIRECT, half a page is refused
                        call(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise CrashError(5, "the process has ended")
            return call(*args, **kwargs)

        return counted


class Restarted:
    """Store that starts again after a crash; a request without a reply is repeated, as over a network."""

    def __init__(self, folder: Path, settings: dict[str, Any], **options: Any) -> None:
        self._open: Callable[[], Store] = partial(Store, settings, folder, snapshot_every=2, **options)
        self.store: Store | None = None
        self.starts = 0

    def link(self) -> Store:
        """Returns the running store; starts one after a crash."""
        while self.store is None:
            self.starts += 1
            try:
                self.store = self._open()
            except (CrashError, StoreRefusedError):
                continue
        return self.store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*args: Any) -> Any:
            while True:
                store = self.link()
                try:
                    return getattr(store, name)(*args)
                except StoreRefusedError as error:
                    if error.status != 507:
                        raise
                    store.close()
                    self.store = None

        return request


def weights_of(site: SiteOfTests) -> dict[str, Tensor]:
    """Returns the newest version."""
    found = site.take()
    assert found is not None
    return found[1]


def train(store: StoreLink, settings: dict[str, Any]) -> list[Values]:
    """Returns the versions that sites take over; a site dies and starts again once."""
    sites = [SiteOfTests(store, settings, 0), SiteOfTests(store, settings, 1, data_parallel_layout())]
    sites[0].seed(values_of(99))
    found: list[Values] = [weights_of(site) for site in sites]
    for meeting in range(4):
        if meeting == 2:
            sites[0].push(values_of(meeting))
            base, site = sites[1].base, SiteOfTests(store, settings, 1)
            sites[1] = site
            taken = site.take()
            assert (taken is None) == (settings["content"] == "sums")
            assert site.base in (base, 0)
            site.base = base
            site.push(values_of(10 + meeting))
        else:
            sites[0].push(values_of(meeting), tokens=2.0)
            sites[1].push(values_of(10 + meeting))
        found += [weights_of(site) for site in sites]
    return found


def same(found: list[Values], expected: list[Values]) -> bool:
    """Returns True if all bits are equal."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(mine[name], theirs[name]) for mine, theirs in pairs for name in theirs)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)


def run(folder: Path, rule: str, **options: Any) -> tuple[list[Values], Restarted]:
    """Trains against a store in a folder."""
    store = Restarted(folder, SETTINGS[rule], **options)
    return train(cast(StoreLink, store), SETTINGS[rule]), store


def crash_everywhere(tmp_path: Path, disk: Disk, rule: str, every: int, first: int = 0) -> None:
    disk.count = 0
    expected, whole = run(tmp_path / "whole", rule)
    whole.link().close()
    total = disk.count
    assert total > 100
    for fails in range(first, total, every):
        disk.count, disk.fails = 0, fails
        folder = tmp_path / f"crash-{fails}"
        found, store = run(folder, rule, keep=bool(fails % 2))
        assert store.starts == 2 or disk.count <= fails  # with keep, there are fewer calls
        assert same(found, expected)
        status = store.link().status()
        assert status.versions == (4,) and status.waiting == []
        store.link().close()
        merged = [
            (push["life"], push["seq"])
            for _, event in read_events(folder)
            if event["kind"] == "merge"
            for push in event["pushes"]
        ]
        assert len(merged) == len(set(merged)) == 8
        if fails % 2:
            assert replay(folder).merges == 4


@pytest.mark.parametrize("rule", SETTINGS)
def test_a_crash_at_some_call_of_the_system_changes_no_bit(tmp_path: Path, disk: Disk, rule: str) -> None:
    crash_everywhere(tmp_path, disk, rule, every=23, first=list(SETTINGS).index(rule))


@pytest.mark.long
@pytest.mark.parametrize("rule", SETTINGS)
def test_a_crash_at_any_call_of_the_system_changes_no_bit(tmp_path: Path, disk: Disk, rule: str) -> None:
    crash_everywhere(tmp_path, disk, rule, every=1)


@pytest.mark.parametrize("rule", SETTINGS)
def test_a_store_in_a_folder_has_the_bits_of_one_in_memory(tmp_path: Path, rule: str) -> None:
    found, store = run(tmp_path / "folder", rule)
    assert same(found, train(Store(SETTINGS[rule]), SETTINGS[rule]))
    store.link().close()
    assert len(list((tmp_path / "folder" / "bodies").iterdir())) == 0
    assert len(list((tmp_path / "folder").glob("snapshot-*"))) == 1


def test_a_store_that_cannot_write_goes_on_by_itself_from_what_is_on_disk(tmp_path: Path, disk: Disk) -> None:
    settings, now = SETTINGS["diloco"] | {"sites": 1}, [0.0]
    store = Store(settings, tmp_path, clock=lambda: now[0], snapshot_every=1)
    site = SiteOfTests(store, settings)
    site.seed(values_of(1))
    start = weights_of(site)
    disk.fails = disk.count + 10  # the push is on disk, the line of its merge is not
    with pytest.raises(StoreRefusedError, match=r"cannot write to its folder \(.*the process has ended") as caught:
        site.push(values_of(2))
    assert caught.value.status == 507
    for call in (lambda: store.renew(site.life), store.tick, store.status):
        with pytest.raises(StoreRefusedError, match="cannot write"):
            call()
    now[0] = 1.0
    assert site.push(values_of(2)) is PushState.MERGED
    whole = Store(settings)
    other = SiteOfTests(whole, settings)
    other.seed(values_of(1))
    assert same([weights_of(other)], [start])
    other.push(values_of(2))
    assert same([weights_of(site)], [weights_of(other)])
    store.close()
    with pytest.raises(StoreRefusedError, match="closed"):
        store.tick()


def test_one_store_at_a_time_has_a_folder(tmp_path: Path) -> None:
    store = Store(SETTINGS["bsp"], tmp_path)
    with pytest.raises(CheckpointError, match="in use by another store"):
        Store(SETTINGS["bsp"], tmp_path)
    store.close()
    Store(SETTINGS["bsp"], tmp_path).close()


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    Store(SETTINGS["bsp"], tmp_path).close()
    with pytest.raises(CheckpointError, match='"clipping" 0\\.5, but the configuration has 0\\.25'):
        Store(SETTINGS["bsp"] | {"clipping": 0.25}, tmp_path)
    Store(SETTINGS["bsp"] | {"lease": 3.0}, tmp_path).close()


@pytest.mark.parametrize("victim", ["trace.jsonl", "bodies", "state.safetensors", "manifest.json"])
def test_damage_is_named(tmp_path: Path, victim: str) -> None:
    settings = SETTINGS["diloco"]
    store = Store(settings, tmp_path, snapshot_every=1)
    site, other = SiteOfTests(store, settings), SiteOfTests(store, settings, 1)
    site.seed(values_of(1))
    for each in (site, other, site):
        each.push(values_of(2))
    store.close()
    path = next(path for path in tmp_path.rglob("*") if victim in (path.name, path.parent.name) and path.is_file())
    data = bytearray(path.read_bytes())
    place = len(data) // 2 if victim in ("trace.jsonl", "manifest.json") else -1
    data[place : place + 1 or None] = b"\x00"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.* is damaged"):
        assert list(read_events(tmp_path))
        Store(settings, tmp_path)


def test_a_replay_names_the_first_merge_with_other_bits(tmp_path: Path) -> None:
    run(tmp_path, "bsp", keep=True)
    found = replay(tmp_path)
    assert (found.merges, found.versions, found.difference) == (4, (4,), None)
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    second = [at for at, line in enumerate(lines) if '"kind":"merge"' in line][1]
    lines[second] = lines[second].replace('"hash":"', '"hash":"f')
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n")
    found = replay(tmp_path)
    assert found.merges == 1 and found.difference is not None and "version 2 of fragment 0" in found.difference


def test_a_replay_needs_all_bodies(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no events"):
        replay(tmp_path)
    Store(SETTINGS["bsp"], tmp_path).close()
    with pytest.raises(CheckpointError, match="without --keep"):
        replay(tmp_path)


@pytest.mark.parametrize("rule", SETTINGS)
def test_a_power_failure_may_lose_that_a_version_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """A pull waits for no disk; the store that restarts without its event continues with the same bits."""
    settings = SETTINGS[rule] | {"sites": 1}

    def trained(store: Store, lose: bool) -> Values:
        site = SiteOfTests(store, settings)
        site.seed(values_of(99))
        weights_of(site)
        for step in range(3):
            site.push(values_of(step))
            offer = store.offer(site.life, 0)
            assert offer is not None
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", lambda handle: pytest.fail("a pull waits for the disk"))
                found = weights_of(site)
            if lose:
                store.close()
                lines = (tmp_path / "trace.jsonl").read_bytes().splitlines(keepends=True)
                assert b'"taken"' in lines[-1]
                (tmp_path / "trace.jsonl").write_bytes(b"".join(lines[:-1]))
                store = Store(settings, tmp_path)
                site.store = store
        store.close()
        return found

    assert same([trained(Store(settings, tmp_path), True)], [trained(Store(settings), False)])
