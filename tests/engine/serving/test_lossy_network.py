"""Tenants of one rank over a network that loses and doubles, with a restart, have the bits of runs alone."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from engine.config import load_config
from engine.config.serve_section import ServeConfig, ServeJournal
from engine.parallel.comm.host_group import TorchHostGroup
from engine.serving.executor import CommandExecutor
from engine.serving.host.front import open_front
from engine.serving.host.service import WEIGHTS, describe
from engine.serving.loop import CommandLoop
from engine.serving.tenants.pool import TenantPool
from tests import models
from tests.engine.serving.lossy import Lossy, TinkerLine, TrainedTenant, train_tenant

RANKS, STEPS = (4, 7), 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]


@contextmanager
def serving(serve: ServeConfig) -> Iterator[None]:
    """Serves a tiny Llama on one rank in a thread."""
    pool = TenantPool(models.llama, load_config({"train_micro_batch_size_per_gpu": 1}, 1))
    executor = CommandExecutor(pool, Path(serve.folder) / WEIGHTS)
    with open_front(serve, describe(pool.base, ("model",)), lambda line: None) as source:
        loop = CommandLoop(TorchHostGroup(0, 1, 10.0), executor.run, executor.spoil, source)
        ranks = Thread(target=loop.run)
        ranks.start()
        try:
            yield
        finally:
            source.stop()
            ranks.join(60)
    executor.close()


def test_tenants_over_a_lossy_network_have_the_bits_of_runs_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve, url = ServeConfig(port=port, journal=ServeJournal(snapshot_every=4)), f"http://127.0.0.1:{port}"
    alone = list[TrainedTenant]()
    with serving(replace(serve, folder=str(tmp_path / "alone"))):
        for rank in RANKS:
            line = TinkerLine(url)
            alone.append(train_tenant(line, rank, STEPS, tmp_path / "alone"))
            line.close()
    lossy = replace(serve, folder=str(tmp_path / "lossy"))
    networks = [Lossy(rank, 0.2, 0.2) for rank in RANKS]
    with ThreadPoolExecutor(len(RANKS)) as threads:
        with serving(lossy):
            lines = [TinkerLine(url, network) for network in networks]
            tenants = [
                threads.submit(train_tenant, line, rank, STEPS, tmp_path / "lossy")
                for line, rank in zip(lines, RANKS, strict=True)
            ]
            while not all(line.answered > STEPS for line in lines) and not any(one.done() for one in tenants):
                time.sleep(0.01)
        with serving(lossy):
            found = [one.result() for one in tenants]
            for line in lines:
                line.close()
    assert all(network.lost and network.doubled for network in networks)
    for one, other in zip(found, alone, strict=True):
        assert one.results == other.results and one.files == other.files
