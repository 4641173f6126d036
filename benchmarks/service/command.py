"""Trains with many clients at a time through the service: latencies beside a bare echo, lost updates, memory.

    python -m benchmarks service [--clients 64] [--seconds 60] [--write-figures]

Each client has a session and a model, and repeats forward_backward and optim_step; both are accepted by the journal
before their ids are answered. The executor only counts, so the figures measure HTTP, ledger, journal and queue:
a model is a number that depends on its client's tokens and on the order of all updates. Exit code 1 if an update is
lost, doubled or another client's, or if the server's memory grows by more than its retained results and a limit.
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

from benchmarks.harness.figures import ROOT, Cells, record_text, render_cells
from benchmarks.service.server import BASE, VOCABULARY, updated
from engine.serving.wire.messages import message_class

TOKENS = 128
GROWTH_BYTES, RESULT_BYTES = 16 << 20, 6 << 10
"""Maximum growth of the server's memory, and of it for each result that its client may still ask for."""
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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
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
    """Returns the timings of all clients, and the server's memory at the begin and at the end."""
    timings, memory = Timings(), [resident_bytes(process)]
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client:
        until = perf_counter() + seconds
        work = [_echo(client, until, timings) if kind == "echo" else _train(client, at, until, timings)
                for at in range(clients)]  # fmt: skip
        await asyncio.gather(*work)
    return timings, [*memory, resident_bytes(process)]


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
    asked, cells, found, memory = _parse(command), dict[tuple[str, str], str](), Timings(), [0, 0]
    for kind, seconds in (("echo", min(asked.seconds, 10.0)), ("service", asked.seconds)):
        with TemporaryDirectory(prefix="trine-service-") as folder, server(kind, Path(folder)) as (address, process):
            found, memory = asyncio.run(_load(address, kind, asked.clients, seconds, process))
        cells |= cells_of(found.seconds, seconds)
    steps = len(found.seconds.get(STEP, ()))
    passed, verdict = judged(steps, found.wrong, (memory[0], memory[-1]))
    print(text := f"{render_cells(f'{asked.clients} clients', cells)}\n\n{verdict}")
    if asked.write_figures:
        record_text("service-load", text)
    return 0 if passed else 1


def judged(steps: int, wrong: int, memory: tuple[int, int]) -> tuple[bool, str]:
    """Returns the verdict on a load and its sentence.

    Args:
        steps: number of updates, each with two results.
        wrong: updates with other results than the client alone.
        memory: resident bytes of the server at the begin and at the end.
    """
    growth, most = memory[1] - memory[0], GROWTH_BYTES + 2 * steps * RESULT_BYTES
    passed = steps > 0 and not wrong and growth <= most
    begin, end = (f"{size / 2**20:.1f}" for size in memory)
    return passed, (
        f"{steps:,} updates, {wrong} of them lost, doubled or crossed; memory of the server: {begin} MiB at the begin, "
        f"{end} MiB at the end with {2 * steps:,} results retained -> {'pass' if passed else 'FAIL'}"
    )


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks service", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64, help="clients at a time, each with a session and a model")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the load")
    parser.add_argument("--write-figures", action="store_true", help="keep the table, and show it")
    return parser.parse_args(command)
