"""Full disks and dead sectors: every operation of a save and of a load fails once, and once from there on."""

import errno
import os
import re
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.checkpoint import coordinator as durable
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import LOCK, committed
from engine.checkpoint.format.step_reader import StepReader
from engine.errors import CheckpointError
from tests.engine.checkpoint.fake_ranks import FakeRun, MemoryHost, memory_hosts
from tests.engine.checkpoint.test_crash import run_of
from tests.selection import wide
from tests.zero import small

WRITING = (
    "make_folder", "create", "write", "truncate", "sync", "sync_folder", "rename", "unlink", "remove_folder",
)  # fmt: skip
ALLOCATING = ("make_folder", "create", "write")
READING = ("open", "size", "read_into", "names")
FIGURES = r"on rank 0, which has (about )?[\d,]+ bytes to write; [\d,]+ are free there"


class FailingFiles(Files):
    """Real operations, of which the one with number ``at`` fails."""

    def __init__(self) -> None:
        self.at, self.error, self.lasting = -1, errno.EIO, False
        self.kinds: tuple[str, ...] = ()
        self.seen: list[tuple[str, str]] = []
        """(operation, path) since the last arming."""
        self._paths: dict[int, str] = {}

    def arm(self, at: int, kinds: tuple[str, ...], error: int = errno.EIO, lasting: bool = False) -> None:
        self.at, self.kinds, self.error, self.lasting, self.seen = at, kinds, error, lasting, []

    def __getattribute__(self, name: str) -> Any:
        action = super().__getattribute__(name)
        if name not in super().__getattribute__("kinds" if not name.startswith("__") else "__dict__"):
            return action
        return lambda *given: self._try(name, action, given)

    def _try(self, name: str, action: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        path = (
            self._paths[given[0]]
            if isinstance(given[0], int)
            else "/".join(str(part) for part in given[:2] if not isinstance(part, int))
        )
        self.seen.append((name, path))
        number = len(self.seen) - 1
        if number == self.at or (self.lasting and number > self.at >= 0):
            error = OSError(self.error, os.strerror(self.error))
            if not isinstance(given[0], int):  # of an open file the system names no path
                error.filename = str(given[0])
            raise error
        result = action(*given)
        if name in ("create", "open"):
            self._paths[result] = path
        return result


def start(files: FailingFiles, folder: Path, patch: pytest.MonkeyPatch, **checkpoint: Any) -> engine.Engine:
    patch.setattr(durable, "Files", lambda: files)
    eng = small.start({"checkpoint": {"folder": str(folder), "keep": 1, **checkpoint}})
    patch.undo()
    eng.train_batch(small.batch(eng, 0))
    return eng


@pytest.fixture
def files() -> FailingFiles:
    return FailingFiles()


@pytest.fixture
def eng(files: FailingFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[engine.Engine]:
    with start(files, tmp_path / "run", monkeypatch) as made:
        made.save_checkpoint().wait()
        yield made


def newest(run: Path) -> tuple[str, bytes]:
    """Name and manifest of the newest checkpoint, which is whole."""
    step = committed(Files(), run)[-1]
    StepReader(Files(), step).verify()
    return step.name, (step / "manifest.json").read_bytes()


def saves_with_every_fault(
    eng: engine.Engine, files: FailingFiles, run: Path, error: int, lasting: bool
) -> list[tuple[str, str]]:
    """Returns (operation, message) of all faults; the save after each of them is well."""
    told: list[tuple[str, str]] = []
    kinds = ALLOCATING if lasting else WRITING
    for at in range(1000):
        eng.train_batch(small.batch(eng, at))
        before = newest(run)
        files.arm(at, kinds, error, lasting)
        save = eng.save_checkpoint()
        save.join()
        seen = files.seen
        files.arm(-1, ())
        if len(seen) <= at:
            assert save.problem is None
            return told
        name, path = seen[at]
        assert isinstance(save.problem, CheckpointError), seen[at]
        message = str(save.problem)
        told.append((name, message))
        if "is committed, but" not in message:
            assert newest(run) == before, (seen[at], message)
            assert not any(".tmp-" in inner.name for inner in run.iterdir()), "the partial folder is removed"
            assert re.search(FIGURES, message) and os.strerror(error) in message, message
        else:
            assert newest(run) != before and newest(run)[0] in message, "whatever its clean-up does"
        assert str(run) in message and (path.split("/")[-1] in message or name == "rename"), (seen[at], message)
        eng.save_checkpoint().wait()
        assert newest(run) != before and len(committed(Files(), run)) == 1
        assert sorted(inner.name for inner in run.iterdir()) == [LOCK, "latest", newest(run)[0]]
    raise AssertionError("never through")


@pytest.mark.parametrize(
    ("error", "lasting"), [wide(errno.EIO, False), wide(errno.ENOSPC, False), (errno.ENOSPC, True)], ids=str
)
def test_every_operation_of_a_save_fails(
    eng: engine.Engine, files: FailingFiles, tmp_path: Path, error: int, lasting: bool
) -> None:
    told = saves_with_every_fault(eng, files, tmp_path / "run", error, lasting)
    print(f"{len(told)} faults of a save, {errno.errorcode[error]}{', lasting' if lasting else ''}")
    assert {name for name, _ in told} == set(ALLOCATING if lasting else WRITING)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_that_is_to_stop_stops_at_its_next_step(
    asynchronous: bool, files: FailingFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(files, tmp_path / "run", monkeypatch, on_failure="stop", **{"async": asynchronous}) as eng:
        files.arm(7, WRITING, errno.ENOSPC)
        eng.save_checkpoint().join()
        with pytest.raises(CheckpointError, match=rf"the checkpoint of step 1 was not saved .*: .*{FIGURES}"):
            eng.train_batch(small.batch(eng, 1))


def test_every_operation_of_a_load_fails(eng: engine.Engine, files: FailingFiles, tmp_path: Path) -> None:
    faults = 0
    for at in range(1000):
        files.arm(at, READING)
        try:
            eng.load_checkpoint()
        except CheckpointError as error:
            name, path = files.seen[at]
            if name == "names":
                assert path in str(error)
            else:
                assert path.split("/")[-1] in str(error) and "Input/output error" in str(error), (name, path, error)
                assert str(tmp_path / "run" / "step-00000001") in str(error)
        else:
            assert len(files.seen) <= at
            break
        finally:
            files.arm(-1, ())
        faults += 1
        if faults % 10 == 0:
            eng.load_checkpoint()
            eng.train_batch(small.batch(eng, 1))
    print(f"{faults} faults of a load")
    assert faults > 30


def test_a_file_size_limit_of_the_system(eng: engine.Engine, tmp_path: Path) -> None:
    before = newest(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_288, limits[1]))
    try:
        save = eng.save_checkpoint()
        save.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(rf"File too large: {tmp_path}/run/.*optim-00000.safetensors {FIGURES}", str(save.problem))
    assert newest(tmp_path / "run") == before and len(list((tmp_path / "run").iterdir())) == 3
    eng.save_checkpoint().wait()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 224 KiB."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=224k", "tmpfs", str(tmp_path / "disk")]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a full disk is a file system that has to be mounted here: {done.stderr.strip()}")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_disk_that_is_really_full(full_disk: Path, files: FailingFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(files, full_disk / "run", monkeypatch) as eng:
        eng.save_checkpoint().wait()
        before = newest(full_disk / "run")
        (full_disk / "other").write_bytes(bytes(100_000))
        eng.train_batch(small.batch(eng, 1))
        with pytest.raises(CheckpointError, match=rf"No space left on device: {full_disk}/run/step-.* {FIGURES}"):
            eng.save_checkpoint().wait()
        assert newest(full_disk / "run") == before and len(list((full_disk / "run").iterdir())) == 3
        (full_disk / "other").unlink()
        eng.save_checkpoint().wait()
        assert newest(full_disk / "run")[0] == "step-00000002"


@pytest.mark.parametrize("broken", [0, wide(1), wide(2), 3])
@pytest.mark.parametrize("error", [wide(errno.EIO), errno.ENOSPC, None])
def test_a_fault_on_one_rank_fails_the_save_on_all(broken: int, error: int | None, tmp_path: Path) -> None:
    """By the same sentence, which names the rank; also by an error that nobody has thought of."""
    run = run_of(4)
    run.save(tmp_path, 1)
    for at in (0, 1, 2, 4):
        files = FailingFiles()
        files.arm(at, ("create", "write", "sync"), error or 0)
        if error is None:
            files.arm(-1, ())
            files.sync = lambda file: 1 // 0  # type: ignore[assignment,method-assign]
        hosts, told = memory_hosts(4), dict[int, str]()
        threads = [
            threading.Thread(target=_fails, args=(run, host, tmp_path, files if host.rank == broken else Files(), told))
            for host in hosts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(told) == 4 and len(set(told.values())) == 1, told
        assert f"on rank {broken}" in told[0] and ("ZeroDivisionError" in told[0] or error), told[0]
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")] == ["step-00000001"]
    assert run.save(tmp_path, 2)[0] == committed(Files(), tmp_path)[-1]


def _fails(run: FakeRun, host: MemoryHost, folder: Path, files: Files, told: dict[int, str]) -> None:
    try:
        run.save_one(host, folder, 2, files, None)
    except CheckpointError as error:
        told[host.rank] = str(error)
