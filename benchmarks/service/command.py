"""Trains with many clients at a time through the service: latencies beside a bare echo, lost updates, memory.

    python -m benchmarks service [--clients 64] [--seconds 60] [--write-figures]

Each client has a session and a model, and repeats forward_backward and optim_step; both are accepted by the journal
before their ids are answered. The executor only counts, so the figures are those of HTTP, ledger, journal and queue.
Exit code 1 if an update is lost, doubled or another client's, or if the server's memory grows by more than a limit.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from benchmarks.harness.figures import ROOT, Cells, record_cells, render
from benchmarks.service.server import BASE, VOCABULARY, updated
from engine.serving.wire.messages import message_class

TOKENS = 128
GROWTH_BYTES = 32 << 20
"""Maximum growth of the server's memory after its first tenth, apart from results that clients may still ask for."""
CORNER = "service"
COLUMNS = ("requests", "median", "95 %", "99 %", "a second")
ECHO, ACCEPT, POLL, STEP = (
    "echo, Starlette alone",
    "forward_backward accepted, on disk",
    "result of a poll",
    "both commands",
)


@dataclass(slots=True)
class Timings:
    """Seconds of each kind of request."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0
    """Results that differ from those of the client alone."""

    def add(self, kind: str, started: float) -> None:
        """Adds the time since ``started``."""
        self.seconds.setdefault(kind, []).append(perf_counter() - started)


@contextmanager
def server(kind: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Starts a server; yields its address and the id of its process."""
    command = [sys.executable, "-m", "benchmarks.service.server", kind, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def resident_bytes(process: int) -> int:
    """Returns the resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def body_of(model: str, number: int, tokens: Any) -> bytes:
    """Returns a forward_backward with one datum."""
    message = message_class("ForwardBackwardRequest")(model_id=model, seq_id=number, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = tokens.astype(np.int32).tobytes()
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = tokens.astype(np.int64).tobytes(), 2
    weights.dense, weights.dtype = np.ones(len(tokens), np.float32).tobytes(), 1
    targets.shape.append(len(tokens))
    weights.shape.append(len(tokens))
    return bytes(message.SerializeToString())


async def _echo(client: httpx.AsyncClient, until: float, timings: Timings) -> None:
    body = body_of("a", 1, np.arange(TOKENS) % VOCABULARY)
    while perf_counter() < until:
        started = perf_counter()
        await client.post("/", content=body)
        timings.add(ECHO, started)


async def _train(client: httpx.AsyncClient, index: int, until: float, timings: Timings) -> None:
    draw, value = np.random.default_rng(index), 1
    session = (await client.post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    model = (await client.post("/api/v1/create_model", json=create)).json()["model_id"]
    number = 0
    while perf_counter() < until:
        tokens = draw.integers(0, VOCABULARY, TOKENS)
        began = started = perf_counter()
        first = await client.post("/api/v1/forward_backward", content=body_of(model, number + 1, tokens))
        timings.add(ACCEPT, started)
        step = {"model_id": model, "seq_id": number + 2, "adam_params": {"learning_rate": 1e-3}}
        second = await client.post("/api/v1/optim_step", json=step)
        number += 2
        expected = float(value)
        value = updated(value, int(tokens.sum()))
        started = perf_counter()
        reply = await client.post("/api/v1/retrieve_future", json={"request_id": first.json()["request_id"]})
        timings.add(POLL, started)
        output = message_class("ForwardBackwardOutput").FromString(reply.content)
        reply = await client.post("/api/v1/retrieve_future", json={"request_id": second.json()["request_id"]})
        timings.add(STEP, began)
        is_right = output.metrics["loss:sum"] == expected and reply.json()["metrics"] == {"state": float(value)}
        timings.wrong += not is_right


async def _load(address: str, kind: str, clients: int, seconds: float, process: int) -> tuple[Timings, list[int]]:
    timings, memory = Timings(), list[int]()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client:
        until = perf_counter() + seconds
        work = [_echo(client, until, timings) if kind == "echo" else _train(client, at, until, timings)
                for at in range(clients)]  # fmt: skip

        async def watch() -> None:
            while perf_counter() < until:
                await asyncio.sleep(seconds / 20)
                memory.append(resident_bytes(process))

        await asyncio.gather(*work, watch())
    return timings, memory


def cells_of(timings: Mapping[str, list[float]], seconds: float) -> Cells:
    """Formats latencies as cells."""
    cells = {}
    for kind, found in timings.items():
        ordered = sorted(found)
        cells[kind, COLUMNS[0]] = f"{len(ordered):,}"
        for column, share in zip(COLUMNS[1:4], (0.5, 0.95, 0.99), strict=True):
            cells[kind, column] = f"{1000 * ordered[int(share * (len(ordered) - 1))]:.1f} ms"
        cells[kind, COLUMNS[4]] = f"{len(ordered) / seconds:,.0f}"
    return cells


def main(command: Sequence[str] | None = None) -> int:
    """Runs echo and service, prints the table and writes the figure; returns the exit code."""
    asked = _parse(command)
    found, wrong, growth = dict[str, list[float]](), 0, 0
    for kind, seconds in (("echo", min(asked.seconds, 10.0)), ("service", asked.seconds)):
        with TemporaryDirectory(prefix="trine-service-") as folder, server(kind, Path(folder)) as (address, process):
            timings, memory = asyncio.run(_load(address, kind, asked.clients, seconds, process))
        found |= {name: values * 1 for name, values in timings.seconds.items()}
        if kind == "service":
            wrong, growth = timings.wrong, memory[-1] - memory[len(memory) // 10]
        else:
            echo_seconds = seconds
    cells = {**cells_of({ECHO: found.pop(ECHO)}, echo_seconds), **cells_of(found, asked.seconds)}
    rows: dict[str, dict[str, str]] = {}
    for (row, column), text in cells.items():
        rows.setdefault(row, {})[column] = text
    print(render({"corner": CORNER, "columns": list(COLUMNS), "rows": rows}))
    steps = len(found[STEP])
    passed = wrong == 0 and growth < GROWTH_BYTES and steps > 0
    print(f"{asked.clients} clients, {steps:,} updates: {wrong} wrong; memory {growth / 2**20:+.1f} MiB after the "
          f"first tenth -> {'pass' if passed else 'FAIL'}")  # fmt: skip
    if asked.write_figures:
        record_cells("service-load", CORNER, cells)
    return 0 if passed else 1


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks service", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64, help="clients at a time, each with a session and a model")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the load")
    parser.add_argument("--write-figures", action="store_true", help="keep the table, and show it")
    return parser.parse_args(command)
