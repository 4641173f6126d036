"""``trine serve`` under torchrun, which restarts it: ranks and whole servers are killed, and no bit changes."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.engine.serving.lossy import Lossy, TinkerLine, TrainedTenant, train_tenant
from tests.engine.serving.wire.tinker_calls import forward_backward
from tests.warm_python import warm_torchrun

RANKS = (4, 8, 1, 16)
"""Ranks of the tenants' adapters."""
GRIDS: Mapping[str, tuple[int, Mapping[str, Any], int]] = {
    "tp2 x pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}}, 16),
    **{f"dp2 ZeRO {stage}": (2, {"zero_optimization": {"stage": stage}}, 4) for stage in (1, 2, 3)},
}  # fmt: skip
"""Processes, settings and updates of a tenant by grid: 200 commands of four tenants on the first one."""
SAID = ("told to end, or a rank has ended", "has lost rank 1")
"""Words of rank 0's signal, and of its error, whichever comes first."""


class ServedJob:
    """Job of torchrun that serves a folder, found again after a restart of its ranks.

    Args:
        python: command that starts a warm Python.
        settings: configuration of the service.
    """

    def __init__(self, python: str, folder: Path, size: int, settings: Mapping[str, Any]) -> None:
        folder.mkdir()
        self.folder, self.size, self._mark = folder / "service", size, f"TRINE_TEST_JOB={folder}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "log.txt"
        serve = {"port": port, "folder": str(self.folder), "models": ["model"], "journal": {"snapshot_every": 6}}
        (folder / "config.json").write_text(json.dumps({"serve": serve, **settings}), encoding="utf-8")
        models.llama().save_pretrained(folder / "model")  # type: ignore[operator]
        options = ("--standalone", "--nproc_per_node", str(size), "--max_restarts", "9", "-m", "engine.launch.cli")
        arguments = ("serve", str(folder / "config.json"), "--model", str(folder / "model"))
        self._command = [*warm_torchrun(python), *options, *arguments]
        self._job: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the job, as an operator or a scheduler does."""
        name, _, value = self._mark.partition("=")
        environment = os.environ | {"OMP_NUM_THREADS": "1", name: value}
        with self._log.open("ab") as log:
            self._job = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    @property
    def printed(self) -> str:
        """Output of all starts."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def starts(self) -> int:
        """Number of times that a service has listened."""
        return self.printed.count("service at ")

    def await_start(self, number: int) -> None:
        """Waits until a service listens for the ``number``-th time."""
        until = time.monotonic() + 200
        while self.starts < number:
            assert time.monotonic() < until, self.printed[-4000:]
            time.sleep(0.05)

    def _processes(self) -> Iterator[tuple[int, int | None]]:
        """Yields the processes of this job with their rank; None for the launcher."""
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                given = (
                    (path / "environ").read_bytes().decode(errors="replace").split("\0")
                    if path.name.isdecimal()
                    else ()
                )
                if self._mark in given:
                    yield int(path.name), next((int(one[5:]) for one in given if one.startswith("RANK=")), None)

    def kill(self, *ranks: int | None) -> None:
        """Sends SIGKILL to ranks; None is the launcher."""
        for process, rank in list(self._processes()):
            if rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        if None in ranks:
            assert self._job is not None
            self._job.wait(20)

    def close(self) -> None:
        """Ends everything."""
        for process, _ in list(self._processes()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._job is not None:
            self._job.wait(20)


@contextmanager
def serving(python: str, folder: Path, size: int, settings: Mapping[str, Any]) -> Iterator[ServedJob]:
    """Serves until the block ends."""
    job = ServedJob(python, folder, size, settings)
    try:
        job.start()
        job.await_start(1)
        yield job
    finally:
        job.close()


def train_alone(job: ServedJob, steps: int) -> list[TrainedTenant]:
    """Trains one tenant after the other, each unloaded before the next is created."""
    found = []
    for rank in RANKS:
        line = TinkerLine(job.url)
        found.append(train_tenant(line, rank, steps, job.folder))
        line.close()
    return found


def train_disturbed(job: ServedJob, steps: int, kills: list[tuple[int | None, ...]]) -> list[TrainedTenant]:
    """Trains all tenants at once over a network that loses and doubles, with SIGKILL in random commands."""
    networks = [Lossy(rank) for rank in RANKS]
    lines = [TinkerLine(job.url, network) for network in networks]
    total, draw = len(RANKS) * (3 * steps + 2), random.Random(7)
    moments = sorted(draw.sample(range(len(RANKS), total - 12), len(kills)))
    moments[-1] = moments[-2]  # the last one hits the start after the one before it, while commands run again
    with ThreadPoolExecutor(len(RANKS)) as pool:
        tenants = [
            pool.submit(train_tenant, line, rank, steps, job.folder) for line, rank in zip(lines, RANKS, strict=True)
        ]
        for number, (moment, killed) in enumerate(zip(moments, kills, strict=True), 1):
            while sum(line.answered for line in lines) < moment:
                assert not any(one.done() and one.exception() for one in tenants), [
                    one.exception() for one in tenants if one.done()
                ]
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.1))
            began = time.monotonic()
            job.kill(*killed)
            if None in killed:
                job.start()
            job.await_start(number + 1)
            print(f"killed {killed} after {moment} commands, served again after {time.monotonic() - began:.1f} s")
        found = [one.result() for one in tenants]
    for line in lines:
        line.close()
    lost, doubled = (sum(getattr(one, name) for one in networks) for name in ("lost", "doubled"))
    print(f"{total} commands, {lost} replies lost, {doubled} requests doubled")
    assert lost > total / 5 and doubled > total / 10, "every command has two requests or more"
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("grid", GRIDS)
def test_tenants_have_the_bits_of_runs_alone_and_undisturbed(tmp_path: Path, warm_python: str, grid: str) -> None:
    size, settings, steps = GRIDS[grid]
    every: tuple[int | None, ...] = tuple(range(size))
    kills = [(size - 1,), every, (1,), (*every, None), (size // 2,)] if size == 4 else [(1,), every]
    with serving(warm_python, tmp_path / "disturbed", size, settings) as job:
        disturbed = train_disturbed(job, steps, kills)
    with serving(warm_python, tmp_path / "alone", size, settings) as job:
        alone = train_alone(job, steps)
    for rank, one, other in zip(RANKS, disturbed, alone, strict=True):
        assert one.results == other.results, f"losses of the tenant of rank {rank}"
        assert one.files == other.files, f"weights of the tenant of rank {rank}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rank_killed_in_a_forward_is_503_within_five_seconds_and_its_command_runs_again(
    tmp_path: Path, warm_python: str
) -> None:
    rows = [[(row * 7 + at) % 61 for at in range(20)] for row in range(150)]
    with serving(warm_python, tmp_path / "job", 2, {"parallel": {"tensor": 2}}) as job:
        line, found, seconds, killed = TinkerLine(job.url), list[Any](), 0.0, 0.0
        for number in range(2):
            key = line.future("forward_backward", forward_backward(line.create(4, number), 1, rows))
            began = time.monotonic()
            if number:
                time.sleep(min(0.5, seconds / 3))
                killed = time.monotonic()
                job.kill(1)
            found.append(line.result(key))
            seconds = time.monotonic() - began
        line.close()
    first = next((at - killed, text) for at, status, text in line.refusals if at > killed and status == 503)
    print(f"a forward of {len(rows)} data; answered 503 after {first[0]:.1f} s: {first[1]}")
    assert first[0] < 5 and any(words in first[1] for words in SAID)
    assert found[0] == found[1] and job.starts == 2
