"""A store and sites on a slow network, killed (-9) while they train: nothing acknowledged is lost, to the bit."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from engine.outer.http.line import HttpLink
from tests.network import Network, can_make_networks, network

ROOT = str(Path(__file__).parents[4])
TOKEN = "of-this-test"
SITES, VERSIONS, ELEMENTS = 2, 14, 100_000
OUTER: dict[str, Any] = {
    "sites": SITES, "rule": "quorum", "least": 1, "grace": 0.5, "period": 10, "lease": 4.0, "snapshot_every": 3,
}  # fmt: skip
SITE = """
import json, sys, time
import torch
from engine.config.outer_section import shared_settings
from engine.launch.outer_command import store_config
from engine.outer.http.line import HttpLink
from tests.engine.outer.http.served import body_of, join_request, layout_of, meta_of
from engine.outer.messages import PushShare

url, site, token, last, elements = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
config = store_config(json.loads(sys.argv[6]), [])
settings = shared_settings(config.outer, config.optimizer, config.gradient_clipping)
tensors = (("weight", (elements,)),)
link = HttpLink([url], token=token)
joined = link.join(join_request(site, settings, tensors))
life, seq, version = joined.life, 0, 0
link.register(life, 0, layout_of(tensors))
if joined.seeds:
    link.seed(life, 0, 0, body_of(torch.zeros(elements)))
pushed = None
while version < last:
    offer = link.offer(life, 0)
    if offer is None:
        time.sleep(0.005)
        continue
    version = offer.version
    weights = link.pull(life, 0, 0, version)
    if pushed is None or offer.merged >= pushed:
        link.push(meta_of(life, seq, version), 0, PushShare(), body_of(torch.randn(elements)))
        pushed, seq = seq, seq + 1
print(json.dumps({"life": life, "pushes": seq, "repeated": link.traffic.repeated}), flush=True)
link.leave(life)
link.close()
"""


@contextmanager
def ending(processes: dict[int, "subprocess.Popen[str]"]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def start(words: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": ROOT, "TRINE_OUTER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def start_store(slow: Network, folder: Path, port: int) -> tuple["subprocess.Popen[str]", str]:
    words = [sys.executable, "-m", "engine.launch.cli", "outer", "config.json", "--folder", "store", "--keep"]
    process = start([*words, "--host", slow.address, "--port", str(port)], folder)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[2].rstrip(":")


@pytest.mark.long
def test_kills_lose_nothing_that_is_acknowledged(tmp_path: Path) -> None:
    if not can_make_networks():
        pytest.skip("needs root, ip and tc")
    (tmp_path / "config.json").write_text(json.dumps({"outer": OUTER}))
    with network(SITES) as slow:
        running: dict[int, subprocess.Popen[str]] = {}
        with ending(running):
            running[-1], address = start_store(slow, tmp_path, 0)
            port = int(address.rpartition(":")[2])
            rest = [TOKEN, str(VERSIONS), str(ELEMENTS), json.dumps({"outer": OUTER})]

            def start_site(site: int) -> None:
                running[site] = start(
                    slow.command(site, [sys.executable, "-c", SITE, address, str(site), *rest]), tmp_path
                )

            for site in range(SITES):
                start_site(site)
            for version, killed in ((3, -1), (6, 0), (9, -1)):
                wait_for(address, version)
                process = running.pop(killed)
                process.send_signal(signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
                if killed < 0:
                    running[-1], _ = start_store(slow, tmp_path, port)
                else:
                    start_site(killed)
            reports = [json.loads(running[site].communicate(timeout=120)[0]) for site in range(SITES)]
            assert [running[site].returncode for site in range(SITES)] == [0] * SITES
            assert max(report["life"] for report in reports) == 2
            running[-1].send_signal(signal.SIGTERM)
            assert running[-1].wait(20) == 0
    words = [sys.executable, "-m", "engine.launch.cli", "outer", "replay", "store"]
    with start(words, tmp_path) as replayed:
        text, _ = replayed.communicate()
    assert replayed.returncode == 0 and "merges have the same bits" in text and int(text.split()[0]) >= VERSIONS


def wait_for(address: str, version: int) -> None:
    link = HttpLink([address], token=TOKEN)
    while max(link.status().versions, default=-1) < version:
        sleep(0.2)
    link.close()
