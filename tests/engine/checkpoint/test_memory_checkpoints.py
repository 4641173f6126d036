"""Checkpoints in memory outlive the loss of any one host, and a save that fails leaves the one before it."""

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.checkpoint.contents.snapshot import Snapshot
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import read_manifest
from engine.checkpoint.format.step_reader import StepReader
from engine.checkpoint.memory_checkpoints import MemoryCheckpoints, _Offer, newest_whole
from engine.checkpoint.memory_folder import TOKEN, FileServer, Holder, MemoryFiles, RemoteFiles
from engine.checkpoint.save import Saver
from engine.config import load_config
from engine.errors import CheckpointError, ConfigError
from engine.parallel.comm.host_group import announce, collect
from tests.engine.checkpoint.fake_ranks import FakeRun, MemoryHost, fake_run, on_all
from tests.selection import wide

TWO, FOUR = (0, 0, 1, 1), (0, 1, 2, 3)
"""The host of each rank."""


@cache
def run() -> FakeRun:
    """Two data and two pipeline ranks with random state."""
    settings = {
        "train_batch_size": 4, "parallel": {"data": 2, "pipeline": 2}, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    made = fake_run(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), settings, torch.ones(2, 8))
    for rank in made.ranks:
        for held in rank.held():
            held.values.copy_(torch.rand(held.values.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    return made


@dataclass
class Hosts:
    """Folders in place of memories, and what the ranks do there."""

    folder: Path
    place: Sequence[int]
    made: Callable[[], FakeRun] = run

    def memory(self, rank: int) -> Path:
        path = self.folder / f"host{self.place[rank]}"
        path.mkdir(exist_ok=True)
        return path

    def copies(self, rank: int) -> MemoryCheckpoints:
        return MemoryCheckpoints(self.folder / "run", Files(), self.memory(rank))

    def save(self, *steps: int) -> None:
        """Keep these steps, one after another."""
        made = self.made()  # before the threads: a trace replaces functions of torch

        def body(host: MemoryHost) -> None:
            copies = self.copies(host.rank)
            for step in steps:
                saver, snapshot = made.saver(host, step, Files())

                def write(files: Files, to: Path, saver: Saver = saver, snapshot: Snapshot = snapshot) -> Path:
                    return saver.elsewhere(files).run(snapshot, to, None)

                copies.save(host, write)

        on_all(len(self.place), body)

    def lose(self, *hosts: int) -> None:
        for host in hosts:
            shutil.rmtree(self.folder / f"host{host}")

    def found(
        self, beyond: int = -1, load: Callable[[int, StepReader], None] = lambda rank, reader: None
    ) -> tuple[int, list[int]] | None:
        """The step that the ranks find, and the bytes that each gets from elsewhere for all of it; all is checked."""

        def body(host: MemoryHost) -> tuple[int, int] | None:
            copies = self.copies(host.rank)
            step = copies.find(host, beyond)
            if step is None:
                return None
            reader = StepReader(step.files, step.folder)
            reader.verify()
            load(host.rank, reader)
            collect(host, b"")
            announce(host, b"")  # nobody reads any more
            copies.close()
            return step.number, step.files.bytes_received

        told = on_all(len(self.place), body)
        if told[0] is None:
            assert told == [None] * len(told)
            return None
        return told[0][0], [given[1] for given in told if given is not None]


def test_two_hosts_hold_everything_and_either_may_go(tmp_path: Path) -> None:
    for lost in (0, 1):
        hosts = Hosts(tmp_path / str(lost), TWO)
        hosts.folder.mkdir()
        hosts.save(3, 5)
        assert hosts.found() == (5, [0, 0, 0, 0])
        assert [len(list((hosts.folder / f"host{host}").glob("*/step-*"))) for host in (0, 1)] == [1, 1]
        hosts.lose(lost)
        step, received = hosts.found() or (0, [])
        assert step == 5
        assert [bool(count) for count in received] == [host == lost for host in TWO]


@pytest.mark.parametrize("lost", range(4))
def test_any_host_of_four_may_go_and_not_two_neighbours(tmp_path: Path, lost: int) -> None:
    hosts = Hosts(tmp_path, FOUR)
    hosts.save(7)
    files = [sum(1 for path in (tmp_path / f"host{host}").rglob("optim-*")) for host in range(4)]
    assert files == [2] * 4, "its own, and those of the host before it"
    hosts.lose(lost)
    assert (hosts.found() or [None])[0] == 7
    hosts.lose((lost + 1) % 4)
    assert hosts.found() is None


def test_what_is_on_disk_and_newer_is_taken_and_another_run_is_not(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, TWO)
    hosts.save(4)
    assert hosts.found(beyond=3) is not None and hosts.found(beyond=4) is None
    (tmp_path / "run" / TOKEN).unlink()
    assert hosts.found() is None
    assert not [*tmp_path.glob("host*/*/step-*")], "the copies of the run before it are removed"


class Failing(MemoryFiles):
    """Fails at the n-th file that is created or renamed after the save itself."""

    def __init__(self, named: Path, shared: Path, number: int) -> None:
        super().__init__(named, shared)
        self.number = number

    def _count(self) -> None:
        self.number -= 1
        if self.number == 0:
            raise OSError(28, "No space left on device")

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def rename(self, path: Path, target: Path) -> None:
        self._count()
        super().rename(path, target)


@pytest.mark.parametrize(("victim", "every"), [wide(0, 1), wide(1, 1), wide(2, 1), wide(3, 1), (2, 3)])
def test_a_save_that_fails_anywhere_leaves_the_one_before_it(
    tmp_path: Path, victim: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation of a save fails in turn, or every third one."""
    hosts, failed = Hosts(tmp_path, TWO), 0
    hosts.save(1)
    for number in range(1, 40, every):

        def made(named: Path, shared: Path, number: int = number) -> MemoryFiles:
            return Failing(named, shared, number if threading.current_thread().name == f"rank {victim}" else 0)

        with monkeypatch.context() as patched:
            patched.setattr("engine.checkpoint.memory_checkpoints.MemoryFiles", made)
            try:
                hosts.save(1 + number)
            except CheckpointError as error:
                where = (f"rank {victim}", f"/host{TWO[victim]}/")
                assert "No space left" in str(error) and any(place in str(error) for place in where), error
                failed += 1
            else:
                break
        step, _ = hosts.found() or (0, [])
        assert step in (1, 1 + number), "committed by rank 0 and whole in all other parts, or not there"
        if step != 1:
            hosts.save(1)
    assert 5 <= every * failed < 39 and (hosts.found() or [0])[0] == 1 + every * failed + 1


def offer(step: int, attempt: str, *held: str) -> Any:
    return _Offer(step, attempt, f"step-{step:08d}", {"a": 1, "b": 2}, held)


def test_only_what_is_whole_and_of_one_save_is_chosen() -> None:
    assert newest_whole([], -1) is None
    assert newest_whole([offer(5, "x", "a"), offer(5, "y", "b")], -1) is None, "halves of two saves of one step"
    chosen = newest_whole([offer(5, "x", "a"), offer(5, "x", "b"), offer(9, "z", "a"), offer(3, "w", "a", "b")], -1)
    assert chosen is not None and chosen.step == 5
    assert newest_whole([offer(5, "x", "a", "b")], 5) is None


def test_the_plan_knows_what_is_stored(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, TWO)
    hosts.save(1)
    (step,) = tmp_path.glob("host0/*/step-*")
    manifest = read_manifest(Files(), step)
    assert sum(tensor.kind.bytes for tensor in manifest.tensors.values()) == run().plan.stored_bytes


def test_a_server_answers_those_who_know_its_secret_about_what_it_offers(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "offered").write_bytes(bytes(range(100)))
    (tmp_path / "step" / "other").write_bytes(b"hidden")
    (tmp_path / "outside").write_bytes(b"hidden")
    server = FileServer("127.0.0.1", "secret", tmp_path / "step", ["offered", "gone"])
    holder, nobody = Holder("127.0.0.1", server.port, "node7"), Holder("127.0.0.1", 1, "node8")

    def read(name: str, secret: str, offset: int = 0, holders: Sequence[Holder] = (holder,)) -> bytes:
        files = RemoteFiles(tmp_path / "nothing", {name: holders}, {name: 100}, secret)
        target = bytearray(10)
        try:
            count = files.read_into(files.open(tmp_path, name), memoryview(target), offset)
        finally:
            files.hang_up()
        return bytes(target[:count])

    try:
        assert read("offered", "secret", 20) == bytes(range(20, 30))
        assert read("offered", "secret", 95) == bytes(range(95, 100)), "less at the end"
        assert read("offered", "secret", holders=(nobody, holder)) == bytes(range(10)), "the next one that holds it"
        for name, secret in (("offered", "guess"), ("other", "secret"), ("../outside", "secret")):
            with pytest.raises(OSError, match=r"node7 does not answer .*the connection was closed"):
                read(name, secret)
        with pytest.raises(OSError, match="No such file"):
            read("gone", "secret")
    finally:
        server.close()


def test_copies_without_a_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_every: 10 without checkpoint\.folder"):
        load_config({"train_batch_size": 1, "checkpoint": {"memory_every": 10}})
