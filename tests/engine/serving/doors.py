"""Servers of one rank in this process: an engine, a ledger without a journal, HTTP on a free port."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

from engine.config import load_config
from engine.parallel.comm.host_group import TorchHostGroup
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import CreateModel
from engine.serving.executor import CommandExecutor
from engine.serving.host.front import LedgerSource
from engine.serving.loop import CommandLoop
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.serving.wire.application import ServiceApplication
from engine.serving.wire.served_model import ServedModel
from engine.web.hosted import HostedApplication, run_in_thread
from engine.web.sockets import address_of, listen
from tests.engine.serving.test_training import CONFIG


@contextmanager
def tensor_server(
    build: Callable[[], nn.Module],
    folder: Path,
    functions: Mapping[str, Any] | None = None,
    shape: Any = None,
    token: str = "",
    session_seconds: float = 120.0,
    full: int = 1,
) -> Iterator[str]:
    """Serve a model that all clients share; yield the address. With ``full`` 0, a request cannot create it."""
    torch.manual_seed(0)
    pool = TenantPool(build, load_config(dict(CONFIG)), TenantLimits(full=full), shape)
    executor = CommandExecutor(pool, folder, functions)
    if full:
        executor.run(CreateModel("shared", "", None))
    ledger = Ledger(FairQueue(), None, LedgerLimits(session_seconds=session_seconds))
    source = LedgerSource(ledger, iter(()))
    loop = CommandLoop(TorchHostGroup(0, 1, 10.0), executor.run, executor.spoil, source)
    ranks = Thread(target=loop.run, daemon=True)
    ranks.start()
    app = ServiceApplication(ledger, ServedModel(("shared",), 64, 64), token, 1 << 20, creates_shared=not full)
    listening = listen("127.0.0.1", 0, "the door")
    try:
        with run_in_thread(HostedApplication(app, listening, app.end_waits), "door"):
            yield address_of(listening)
    finally:
        source.stop()
        ranks.join(20)
        executor.close()
        listening.close()
