"""SIGTERM ends all ranks after the same step, with a checkpoint of it committed; the next run goes on to the bit."""

import errno
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import engine
from engine.checkpoint.coordinator import EXIT_CODE
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import committed
from engine.checkpoint.format.step_reader import StepReader
from tests.engine.checkpoint.lasting import Course, course, digest, settings, world_of
from tests.launches import Ended, Launch, Line
from tests.warm_python import warm_torchrun

ROOT = Path(__file__).parents[3]
ENV = {"TRINE_TIMEOUT_SECONDS": "60"}
ONE_REQUEST = 1.0
"""Seconds for which the signals of these ranks are one request; a user has three."""


# ------------------------------------------------------------------------------------------------ any moment


class Undisturbed:
    """A run that nobody stops, taken on as far as it is asked for."""

    def __init__(self, run: Course) -> None:
        self._run = run
        self._losses: list[float] = []
        self._digests = [digest(run.eng)]

    def losses(self, start: int, stop: int) -> list[float]:
        """Of updates ``start + 1`` to ``stop``. Collective."""
        while len(self._losses) < stop:
            self._losses.append(self._run.step().loss)
            self._digests.append(digest(self._run.eng))
        return self._losses[start:stop]

    def digest(self, step: int) -> str:
        """After this update. Collective."""
        self.losses(0, step)
        return self._digests[step]


def stopped_again_and_again(line: Line, grid: str, folder: str, count: int) -> None:
    """Body of a rank: runs that the test stops, each gone on from by a fresh engine; the last exit is a real one."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # of a rank that is stopped because of another, when it is late
    with course(settings(grid)) as plain:
        undisturbed = Undisturbed(plain)
        for trial in range(count):
            kept, losses = settings(grid, Path(folder) / str(trial)), []
            with course(kept) as run:
                line(("ready", trial))
                try:
                    while True:
                        losses.append(run.step().loss)
                except SystemExit as leaving:
                    code, made = leaving.code, run.eng.step_count
            assert line.hear() == trial, "the signal is on its way to all"
            found: dict[str, Any] = {"code": code, "made": made}
            found["losses"] = losses == undisturbed.losses(0, made)[: len(losses)] and len(losses) >= made - 1
            with course(kept) as run:
                run.eng.load_checkpoint()
                found["loaded"] = (run.eng.step_count, digest(run.eng)) == (made, undisturbed.digest(made))
                found["gone on"] = [run.step().loss for _ in range(2)] == undisturbed.losses(made, made + 2)
                found["the same"] = digest(run.eng) == undisturbed.digest(made + 2)
            line(found)
    with course(settings(grid, Path(folder) / "last")) as run:
        line("the last")
        while True:
            run.step()


def stop(grid: str, folder: Path, count: int, chance: random.Random) -> None:
    """Stop ``count`` runs in one launch, some by a signal to every rank and some by one to a single rank."""
    ranks = world_of(grid)
    with Launch(stopped_again_and_again, ranks, grid, str(folder), count, env=ENV) as launch:
        for trial in range(count):
            launch.hear(("ready", trial), seconds=120)
            time.sleep(chance.uniform(0, 0.5))
            launch.send(signal.SIGTERM, *(() if trial % 2 else (chance.randrange(ranks),)))
            launch.tell(trial)
        launch.hear("the last", seconds=120)
        launch.send(signal.SIGTERM)
        ended = launch.end()
    assert [rank.code for rank in ended] == [EXIT_CODE] * ranks, [rank.error for rank in ended]
    for trial in range(count):
        found = [[word for word in rank.said if isinstance(word, dict)][trial] for rank in ended]
        good = {"code": EXIT_CODE, "losses": True, "loaded": True, "gone on": True, "the same": True}
        assert found == [good | {"made": found[0]["made"]}] * ranks, trial
        steps(folder / str(trial))
    assert steps(folder / "last")
    print(f"{count} runs stopped on {grid}")


def steps(folder: Path) -> list[str]:
    """The checkpoints of a run; all are sound."""
    found = committed(Files(), folder)
    for path in found:
        StepReader(Files(), path).verify()
    return [path.name for path in found]


@pytest.mark.long
def test_stopped_at_a_random_moment(tmp_path: Path) -> None:
    stop("dp2 x tp2 zero 1", tmp_path, 2, random.Random(1))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("grid", ["dp2 x tp2 zero 1", "dp2 x pp2", "dp4 zero 3"])
def test_stopped_at_many_random_moments(tmp_path: Path, grid: str) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    stop(grid, tmp_path, 17, random.Random(seed))


# ------------------------------------------------------------------------------------------------ in a save


class SlowFiles(Files):
    """A disk that takes its time; says when it begins."""

    def __init__(self, line: Line, seconds: float) -> None:
        self._line, self._seconds, self._said = line, seconds, False

    def sync(self, file: int) -> None:
        if not self._said:
            self._said = True
            self._line("saving")
        time.sleep(self._seconds)
        super().sync(file)


def saves_slowly(line: Line, folder: str, seconds: float) -> None:
    """Body of a rank: a save begins after update 2; then wait for the test before update 3."""
    with (
        patch("engine.checkpoint.coordinator.Files", lambda: SlowFiles(line, seconds)),
        patch("engine.checkpoint.coordinator.ONE_REQUEST_SECONDS", ONE_REQUEST),
        course(settings("dp2", Path(folder))) as run,
    ):
        run.until(2)
        assert line.hear() == "go on"
        while True:
            run.step()


def test_stopped_while_a_save_is_under_way(tmp_path: Path) -> None:
    with Launch(saves_slowly, 2, str(tmp_path), 0.1, env=ENV) as launch:
        launch.hear("saving")
        launch.send(signal.SIGTERM, 1)
        launch.tell("go on")
        ended = launch.end()
    assert [rank.code for rank in ended] == [EXIT_CODE] * 2, [rank.error for rank in ended]
    assert steps(tmp_path) == ["step-00000002", "step-00000003"], "the one under way, and that of the last step"


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with Launch(saves_slowly, 2, str(tmp_path), 100.0, env=ENV) as launch:
        launch.hear("saving")
        launch.send(signal.SIGTERM)
        launch.tell("go on")
        time.sleep(ONE_REQUEST + 1.0)
        assert all(process.is_alive() for process in launch.processes), "they wait for the disk"
        began = time.monotonic()
        launch.send(signal.SIGTERM)
        ended = launch.end()
    assert [rank.code for rank in ended] == [-signal.SIGTERM] * 2
    assert time.monotonic() - began < 30, "and not the 100 s of the disk"
    assert steps(tmp_path) == []


def stopped_in_a_snapshot(line: Line, folder: str) -> None:
    """Body of a rank: rank 1 gets the signal while its part of update 2 is copied."""

    class Witness:
        def state_dict(self) -> dict[str, Any]:
            if run.eng.step_count == 2 and run.eng.grid.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return {}

        def load_state_dict(self, state: Any) -> None:
            """There is nothing."""

    with course(settings("dp2", Path(folder))) as run:
        run.eng.register_for_checkpointing(witness=Witness())
        while True:
            line(run.step().step)


def test_stopped_in_a_snapshot(tmp_path: Path) -> None:
    with Launch(stopped_in_a_snapshot, 2, str(tmp_path), env=ENV) as launch:
        ended: list[Ended] = launch.end()
    assert [rank.code for rank in ended] == [EXIT_CODE] * 2, [rank.error for rank in ended]
    assert [rank.said for rank in ended] == [[1, 2]] * 2, "update 3 is the last one, and ends by the exit"
    assert steps(tmp_path) == ["step-00000002", "step-00000003"]


class FullDisk(Files):
    """No file is created any more."""

    def create(self, path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_stopped_with_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with course(settings("dp1", tmp_path)) as run:
        run.until(2)
    with patch("engine.checkpoint.coordinator.Files", FullDisk), course(settings("dp1", tmp_path)) as run:
        run.eng.load_checkpoint()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(engine.CheckpointError, match="No space left on device"):
            run.step()  # status 143 would promise a checkpoint
    assert steps(tmp_path) == ["step-00000002"]
    assert "checkpoint failed at step 3: " in caplog.text
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "what was there is put back"


# ------------------------------------------------------------------------------------------------ the real launcher


SCRIPT = """
import sys
from pathlib import Path
from tests.engine.checkpoint.lasting import course, settings

