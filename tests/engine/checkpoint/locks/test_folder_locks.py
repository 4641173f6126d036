"""Who may save into a folder: one engine at a time, and nobody that has ended."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.checkpoint.format.step_folders import LOCK, FolderLocks
from engine.errors import CheckpointError
from tests.ranks import ROOT

HOLDER = """
import os, sys, time
from pathlib import Path
from engine.checkpoint.format.step_folders import FolderLocks
locks = FolderLocks()
locks.hold(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)  # the child speaks: what it does after a fork is done
time.sleep(600)
"""
"""A run with a worker, as a data loader forks it."""


def test_one_engine_at_a_time(tmp_path: Path) -> None:
    first, second = FolderLocks(), FolderLocks()
    first.hold(tmp_path)
    first.hold(tmp_path)
    with pytest.raises(CheckpointError, match=r"another engine \(this process, since '20.*\) saves its checkpoints th"):
        second.hold(tmp_path)
    second.hold(tmp_path, early=True)
    first.close()
    first.close()
    second.hold(tmp_path)
    second.close()
    with pytest.raises(CheckpointError, match=r"after close\(\)"):
        second.hold(tmp_path)


def test_a_folder_that_was_replaced_is_locked_again(tmp_path: Path) -> None:
    folder, locks, other = tmp_path / "run", FolderLocks(), FolderLocks()
    folder.mkdir()
    locks.hold(folder)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    locks.hold(folder)
    with pytest.raises(CheckpointError):
        other.hold(folder)
    other.hold(tmp_path / "old")
    locks.close()
    other.close()


@pytest.mark.parametrize("content", [b"", b"[" * 4096, b'{"host": 3}', b"\xff"])
def test_a_holder_that_is_not_known_is_another_engine(content: bytes, tmp_path: Path) -> None:
    first, second = FolderLocks(), FolderLocks()
    first.hold(tmp_path)
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(CheckpointError, match=r": another engine saves its checkpoints there"):
        second.hold(tmp_path)
    first.close()


def test_a_lock_ends_with_its_process_and_not_with_its_workers(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], env=environment, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker, locks = int(run.stdout.readline()), FolderLocks()
    try:
        with pytest.raises(CheckpointError, match=rf"\(process {run.pid} on '"):
            locks.hold(tmp_path, early=True)
        run.kill()
        run.wait()
        os.kill(worker, 0)
        locks.hold(tmp_path)
    finally:
        run.kill()
        os.kill(worker, signal.SIGKILL)
        run.stdout.close()
        locks.close()


def test_a_link_is_not_followed_and_no_lock_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    locks = FolderLocks()
    locks.hold(tmp_path)
    locks.hold(tmp_path)
    assert [record.message[:24] for record in caplog.records] == [f"checkpoint: {tmp_path}"[:24]]
    assert "cannot be locked" in caplog.text and not (tmp_path / "elsewhere").exists()
    locks.close()


def test_a_disk_without_locks_is_used_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    locks = FolderLocks()
    locks.hold(tmp_path)
    assert "cannot be locked (Operation not supported)" in caplog.text
    locks.close()
