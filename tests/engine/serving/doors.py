"""Servers of one rank in this process: an engine, a ledger without a journal, HTTP on a free port."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import nn

from engine.config import load_config
from engine.parallel.comm.host_group import TorchHostGroup
from engine.serving.commands import CreateModel
from engine.serving.entry import RequestRefusedError
from engine.serving.executor import Executor
from engine.serving.ledger import Ledger
from engine.serving.loop import CommandLoop
from engine.serving.queue import FairQueue
from engine.serving.service import LedgerSource
from engine.serving.session import LedgerLimits
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.serving.wire.tensor_routes import TensorRoutes
from engine.web.hosted import HostedApplication, run_in_thread
from engine.web.sockets import address_of, listen
from tests.engine.serving.test_training import CONFIG


def _refused(request: Request, error: Exception) -> Response:
    refused = cast(RequestRefusedError, error)
    return JSONResponse({"error": str(refused)}, refused.status)


@contextmanager
def tensor_server(
    build: Callable[[], nn.Module], folder: Path, functions: Mapping[str, Any] | None = None, shape: Any = None
) -> Iterator[str]:
    """Serve a model that all clients share; yield the address."""
    torch.manual_seed(0)
    pool = TenantPool(build, load_config(dict(CONFIG)), TenantLimits(full=1), shape)
    executor = Executor(pool, folder, functions)
    executor.run(CreateModel("shared", "", None))
    ledger = Ledger(FairQueue(), None, LedgerLimits())
    source = LedgerSource(ledger, None, lambda: None)
    loop = CommandLoop(TorchHostGroup(0, 1, 10.0), executor.run, executor.spoil, source)
    ranks = Thread(target=loop.run, daemon=True)
    ranks.start()
    app = Starlette(routes=TensorRoutes(ledger, 1 << 20).routes(), exception_handlers={RequestRefusedError: _refused})
    listening = listen("127.0.0.1", 0, "the door")
    try:
        with run_in_thread(HostedApplication(app, listening, lambda: None), "door"):
            yield address_of(listening)
    finally:
        source.stop()
        ranks.join(20)
        executor.close()
        listening.close()