with course(settings("dp2", Path(sys.argv[1]))) as run:
    while True:
        report = run.step()
        if run.eng.grid.rank == 0:
            print("LOSS", report.step, report.loss.hex(), flush=True)
"""


def torchrun(python: str, folder: Path, kept: Path) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*warm_torchrun(python), "--standalone", "--nproc_per_node", "2", str(script)]
    return subprocess.Popen(
        [*command, str(kept)],
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stopped_after(job: subprocess.Popen[str], step: int) -> str:
    """Send SIGTERM to the launcher once this update is made; what was printed to the end."""
    watch = threading.Timer(120, os.killpg, (job.pid, signal.SIGKILL))  # its ranks too: they hold the pipe open
    watch.start()
    printed, sent = "", False
    with job:
        for text in job.stdout or ():
            printed += text
            if not sent and any(made >= step for made in losses(text)):
                job.send_signal(signal.SIGTERM)
                sent = True
    watch.cancel()
    return printed


def losses(printed: str) -> dict[int, float]:
    """Of updates by their number, wherever in a line they stand: other ranks write between."""
    return {int(step): float.fromhex(loss) for step, loss in re.findall(r"LOSS (\d+) (\S+)\n", printed)}


def goes_on(line: Line, kept: str) -> None:
    """Body of a rank: two more updates, and all of it without a stop."""
    with course(settings("dp2", Path(kept))) as run:
        run.eng.load_checkpoint()
        made = run.eng.step_count
        line((made, run.until(made + 2), digest(run.eng)))
    with course(settings("dp2")) as run:
        line((0, run.until(made + 2), digest(run.eng)))


def test_stopped_by_the_launcher(tmp_path: Path, warm_python: str) -> None:
    job = torchrun(warm_python, tmp_path, tmp_path / "kept")
    printed = stopped_after(job, 3)
    assert job.returncode not in (0, -signal.SIGKILL), printed
    stopped = [text for text in printed.splitlines() if text.startswith("stopped by SIGTERM")]
    assert len(stopped) == 1 and "Traceback" not in printed.split(stopped[0])[0], printed
    left = steps(tmp_path / "kept")  # now: every second update of those that follow is saved too
    with Launch(goes_on, 2, str(tmp_path / "kept"), env=ENV) as launch:
        ended = launch.end()
    assert all(len(rank.said) == 2 for rank in ended), [rank.error for rank in ended]
    for (made, after, end), (_, alone, same) in (rank.said for rank in ended):
        assert made >= 3 and stopped[0].startswith(f"stopped by SIGTERM after update {made};")
        assert list(losses(printed).values()) == alone[: made - 1], "the last update ends by the exit"
        assert (after, end) == (alone[made:], same)
    assert left[-1] == f"step-{made:08d}"
