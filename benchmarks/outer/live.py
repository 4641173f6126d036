"""Real sites of an outer loop: a process for each, and a store in this process that serves them over HTTP."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from benchmarks.harness.figures import ROOT
from benchmarks.outer.live_site import Job
from engine.checkpoint.format.pieces import Part
from engine.config import load_config
from engine.config.outer_section import shared_settings
from engine.outer.http.line import HttpLink
from engine.outer.http.service import SERVER, serving
from engine.outer.messages import JoinRequest, NamedPiece, RankLayout
from engine.outer.store.store import Store
from engine.web.sockets import address_of, listen

TOKEN = "benchmark"
SECONDS = 240.0
"""Seconds after which a training is given up."""
_LOOK = 0.1


class Hosts(Protocol):
    """Interface of the hosts of sites; ``tests.network.Network`` has it."""

    @property
    def address(self) -> str:
        """Address at which sites reach the store."""

    def command(self, site: int, words: Sequence[str]) -> list[str]:
        """Returns the command that runs ``words`` on the host of a site."""


@dataclass(frozen=True, slots=True)
class ThisHost:
    """All sites on this host."""

    address: str = "127.0.0.1"

    def command(self, site: int, words: Sequence[str]) -> list[str]:
        """Returns ``words``."""
        return [*words]


@dataclass(frozen=True, slots=True)
class Step:
    """Step of one site."""

    site: int
    began: float
    ended: float
    waited: float
    """Seconds in which the site has waited for the store."""
    loss: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Results of a training by real sites."""

    steps: tuple[Step, ...]
    """Steps of all sites, in the order of their ends."""
    ends: tuple[dict[str, Any], ...]
    """Last line of each site: validation loss, pushed and pulled bytes, moments; empty if the training was ended."""

    @property
    def validation(self) -> float:
        """Validation loss of the site that has ended last, whose weights contain all others'."""
        last = max(range(len(self.ends)), key=lambda site: max(s.ended for s in self.steps if s.site == site))
        return float(self.ends[last]["validation"])

    def seconds_until(self, loss: float, window: int) -> float | None:
        """Returns the seconds until the mean of the last ``window`` training losses is ``loss``; None if never."""
        begin = min(step.began for step in self.steps) if self.steps else 0.0
        for end in range(window, len(self.steps) + 1):
            if sum(step.loss for step in self.steps[end - window : end]) <= loss * window:
                return self.steps[end - 1].ended - begin
        return None


