"""Training goes on while a checkpoint is written, and nothing of the one reaches the other."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import LOCK, committed
from engine.checkpoint.format.step_reader import StepReader
from engine.errors import EngineError
from tests.engine.checkpoint.lasting import course, digest, settings, world_of
from tests.launches import Launch, Line

ROOT = Path(__file__).parents[3]
RunRanks = Callable[..., list[Any]]


class Gate(Files):
    """Files are created when the gate is open."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def create(self, path: Path) -> int:
        assert self.opened.wait(60), "nobody opened the gate"
        return super().create(path)


@contextmanager
def gated() -> Iterator[Gate]:
    """Engines made inside write through a closed gate."""
    gate = Gate()
    with patch("engine.checkpoint.coordinator.Files", lambda: gate):
        yield gate


def names(folder: Path) -> list[str]:
    """The checkpoints of a run; all are sound."""
    found = committed(Files(), folder)
    for path in found:
        StepReader(Files(), path).verify()
    return [path.name for path in found]


def trains_during_a_save(grid: str, folder: str) -> dict[str, Any]:
    """Body of a rank: two updates after the snapshot, before anything of it is written."""
    with gated() as gate, course(settings(grid)) as run:
        run.until(2)
        then = digest(run.eng)
        pending = run.eng.save_checkpoint(folder, {"at": 2})
        run.until(4)
        during = not pending.done and not names(Path(folder))
        later = digest(run.eng)
        gate.opened.set()
        pending.wait()
    with course(settings(grid)) as run:
        state = run.eng.load_checkpoint(folder)
        loaded = digest(run.eng)
        run.until(4)
        again = digest(run.eng)
    return {"during": during, "state": state, "then": loaded == then, "later": again == later, "moved": then != later}


@pytest.mark.parametrize("grid", ["dp2 zero 1", pytest.param("dp4 zero 3", marks=pytest.mark.long)])
def test_what_is_saved_is_the_step_of_the_save(run_ranks: RunRanks, tmp_path: Path, grid: str) -> None:
    found = run_ranks(trains_during_a_save, world_of(grid), grid, str(tmp_path))
    good = {"during": True, "state": {"at": 2}, "then": True, "later": True, "moved": True}
    assert found == [good] * world_of(grid)


def test_a_second_save_waits_for_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trine")
    with gated() as gate, course(settings("dp1")) as run:
        run.until(1)
        first = run.eng.save_checkpoint(tmp_path)
        run.until(2)
        opening = threading.Timer(0.5, gate.opened.set)
        opening.start()
        began = time.monotonic()
        second = run.eng.save_checkpoint(tmp_path)
        assert first.done and time.monotonic() - began > 0.3
        assert first.wait().name == "step-00000001" and second.wait().name == "step-00000002"
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert any("for the pending save" in record.getMessage() for record in caplog.records), "and says so"


def test_close_waits_for_the_save(tmp_path: Path) -> None:
    with gated() as gate, course(settings("dp1")) as run:
        run.until(1)
        run.eng.save_checkpoint(tmp_path)
        assert names(tmp_path) == []
        threading.Timer(0.3, gate.opened.set).start()
    assert names(tmp_path) == ["step-00000001"]


def test_without_async_a_save_is_over_when_the_call_returns(tmp_path: Path) -> None:
    with course(settings("dp1", checkpoint={"async": False})) as run:
        run.until(1)
        assert run.eng.save_checkpoint(tmp_path).done
        assert names(tmp_path) == ["step-00000001"]


class Slow(Files):
    """The next file that is created takes ``seconds``."""

    seconds = 0.0

    def create(self, path: Path) -> int:
        seconds, self.seconds = self.seconds, 0.0
        time.sleep(seconds)
        return super().create(path)


