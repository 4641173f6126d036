"""kill -9 of any rank at any moment: no committed checkpoint is lost, and the next launch goes on to the bit.

A history is one run that is killed again and again, each time on another rank and at another place, and launched anew
on what is left, until it has made all its updates. Whatever it says on the way (the loss of every update, also of those
that are made a second time) is compared with the run that nobody disturbed.
"""

import json
import logging
import os
import random
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import committed, step_of
from engine.checkpoint.format.step_reader import StepReader
from engine.parallel.comm import failed_calls, rendezvous
from engine.watchdog.monitor import REPORT
from tests.engine.checkpoint.fatal import LOADING, MESSAGES, SAVING, Fate, doomed
from tests.engine.checkpoint.lasting import course, digest, settings, world_of
from tests.launches import Ended, Launch, Line

STEPS = 8
WIDE = ("dp2 x tp2 zero 1", "dp2 x pp2", "dp4 zero 3")
LOST = re.compile(
    r"(EngineError|CheckpointError): .*"
    r"(has lost rank \d|failed: .*A peer has probably stopped|a rank has ended in the middle)"
)
"""What a rank says that another one has left alone."""
TIMEOUT = 60
PROMPT = 20
"""Seconds in which the others have noticed, on a busy machine; who waits for the timeout has missed it."""
ENV = {"TRINE_TIMEOUT_SECONDS": str(TIMEOUT)}


@dataclass(frozen=True)
class Kill:
    """Which rank dies where: at the ``count``-th operation of a kind, or ``after`` seconds of training."""

    rank: int
    kind: str = ""
    count: int = 0
    after: float = 0.0


@dataclass(frozen=True)
class Undisturbed:
    """What a run says and does that nobody kills."""

    losses: dict[int, float]
    digests: list[str]
    operations: list[dict[str, int]]
    """By rank."""
    seconds: float
    """From the first step to the end."""


