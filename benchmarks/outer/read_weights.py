"""Training steps while weights are published and read, next to steps that nobody disturbs.

    python -m benchmarks weights_out [--rounds 8] [--steps 4] [--rate 50] [--write-figures]

A decoder with 14 M parameters trains on one thread. In turn, nobody reads; each step publishes its weights; a receiver
in a process of its own reads whole versions over a loopback connection, at a limited rate or without a pause.

The time of a step is divided by what its thread does, as the kernel counts it: it computes, it is ready and waits for a
core (contention with sender and receiver), or it sleeps (locks, such as Python's).
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import engine
from benchmarks.harness.figures import record_cells, render_cells
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.weights_out.publisher import WeightPublisher
from engine.weights_out.reader import WeightReader
from engine.weights_out.receiver import WeightReceiver, empty_targets

ROWS, LENGTH, WORDS = 4, 128, 2048
CORNER = "a training step"
QUIET, PUBLISHED, THROTTLED, READ = "nobody reads", "each step publishes", "read at a rate", "read without a pause"
MODES = (QUIET, PUBLISHED, THROTTLED, READ)
COLUMNS = ("wall", "its thread computes", "waits for a core", "sleeps", "bytes that it copies", "read")
_STAT = Path("/proc/thread-self/schedstat")
"""Nanoseconds that this thread has computed, and waited for a core."""
_STOPPED, _UNLIMITED = 0.0, -1.0


class Times(NamedTuple):
    """Seconds of one step."""

    wall: float
    computes: float
    waits: float
    copied: int
    """Bytes of weights that the thread of the step copies."""

    @property
    def sleeps(self) -> float:
        """Seconds in which the thread neither computes nor is ready to."""
        return self.wall - self.computes - self.waits


def follow(url: str, rate: "Synchronized[float]", done: Connection) -> None:
    """Body of the receiver: reads whole versions at ``rate`` bytes a second, and sends the bytes of each."""
    torch.set_num_threads(1)
    os.nice(19)  # it is on another host in a real run
    reader = WeightReader(url)
    targets = empty_targets(reader.geometry(), 0, 1)
    while True:
        while (asked := rate.value) == _STOPPED:
            time.sleep(0.01)
        for target in targets.values():
            target.values.zero_()  # all blocks are lacking
        before, began = reader.traffic.received, time.perf_counter()
        WeightReceiver(reader, targets).update()
        read = reader.traffic.received - before
        done.send(read)
        if asked != _UNLIMITED:
            time.sleep(max(0.0, read / asked - (time.perf_counter() - began)))


def batch_of(step: int) -> dict[str, Tensor]:
    """Returns the rows of a step."""
    rows = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def counted() -> tuple[float, float]:
    """Returns the seconds that this thread has computed, and waited for a core."""
    computed, waited, _ = _STAT.read_text().split()
    return int(computed) / 1e9, int(waited) / 1e9


def timed(eng: engine.Engine, publisher: WeightPublisher, step: int, publishes: bool) -> Times:
    """Trains one step, and publishes as a step does that is due."""
    before, copied, began = counted(), publisher.copied, time.perf_counter()
    eng.train_batch(batch_of(step))
    if publishes:
        publisher.publish(waits=False)
    wall, after = time.perf_counter() - began, counted()
    return Times(wall, after[0] - before[0], after[1] - before[1], publisher.copied - copied)


def measure(rounds: int, steps: int, rate: float) -> dict[tuple[str, str], str]:
    """Returns the cells of the table; ``rate``: bytes a second of the limited receiver."""
    torch.set_num_threads(1)
    model = Decoder(DecoderConfig(vocabulary=WORDS, layers=4, width=512, heads=8, context=LENGTH))
    config: dict[str, Any] = {"train_batch_size": ROWS, "optimizer": {"type": "AdamW"}, "weights_out": {}}
    found: dict[str, list[Times]] = {mode: [] for mode in MODES}
    read, seconds = dict.fromkeys(MODES, 0), dict.fromkeys(MODES, 0.0)
    started = multiprocessing.get_context("spawn")
    with engine.initialize(model, config, loss_sum, batch_of(0)) as eng:
        publisher = eng._parts.publisher
        assert publisher is not None
        timed(eng, publisher, 0, True)
        asked, (here, there) = started.Value("d", _UNLIMITED), started.Pipe(False)
        process = started.Process(target=follow, args=(publisher.url, asked, there), daemon=True)
        process.start()
        here.recv()  # all of it is imported
        for index in range(len(MODES) * rounds):
            mode = MODES[index % len(MODES)]
            asked.value = {THROTTLED: rate, READ: _UNLIMITED}.get(mode, _STOPPED)
            time.sleep(0.5)
            drain(here)
            began = time.perf_counter()
            for step in range(steps):
                found[mode].append(timed(eng, publisher, step, mode == PUBLISHED))
            seconds[mode] += time.perf_counter() - began
            read[mode] += sum(drain(here))
        process.kill()
        process.join()
    return cells_of(found, {mode: read[mode] / seconds[mode] for mode in MODES})


def drain(done: Connection) -> list[int]:
    """Returns what has been sent."""
    found = []
    while done.poll():
        found.append(done.recv())
    return found


def cells_of(found: dict[str, list[Times]], rates: dict[str, float]) -> dict[tuple[str, str], str]:
    """Formats the medians of steps by mode; ``rates``: bytes read a second."""
    cells = dict[tuple[str, str], str]()
    quiet = median(each.wall for each in found[QUIET])
    for mode, steps in found.items():
        wall = median(each.wall for each in steps)
        parts = (
            f"{1000 * wall:,.1f} ms" + ("" if mode == QUIET else f", {wall / quiet - 1:+.1%}"),
            *(f"{1000 * median(getattr(each, name) for each in steps):,.1f} ms" for name in Times._fields[1:3]),
            f"{1000 * median(each.sleeps for each in steps):,.1f} ms",
            f"{max(each.copied for each in steps):,}",
            f"{rates[mode] / 1e6:,.0f} MB/s" if rates[mode] else "",
        )
        cells |= {(mode, column): text for column, text in zip(COLUMNS, parts, strict=True)}
    return cells


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the figure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks weights_out", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each mode")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--rate", type=float, default=50, help="MB a second of the limited receiver")
    parser.add_argument("--write-figures", action="store_true", help="keep the table, and show it")
    asked = parser.parse_args(command)
    cells = measure(asked.rounds, asked.steps, 1e6 * asked.rate)
    print(render_cells(CORNER, cells))
    if asked.write_figures:
        record_cells("weights-out", CORNER, cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