def outlasts_the_timeout(folder: str) -> tuple[str, list[str]]:
    """Body of a rank: rank 1 writes for longer than a silent rank is waited for."""
    files = Slow()
    with (
        patch("engine.checkpoint.coordinator.Files", lambda: files),
        patch("engine.checkpoint.coordinator.timeout_seconds", lambda configured: 1),
        course(settings("dp2", checkpoint={"folder": folder, "on_failure": "continue"})) as run,
    ):
        run.until(1)
        files.seconds = 2.5 * run.eng.grid.rank
        pending = run.eng.save_checkpoint()
        with pytest.raises(EngineError) as caught:
            pending.wait()
        run.until(2)
        run.eng.save_checkpoint().wait()
        run.until(3)
        assert run.eng.load_checkpoint() == {} and run.eng.step_count == 2
    return str(caught.value), names(Path(folder))


def test_a_save_that_outlasts_the_timeout_does_not_end_all_saves(run_ranks: RunRanks, tmp_path: Path) -> None:
    for told, left in run_ranks(outlasts_the_timeout, 2, str(tmp_path)):
        assert "has lost rank" in told and left == ["step-00000002"]


# ------------------------------------------------------------------------------------------------ ends of a process


SCRIPT = """
import sys, time
from pathlib import Path
from unittest.mock import patch
from engine.checkpoint.format.filesystem import Files
from tests.engine.checkpoint.lasting import course, settings

class SlowFiles(Files):
    def create(self, path):
        time.sleep(0.2)
        return super().create(path)

with patch("engine.checkpoint.coordinator.Files", SlowFiles):
    kept = course(settings("dp2"))
    run = kept.__enter__()
run.until(1)
pending = run.eng.save_checkpoint(Path(sys.argv[1]))
assert not pending.done
print("the last line", flush=True)
"""


@pytest.mark.long
def test_the_interpreter_waits_for_the_save_at_its_exit(tmp_path: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (tmp_path / "script.py").write_text(SCRIPT)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and all("the last line" in text for text in printed), printed
    assert names(tmp_path / "run") == ["step-00000001"]


def fails_during_a_save(line: Line, folder: str, closes: bool) -> None:
    """Body of a rank: rank 1 fails after update 3, while the checkpoint of update 2 waits at the gate."""
    with gated() as gate:
        kept = course(settings("dp2", Path(folder)))
        run = kept.__enter__()
    run.until(3)
    threading.Timer(1.0, gate.opened.set).start()
    line(names(Path(folder)))
    try:
        if run.eng.grid.rank == 1:
            raise ValueError("the user's own mistake")
        run.step()
    finally:
        if closes:
            run.eng.close()


@pytest.mark.parametrize("closes", [pytest.param(True, marks=pytest.mark.long), False])
def test_an_exception_in_the_loop_leaves_the_save_whole(tmp_path: Path, closes: bool) -> None:
    with Launch(fails_during_a_save, 2, str(tmp_path), closes, env={"TRINE_TIMEOUT_SECONDS": "40"}) as launch:
        ended = launch.end(seconds=90)
    assert [rank.code for rank in ended] == [1, 1], "and no rank hangs"
    assert [rank.said for rank in ended] == [[[]], [[]]], "the save was under way"
    assert ended[1].error.strip().endswith("ValueError: the user's own mistake")
    assert "A peer has probably stopped" in ended[0].error
    assert names(tmp_path) == ["step-00000002"]


def killed_during_a_save(line: Line, folder: str) -> None:
    """Body of a rank: rank 1 is killed while its part waits; rank 0 looks at what came of it."""
    with gated() as gate, course(settings("dp2")) as run:
        run.until(1)
        pending = run.eng.save_checkpoint(folder)
        if run.eng.grid.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gate.opened.set()
        with pytest.raises(Exception, match="has lost rank 1"):
            pending.wait()
        line(sorted(path.name for path in Path(folder).iterdir()))


def test_a_save_that_loses_a_rank_fails_and_takes_its_folder_away(tmp_path: Path) -> None:
    with Launch(killed_during_a_save, 2, str(tmp_path), env={"TRINE_TIMEOUT_SECONDS": "40"}) as launch:
        ended = launch.end(seconds=90)
    assert [rank.code for rank in ended] == [0, -signal.SIGKILL], ended[0].error
    assert set(ended[0].said[0]) <= {LOCK}, "no part of a checkpoint is left"
