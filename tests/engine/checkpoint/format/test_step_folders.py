"""Folders of a run: names, what counts, retention, links, locks."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import (
    LOCK,
    FolderLocks,
    committed,
    is_step,
    read_manifest,
    retain,
    step_of,
    sweep,
)
from engine.checkpoint.format.step_reader import StepReader
from engine.errors import CheckpointError
from tests.engine.checkpoint.fake_ranks import fake_run
from tests.engine.checkpoint.test_crash import run_of
from tests.ranks import ROOT

FILES = Files()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("step-00000012", (12, 0)), ("step-00000012-r3", (12, 3)), ("step-123456789012345678", (123456789012345678, 0)),
        ("step-12", None), ("step-00000012.tmp-ab", None), ("step-00000012-r", None), ("step-0000001x", None),
        ("step-00000012 ", None), ("step-00000012\n", None), (".trash-step-00000012", None),
        ("abandoned-ab-step-00000012", None), ("step-٠٠٠٠٠٠١٢", None), ("latest", None),
    ],
)  # fmt: skip
def test_names(name: str, key: tuple[int, int] | None) -> None:
    assert step_of(name) == key


def test_the_newest_is_last(tmp_path: Path) -> None:
    names = ["step-00000009", "step-00000010", "step-00000010-r2", "step-00000010-r10", "step-100000000"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000011.tmp-ab").mkdir()
    assert [path.name for path in committed(FILES, tmp_path)] == names
    assert committed(FILES, tmp_path / "missing") == []


@pytest.mark.parametrize("keep", [-1, 0, 1, 2, 5])
def test_at_least_the_newest_stays(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 3):
        run_of(1).save(tmp_path, step)
    gone = retain(FILES, tmp_path, keep)
    assert [step_of(path.name) for path in gone] == [(step, 0) for step in (1, 2, 3)[: -max(1, keep)]]
    assert len(committed(FILES, tmp_path)) == 3 - len(gone) and len(list(tmp_path.iterdir())) == 4 - len(gone)


def test_a_run_may_lie_behind_a_link(tmp_path: Path) -> None:
    """Its checkpoints are found, saved to and kept in order; without that it would start from the beginning."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    for step in (1, 2, 2):
        run_of(1).save(tmp_path / "run", step, keep=2)
    assert [path.name for path in committed(FILES, tmp_path / "run")] == ["step-00000002", "step-00000002-r1"]
    (tmp_path / "disk" / "step-00000003.tmp-0123abcd").mkdir()
    sweep(FILES, tmp_path / "run")
    assert not (tmp_path / "disk" / "step-00000003.tmp-0123abcd").exists()


def test_a_link_to_a_checkpoint_is_one(tmp_path: Path) -> None:
    (step,) = run_of(1).save(tmp_path, 1)
    (tmp_path / "best").symlink_to(step)
    assert is_step(FILES, tmp_path / "best") and not is_step(FILES, tmp_path)
    StepReader(FILES, tmp_path / "best").verify()


def test_cleaning_up_does_not_follow_links(tmp_path: Path) -> None:
    """A checkpoint that was moved to an archive and linked back leaves the run, and stays in the archive."""
    archive = tmp_path / "archive"
    for step in (1, 2):
        run_of(1).save(tmp_path / "run", step)
    (tmp_path / "run" / "step-00000001").rename(archive)
    (tmp_path / "run" / "step-00000001").symlink_to(archive)
    (tmp_path / "run" / ".trash-step-00000009").symlink_to(archive)
    sweep(FILES, tmp_path / "run")
    retain(FILES, tmp_path / "run", 1)
    assert [path.name for path in committed(FILES, tmp_path / "run")] == ["step-00000002"]
    StepReader(FILES, archive).verify()


@pytest.mark.parametrize("added", [b" ", b"\n", b"{}", b"\0" * 4096])
def test_a_commit_that_has_grown_is_refused(tmp_path: Path, added: bytes) -> None:
    (step,) = run_of(1).save(tmp_path, 1)
    with (step / "COMMIT").open("ab") as file:
        file.write(added)
    with pytest.raises(CheckpointError, match=r"step-00000001/COMMIT is damaged"):
        read_manifest(FILES, step)


def test_a_folder_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    (step,) = run_of(1).save(tmp_path, 1)
    step.rename(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest.json is of step 1"):
        read_manifest(FILES, tmp_path / "step-00000002")
    (tmp_path / "step-00000002").rename(tmp_path / "good one")
    assert read_manifest(FILES, tmp_path / "good one").step == 1


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    (step,) = run_of(1).save(tmp_path, 1)
    (step / name).unlink()
    with pytest.raises(CheckpointError, match=rf"step-00000001/{name} cannot be read \(No such file"):
        read_manifest(FILES, step)


def test_a_file_under_a_checkpoint_s_name_is_refused_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_bytes(b"")
    (step,) = committed(FILES, tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Not a directory"):
        read_manifest(FILES, step)


@pytest.mark.parametrize("elements", [1000, 3_000_000])
def test_a_file_that_shrinks_while_it_is_open_is_refused(tmp_path: Path, elements: int) -> None:
    """The reader's memory may still hold what is gone."""
    run = fake_run(
        lambda: nn.Linear(elements, 1), {"train_batch_size": 1, "parallel": {"data": 1}}, torch.zeros(1, elements)
    )
    (step,) = run.save(tmp_path)
    reader = StepReader(FILES, step)
    reader.verify()
    (path,) = (step / "model").glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=rf"{path.name} cannot be read \(it has become shorter"):
        reader.verify()


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
