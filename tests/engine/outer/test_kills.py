"""Three sites behind slow links, one four times slower; sites and the store are killed while they train."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.outer.text import make_model
from engine.checkpoint.format.pieces import Part
from engine.config import load_config
from engine.config.outer_section import shared_settings
from engine.models.decoder import loss_sum
from engine.outer.messages import JoinRequest, NamedPiece, RankLayout
from engine.outer.store.replay import replay
from engine.outer.store.store import Store
from tests.engine.outer.killed_site import SITES, batch_of, config_of
from tests.network import Network, network

SCRIPT = Path(__file__).with_name("killed_site.py")
ROOT = Path(__file__).parents[3]
SECONDS = float(os.environ.get("TRINE_KILLS_SECONDS", "180"))
SLOW = 0.06
"""Seconds that the slow site adds to a step, so that it is four times slower."""


@dataclass(slots=True)
class Job:
    """Processes of a store and its sites."""

    net: Network
    folder: Path
    port: int
    store: "subprocess.Popen[bytes] | None" = None
    sites: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)
    began: float = 0.0

    @property
    def url(self) -> str:
        """Address of the store."""
        return f"http://{self.net.address}:{self.port}"

    def environment(self) -> dict[str, str]:
        """Returns the environment of all processes."""
        return os.environ | {"TRINE_OUTER_TOKEN": "secret", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start_store(self) -> None:
        """Starts the store, or starts it again from its folder."""
        path = self.folder / "config.json"
        path.write_text(json.dumps(config_of(self.url, 0)))
        words = [
            sys.executable, "-m", "engine.launch.cli", "outer", str(path), "--host", self.net.address,
            "--port", str(self.port), "--folder", str(self.folder / "store"), "--keep",
        ]  # fmt: skip
        with (self.folder / "store.log").open("ab") as log:
            self.store = subprocess.Popen(words, env=self.environment(), cwd=ROOT, stdout=log, stderr=log)

    def start_site(self, site: int) -> None:
        """Starts a new life of a site."""
        words = [
            sys.executable, str(SCRIPT), self.url, str(site), str(self.folder / f"site{site}.jsonl"),
            str(self.folder / "stop"), str(SLOW if site == SITES - 1 else 0.0),
        ]  # fmt: skip
        with (self.folder / f"site{site}.log").open("ab") as log:
            self.sites[site] = subprocess.Popen(
                self.net.command(site, words), env=self.environment(), cwd=ROOT, stdout=log, stderr=log
            )

    def lines(self, site: int) -> list[dict[str, Any]]:
        """Returns the finished steps of a site."""
        path = self.folder / f"site{site}.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )

    def merged_rows(self) -> int:
        """Returns the rows in merged pushes, from the journal."""
        sites, pushed, merged = dict[int, int](), dict[tuple[int, int], int](), dict[int, int]()
        for event in events_of(self.folder / "store"):
            if event["kind"] == "join":
                sites[event["life"]] = event["site"]
            elif event["kind"] == "push":
                pushed[event["life"], event["seq"]] = event["rows"]
            for key in event["pushes"] if event["kind"] == "merge" else ():
                site = sites[key["life"]]
                merged[site] = max(merged.get(site, 0), pushed[key["life"], key["seq"]])
        return sum(merged.values())


@contextmanager
def running(folder: Path) -> Iterator[Job]:
    """Starts a store and three sites behind links of 10 Mbit/s; kills what is left at the end."""
    folder.mkdir()
    with network(SITES, "10mbit") as net:
        with socket.create_server((net.address, 0)) as free:
            port = free.getsockname()[1]
        job = Job(net, folder, port)
        job.start_store()
        try:
            for site in range(SITES):
                job.start_site(site)
            deadline = time.monotonic() + 120
            while not all(job.lines(site) for site in range(SITES)):
                assert time.monotonic() < deadline, (folder / "site0.log").read_text()[-2000:]
                time.sleep(0.2)
            job.began = time.time()
            yield job
            ended = time.time()
            (folder / "stop").touch()
            for process in job.sites.values():
                process.wait(60)
            job.began = ended - job.began
        finally:
            for each in [*job.sites.values(), job.store]:
                if each is not None:
                    each.kill()
                    each.wait()


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the events of a store's journal."""
    from engine.outer.store.journal import read_events

    return [dict(event) for _, event in read_events(folder)]


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Returns the newest weights of a store's folder."""
    config = load_config(config_of("http://store:1", 0), 1)
    assert config.outer is not None
    settings = shared_settings(config.outer, config.optimizer, config.gradient_clipping)
    store = Store(settings, folder, keep=True)
    model = make_model()
    shapes = tuple((name, tuple(p.shape)) for name, p in model.named_parameters())
    life = store.join(JoinRequest(SITES, 1, shapes, ({},), (0,) * len(shapes), settings)).life
    pieces = tuple(NamedPiece(name, Part(shape).whole()) for name, shape in shapes)
    store.register(life, 0, RankLayout(pieces, pieces))
    offer = store.offer(life, 0)
    assert offer is not None
    flat = store.pull(life, 0, 0, offer.version)
    store.close()
    parts = torch.split(flat, [each.piece.elements for each in pieces])
    return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def validation(weights: dict[str, Tensor]) -> float:
    """Returns the loss of weights on rows that no site reads."""
    model = make_model()
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        pairs = [loss_sum(model(batch["input_ids"]), batch) for batch in (batch_of(99, 8 * i) for i in range(32))]
    return float(sum(total for total, _ in pairs)) / float(sum(weight for _, weight in pairs))