class LiveSites:
    """Processes of sites on their hosts, which train one job after the other.

    Args:
        folder: empty folder of jobs and logs.
    """

    def __init__(self, folder: Path, count: int, hosts: Hosts) -> None:
        self._folder, self._hosts, self._jobs = folder, hosts, 0
        self._processes = list[subprocess.Popen[bytes]]()
        for site in range(count):
            words = [sys.executable, "-m", "benchmarks.outer.live_site", str(folder), str(site)]
            with (folder / f"site{site}.log").open("wb") as log:
                command = hosts.command(site, words)
                self._processes.append(subprocess.Popen(command, env=_environment(), cwd=ROOT, stdout=log, stderr=log))

    def train(self, job: Job, until: Callable[[Trained], bool] | None = None) -> Trained:
        """Trains all sites of a job, whose ``folder`` is replaced; ``until``: ends the training early."""
        folder, outer = self._folder / str(self._jobs), dict(job.outer)
        self._jobs, sites = self._jobs + 1, range(len(job.pauses))
        folder.mkdir()
        with ExitStack() as stack:
            if outer.get("rule") == "hogwild":
                outer["folder"] = stack.enter_context(TemporaryDirectory(dir="/dev/shm", prefix="trine-hogwild-"))
            elif outer:
                outer["url"] = stack.enter_context(_served(job, self._hosts, folder / "store"))
            job = replace(job, folder=str(folder), outer=outer)
            job.write()
            self._await(lambda: all((folder / f"ready-{site}").exists() for site in sites))
            (folder / "go").touch()

            def ended() -> bool:
                if until is not None and until(_read(job)):
                    (folder / "stop").touch()
                return all((folder / f"ended-{site}").exists() for site in sites)

            self._await(ended)
            return _read(job)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _await(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            failed = [site for site, process in enumerate(self._processes) if process.poll() is not None]
            if failed or time.monotonic() > deadline:
                site = failed[0] if failed else 0
                log = (self._folder / f"site{site}.log").read_text()
                raise RuntimeError(f"site {site} has failed, or is too slow: {log[-2000:]}")
            time.sleep(_LOOK)


@contextmanager
def live_sites(count: int, hosts: Hosts | None = None) -> Iterator[LiveSites]:
    """Starts ``count`` sites, on this host without ``hosts``; ends them after the block."""
    with TemporaryDirectory(prefix="trine-outer-") as name:
        sites = LiveSites(Path(name), count, hosts or ThisHost())
        try:
            yield sites
        finally:
            sites.close()


def transport_rate(hosts: Hosts, elements: int = 8_000_000) -> float:
    """Returns the bytes a second at which a pull of ``elements`` fp32 numbers comes over HTTP, without a disk."""
    job = Job("", {"rule": "async", "url": "http://store:1"}, {"type": "SGD", "params": {"lr": 0.1}}, 1, (0.0,))
    with _served(job, hosts, None) as url, TemporaryDirectory() as name:
        path = Path(name) / "rate.json"
        path.write_text(json.dumps({"url": url, "elements": elements, "settings": _settings(job)}))
        words = [sys.executable, "-m", "benchmarks.outer.live", str(path)]
        done = subprocess.run(
            hosts.command(0, words), env=_environment(), cwd=ROOT, capture_output=True, text=True, check=True
        )
    return float(done.stdout)


def _pull(path: Path) -> float:
    """Seeds a store with one tensor, and returns the bytes a second of the fastest of three pulls."""
    job = json.loads(path.read_text())
    shapes, piece = (("weight", (job["elements"],)),), NamedPiece("weight", Part((job["elements"],)).whole())
    link = HttpLink([job["url"]], token=TOKEN)
    life = link.join(JoinRequest(0, 1, shapes, ({},), (0,), job["settings"])).life
    link.register(life, 0, RankLayout((piece,), (piece,)))
    link.seed(life, 0, 0, torch.zeros(job["elements"]).view(torch.uint8))
    offer = link.offer(life, 0)
    assert offer is not None, "the seeds have come"
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        link.pull(life, 0, 0, offer.version)
        seconds.append(time.perf_counter() - began)
    link.leave(life)
    link.close()
    return 4 * float(job["elements"]) / min(seconds)


def _settings(job: Job) -> dict[str, Any]:
    config = load_config(job.config_of(0), 1)
    assert config.outer is not None
    return shared_settings(config.outer, config.optimizer, config.gradient_clipping)


@contextmanager
def _served(job: Job, hosts: Hosts, folder: Path | None) -> Iterator[str]:
    """Serves a store, in memory without ``folder``; yields its address."""
    settings = _settings(replace(job, outer=job.outer | {"url": "http://store:1"}))
    with listen(hosts.address, 0, SERVER) as listening, serving(Store(settings, folder), TOKEN, listening):
        yield address_of(listening)


def _environment() -> dict[str, str]:
    return os.environ | {"TRINE_OUTER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _read(job: Job) -> Trained:
    steps, ends = list[Step](), list[dict[str, Any]]()
    for site in range(len(job.pauses)):
        path = Path(job.folder) / f"site{site}.jsonl"
        text = path.read_text() if path.exists() else ""
        for line in (json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")):
            if "loss" in line:
                steps.append(Step(site, **line))
            else:
                ends.append(line)
    return Trained(tuple(sorted(steps, key=lambda step: step.ended)), tuple(ends))


if __name__ == "__main__":
    print(_pull(Path(sys.argv[1])))
