"""Training steps while a process reads the published weights, next to steps that nobody disturbs.

    python -m benchmarks weights_out [--rounds 8] [--steps 4] [--write-figures]

A decoder with 14 M parameters trains on one thread. In every second round, a receiver in a process of its own reads
whole versions one after the other, each byte of them, over a loopback connection.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from statistics import median
from typing import Any

import torch
from torch import Tensor

import engine
from benchmarks.harness.figures import record_cells, render
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.weights_out.reader import WeightReader
from engine.weights_out.receiver import WeightReceiver, empty_targets

ROWS, LENGTH, WORDS = 4, 128, 2048
CORNER, STEP, CPU, RATE = "a training step", "median wall time", "CPU time of the training thread", "read"
QUIET, READ = "nobody reads", "a receiver reads without a pause"


def follow(url: str, reading: Event, done: Connection) -> None:
    """Body of the receiver: reads whole versions while ``reading`` is set, and sends the bytes of each."""
    torch.set_num_threads(1)
    os.nice(19)  # it is on another host in a real run
    reader = WeightReader(url)
    targets = empty_targets(reader.geometry(), 0, 1)
    while True:
        reading.wait()
        for target in targets.values():
            target.values.zero_()  # all blocks are lacking
        before = reader.traffic.received
        WeightReceiver(reader, targets).update()
        done.send(reader.traffic.received - before)


def batch_of(step: int) -> dict[str, Tensor]:
    """Returns the rows of a step."""
    rows = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def measure(rounds: int, steps: int) -> dict[tuple[str, str], str]:
    """Returns the cells of the table."""
    torch.set_num_threads(1)
    model = Decoder(DecoderConfig(vocabulary=WORDS, layers=4, width=512, heads=8, context=LENGTH))
    config: dict[str, Any] = {"train_batch_size": ROWS, "optimizer": {"type": "AdamW"}, "weights_out": {}}
    found: dict[str, list[tuple[float, float]]] = {QUIET: [], READ: []}
    started = multiprocessing.get_context("spawn")
    with engine.initialize(model, config, loss_sum, batch_of(0)) as eng:
        eng.train_batch(batch_of(0))
        reading, (here, there) = started.Event(), started.Pipe(False)
        process = started.Process(target=follow, args=(eng.publish_weights().url, reading, there), daemon=True)
        process.start()
        reading.set()
        here.recv()  # all of it is imported
        read, seconds = 0, 0.0
        for index in range(2 * rounds):
            name = READ if index % 2 else QUIET
            (reading.set if index % 2 else reading.clear)()
            time.sleep(0.5)
            drain(here)
            began = time.perf_counter()
            for step in range(steps):
                times = time.perf_counter(), time.thread_time()
                eng.train_batch(batch_of(step))
                found[name].append((time.perf_counter() - times[0], time.thread_time() - times[1]))
            if index % 2:
                seconds += time.perf_counter() - began
                read += sum(drain(here))
        process.kill()
        process.join()
    return cells_of(found, read / seconds)


def drain(done: Connection) -> list[int]:
    """Returns what has been sent."""
    found = []
    while done.poll():
        found.append(done.recv())
    return found


def cells_of(found: dict[str, list[tuple[float, float]]], rate: float) -> dict[tuple[str, str], str]:
    """Formats steps as (wall, CPU) seconds by name; ``rate``: bytes read a second."""
    cells = {}
    base = [median(column) for column in zip(*found[QUIET], strict=True)]
    for name, steps in found.items():
        for label, value, quiet in zip((STEP, CPU), map(median, zip(*steps, strict=True)), base, strict=True):
            cells[name, label] = f"{1000 * value:,.1f} ms" + (f", {value / quiet - 1:+.1%}" if name == READ else "")
        cells[name, RATE] = f"{rate / 1e6:,.0f} MB/s" if name == READ else ""
    return cells


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the figure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks weights_out", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="rounds with and without a reader")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--write-figures", action="store_true", help="keep the table, and show it")
    asked = parser.parse_args(command)
    cells = measure(asked.rounds, asked.steps)
    rows: dict[str, dict[str, str]] = {}
    for (row, column), text in cells.items():
        rows.setdefault(row, {})[column] = text
    print(render({"corner": CORNER, "columns": [STEP, CPU, RATE], "rows": rows}))
    if asked.write_figures:
        record_cells("weights-out", CORNER, cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