def useful_share(job: Job, seconds: float) -> float:
    """Returns the share of the time of all sites in which they train: no wait for the store, no start."""
    useful = sum(
        line["ended"] - line["began"] - line["waited"] for site in range(SITES) for line in job.lines(site)[1:]
    )
    return float(useful) / (SITES * seconds)


def check_exactly_once(folder: Path) -> tuple[int, int]:
    """Checks that each acknowledged push is in one merge, but for those that wait at the end; returns both numbers."""
    complete, merged = dict[tuple[int, int, int], int](), list[tuple[int, int, int]]()
    for event in events_of(folder):
        if event["kind"] == "push":
            complete[event["life"], event["fragment"], event["seq"]] = event["base"]
        elif event["kind"] == "merge":
            merged += [(key["life"], key["fragment"], key["seq"]) for key in event["pushes"]]
    assert len(merged) == len(set(merged)), "a push is in two merges"
    assert set(merged) <= complete.keys(), "a merge contains what nobody has pushed"
    waiting = complete.keys() - set(merged)
    assert len(waiting) <= SITES, "at most the last push of each site waits"
    return len(complete), len(merged)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_goes_on_while_sites_and_store_are_killed(tmp_path: Path) -> None:
    draws = random.Random(1)
    with running(tmp_path / "killed") as job:
        start, kills = time.monotonic(), 0
        while time.monotonic() - start < SECONDS:
            time.sleep(15.0 if SECONDS > 60 else 5.0)
            kills += 1
            victim = draws.randrange(SITES)
            job.sites[victim].send_signal(signal.SIGKILL)
            job.sites[victim].wait()
            job.start_site(victim)
            if kills % 2 == 0 and job.store is not None:
                job.store.kill()
                job.store.wait()
                job.start_store()
        seconds = time.monotonic() - start
        share = useful_share(job, seconds)
    pushed, merged = check_exactly_once(tmp_path / "killed" / "store")
    replayed = replay(tmp_path / "killed" / "store")
    assert replayed.difference is None
    rows, loss = job.merged_rows(), validation(weights_of(tmp_path / "killed" / "store"))
    with running(tmp_path / "calm") as calm:
        while calm.merged_rows() < rows:
            time.sleep(0.5)
        calm_share = useful_share(calm, time.time() - calm.began)
    calm_loss = validation(weights_of(tmp_path / "calm" / "store"))
    print(
        f"{kills} kills of sites, {kills // 2} of the store in {seconds:.0f} s: useful {share:.1%} (undisturbed "
        f"{calm_share:.1%}), {rows:,} rows, {pushed} pushes, {merged} merged, {replayed.merges} merges replayed, "
        f"loss {loss:.4f} (undisturbed {calm_loss:.4f})"
    )
    assert loss <= 1.02 * calm_loss
    assert share >= 0.88 * calm_share
