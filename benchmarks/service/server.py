"""Process that serves: the training service with an executor that only counts, or a bare echo.

python -m benchmarks.service.server echo|service FOLDER
"""

import signal
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.restart import open_ledger
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import Command, CreateModel, ForwardBackward, OptimStep, PlainOutput, Result, TrainedOutput
from engine.serving.wire.application import ServiceApplication
from engine.serving.wire.served_model import ServedModel
from engine.web.hosted import HostedApplication, run_until_signal
from engine.web.sockets import address_of, listen

BASE, CONTEXT, VOCABULARY = "benchmark/model", 4096, 1024
FACTOR, MODULUS = 1_000_003, 1 << 20  # exact in fp32


class Counters:
    """Models of one number each, which depends on every command and on their order."""

    def __init__(self) -> None:
        self._models: dict[str, list[int]] = {}

    def run(self, command: Command) -> Result:
        """Runs a command."""
        match command:
            case CreateModel(model=model):
                self._models[model] = [1, 0]
            case ForwardBackward(model=model, data=data):
                state = self._models[model]
                state[1] += sum(int(one.tokens.sum()) for one in data)
                outputs = tuple({"logprobs": np.full(len(one.tokens), state[0], np.float32)} for one in data)
                return TrainedOutput(outputs, {"loss:sum": float(state[0])})
            case OptimStep(model=model):
                state = self._models[model]
                self._models[model] = [updated(*state), 0]
                return PlainOutput({"state": float(self._models[model][0])})
        return PlainOutput()


def updated(value: int, gradient: int) -> int:
    """Returns the number of a model after an update."""
    return (value * FACTOR + gradient) % MODULUS


def _run_commands(queue: FairQueue, ledger: Ledger) -> None:
    executor = Counters()
    while not queue.is_closed:
        entry = queue.next(0.5)
        if entry is not None and entry.command is not None:
            ledger.finish(entry, executor.run(entry.command))


async def _echo(request: Request) -> Response:
    return Response(await request.body())


def main(kind: str, folder: str) -> None:
    """Serves until SIGTERM, and prints the address first."""
    listening = listen("127.0.0.1", 0, "the server of a benchmark")
    queue, application = FairQueue(), Starlette(routes=[Route("/", _echo, methods=["POST"])])
    hosted: Any = HostedApplication(application, listening, lambda: None)
    if kind == "service":
        ledger, restart = open_ledger(queue, Path(folder), LedgerLimits(depth=4096, snapshot_every=1 << 30))
        list(restart.entries())
        service = ServiceApplication(ledger, ServedModel((BASE,), CONTEXT, VOCABULARY))
        hosted = HostedApplication(service, listening, service.end_waits)
        Thread(target=_run_commands, args=(queue, ledger), daemon=True).start()
    run_until_signal(hosted, lambda: print(address_of(listening), flush=True))
    queue.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    main(sys.argv[1], sys.argv[2])