def trains(line: Line, grid: str, folder: str, kill: Kill) -> None:
    """Body of a rank: go on from what there is, to the last update."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("checkpoint saved"):
                line(("saved", str(record.args[0])))  # type: ignore[index]

    logging.getLogger("trine").addHandler(Told(logging.INFO))
    logging.getLogger("trine").setLevel(logging.INFO)
    # A rank that is killed records no failure; a user's job waits seconds for the record of a slow host.
    rendezvous._REPORT_SECONDS = failed_calls._WORDS_SECONDS = 0.2
    failed_calls._LEAVE_SECONDS = 0.1
    fate = Fate()
    with doomed(fate), course(settings(grid, Path(folder))) as run:
        if run.eng.grid.rank == kill.rank:
            fate.kind, fate.count = kill.kind, kill.count
        run.eng.load_checkpoint(missing_ok=True)
        line("ready")
        while run.eng.step_count < STEPS:
            report = run.step()
            line(("loss", report.step, report.loss))
        line(("digest", digest(run.eng)))
    line(("operations", fate.seen))


def of_kind(ended: Ended, kind: str) -> list[Any]:
    """What a rank has said of one kind, without that word."""
    return [word[1:] for word in ended.said if isinstance(word, tuple) and word[0] == kind]


def undisturbed(grid: str, folder: Path) -> Undisturbed:
    """The run that all others are compared with."""
    with Launch(trains, world_of(grid), grid, str(folder), Kill(-1), env=ENV) as launch:
        launch.hear("ready")
        began = time.monotonic()
        ended = launch.end()
        seconds = time.monotonic() - began
    assert [rank.code for rank in ended] == [0] * len(ended), [rank.error for rank in ended]
    losses = dict(of_kind(ended[0], "loss"))
    assert list(losses) == list(range(1, STEPS + 1)) and len(set(losses.values())) == STEPS
    digests = [of_kind(rank, "digest")[0][0] for rank in ended]
    return Undisturbed(losses, digests, [of_kind(rank, "operations")[0][0] for rank in ended], seconds)


@dataclass
class History:
    """One run over its launches."""

    grid: str
    reference: Undisturbed
    folder: Path
    known: set[str] = field(default_factory=set)
    """Checkpoints that were seen or said to be committed."""
    kills: int = 0

    def launch(self, kill: Kill) -> bool:
        """Launch it, kill it, look at what is left; whether it has come to its end."""
        found = [key[0] for path in committed(Files(), self.folder) if (key := step_of(path.name)) is not None]
        (self.folder / REPORT).unlink(missing_ok=True)
        with Launch(trains, world_of(self.grid), self.grid, str(self.folder), kill, env=ENV) as launch:
            if not kill.kind and kill.rank >= 0:
                launch.hear("ready")
                time.sleep(kill.after)
                launch.send(signal.SIGKILL, kill.rank)
            ended = launch.end(seconds=TIMEOUT + 30)
        self._check_ranks(ended, kill)
        begun = {of_kind(rank, "loss")[0][0] for rank in ended if of_kind(rank, "loss")}
        assert begun <= {max(found, default=0) + 1}, "it goes on from the newest"
        self._check_checkpoints(ended)
        killed = any(rank.code == -signal.SIGKILL for rank in ended)
        self.kills += killed
        return not killed

    def _check_ranks(self, ended: Sequence[Ended], kill: Kill) -> None:
        silent = min(rank.at for rank in ended)
        for number, rank in enumerate(ended):
            assert rank.at - silent < PROMPT, f"rank {number} went on {rank.at - silent:.0f} s after {kill}"
            for step, loss in of_kind(rank, "loss"):
                assert loss == self.reference.losses[step], (kill, number, step)
            for (found,) in of_kind(rank, "digest"):
                assert found == self.reference.digests[number], (kill, number)
            if number == kill.rank and rank.code == -signal.SIGKILL:
                continue
            if rank.code == -signal.SIGKILL and not rank.error:  # the watchdog was quicker
                blame = json.loads((self.folder / REPORT).read_text())
                assert (blame["kind"], blame["ranks"]) == ("ended", [kill.rank]), (number, kill, blame["sentence"])
                continue
            assert rank.code in (0, 1), f"rank {number} ended with {rank.code} after {kill}:\n{rank.error}"
            if rank.code:
                last = rank.error.strip().splitlines()[-1]
                assert LOST.search(last), f"rank {number} after {kill}:\n{rank.error}"

    def _check_checkpoints(self, ended: Sequence[Ended]) -> None:
        there = {path.name for path in committed(Files(), self.folder)}
        for name in sorted(there):
            StepReader(Files(), self.folder / name).verify()
        self.known |= there | {Path(path).name for rank in ended for (path,) in of_kind(rank, "saved")}
        kept = sorted(self.known)[-2:]
        assert set(kept) <= there, f"{sorted(there)} are left of {sorted(self.known)}"


def kills_of(reference: Undisturbed, chance: random.Random) -> Iterator[Kill]:
    """Without end: a random moment, or a random operation of a random kind on a rank that makes it."""
    while True:
        rank = chance.randrange(len(reference.operations))
        kind = chance.choice(("", "", *SAVING, *LOADING, *MESSAGES))
        if not kind:
            yield Kill(rank, after=chance.uniform(0, reference.seconds))
        elif count := reference.operations[rank].get(kind, 0):
            yield Kill(rank, kind, chance.randint(1, count))
        elif kind in LOADING:
            yield Kill(rank, kind, chance.randint(1, 8))


def play(grid: str, folder: Path, kills: Iterable[Kill], wanted: int) -> None:
    """Histories that meet as many of these kills, the last one to its end."""
    reference = undisturbed(grid, folder / "reference")
    history, done, kills = History(grid, reference, folder / "0"), 0, iter(kills)
    while done + history.kills < wanted:
        if history.launch(next(kills)):
            done += history.kills
            history = History(grid, reference, folder / str(done))
    before = committed(Files(), history.folder)
    assert history.launch(Kill(-1)), "nobody kills the last launch"
    if committed(Files(), history.folder) != before:
        others = [
            p.name
            for p in history.folder.iterdir()
            if not re.fullmatch(r"step-\d+|latest|.trine.lock|watchdog_.+", p.name)
        ]
        assert not others, "a save sweeps what the killed ones have left"
    print(f"{done + history.kills} kills on {grid}")


FIXED = [
    Kill(1, "send", 3),  # weights on their way to their owner, who has to take those of the others all the same
    Kill(2, "write", 5),  # the second save, torn: what is there afterwards is the first
    Kill(0, "read_into", 4),  # in the load of the next launch
    Kill(0, "sync_folder", 5),  # the folder has its name, nobody knows yet whether for good
]


@pytest.mark.long
def test_killed_in_saves_in_a_load_and_in_a_commit(tmp_path: Path) -> None:
    play("dp2 x tp2 zero 1", tmp_path, FIXED, len(FIXED))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("grid", WIDE)
def test_killed_at_random(tmp_path: Path, grid: str, request: pytest.FixtureRequest) -> None:
    wanted = int(request.config.getoption("--kills"))
    seed = int(request.config.getoption("--kill-seed") or time.time())
    print(f"--kill-seed {seed}")
    reference = undisturbed(grid, tmp_path / "counted")
    share = wanted // len(WIDE) + (WIDE.index(grid) < wanted % len(WIDE))
    play(grid, tmp_path, kills_of(reference, random.Random(seed)), share)


def comes_late(line: Line, folder: str) -> None:
    """Body of a rank: rank 1 dies before anybody reads a checkpoint."""
    with course(settings("dp2", Path(folder))) as run:
        line("ready")
        if run.eng.grid.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.eng.load_checkpoint()


@pytest.mark.long
def test_killed_before_a_load(tmp_path: Path) -> None:
    """The watchdog, which acts before a call gives up, waits longer here."""
    env = {"TRINE_TIMEOUT_SECONDS": "10", "TRINE_WATCHDOG_SECONDS": "60"}
    with Launch(comes_late, 2, str(tmp_path), env=env) as launch:
        ended = launch.end(seconds=60)
    assert [rank.code for rank in ended] == [1, -signal.SIGKILL], ended[0].error
    assert "EngineError: load_checkpoint was called on rank 0, but not on rank 1 within 10 s; " in ended[0].error
