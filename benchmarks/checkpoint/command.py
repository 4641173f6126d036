"""Seconds to save and load a checkpoint: Trine, torch.save, torch's DCP, safetensors and the bare disk.

    python -m benchmarks checkpoint [--rounds 5] [--gigabytes 1.3] [--folder F] [--write-figures] [--out FOLDER]

One process writes and reads the same fp32 weights of a decoder (width 4096, MLP width 11008) in every format, in a new
order each round; every write ends with an fsync of file and folder. *cold*: dropped from the page cache before.

    stall        what training waits for; the rest goes on in the background and is waited for untimed
    write        from the call to the commit; for "Trine, image to disk" its writer alone, hashes included
    read         into tensors that exist; Trine checks every block on the way and the others check nothing
    rows cold    a quarter of the rows of every matrix, which is what a tensor rank of four wants

CPU seconds are of this process, without the kernel's writeback threads. Exit code 1 when a goal is missed. The disk's
other users change the seconds, so compare ratios within a round.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.checkpoint.formats import (
    Format,
    Landing,
    Tensors,
    Trine,
    decoder_shapes,
    distributed_checkpoint,
    forget,
    make_landing,
    raw,
    read_direct,
    safetensors,
    stage_with_dcp,
    sync_folder,
    torch_save,
    warm,
    write_raw,
)
from benchmarks.checkpoint.report import GIGABYTE, Goal, Rounds, Sample, as_json, judge, table
from benchmarks.harness.figures import record_text
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.host_image import HostImage, ImageMemory, kind_of, make_image, write_file

BASES = {
    "stall": "memcpy", "write": "raw O_DIRECT", "read cold": "raw", "read warm": "raw", "rows cold": "raw",
}  # fmt: skip
GOALS = (
    Goal("stall", "Trine", "memcpy", at_most=1.2),
    Goal("write", "Trine, image to disk", "raw O_DIRECT", at_most=1.7),
    Goal("write", "Trine", "DCP, 1 thread", at_least=5),
    Goal("write", "Trine", "DCP, 2 threads", at_least=5),
    Goal("read cold", "Trine", "DCP, 1 thread"),
    Goal("read cold", "Trine", "safetensors"),
    Goal("read warm", "Trine", "DCP, 1 thread", at_least=6),
    Goal("read warm", "Trine", "safetensors", at_least=3),
    Goal("rows cold", "Trine", at_most=1.1),
)
WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the tensors in a checkpoint."""

    width: int = WIDTH
    layers: int = 1
    vocabulary: int = 32000

    @property
    def bytes(self) -> int:
        """Bytes of all tensors of this size."""
        shapes = decoder_shapes(self.width, self.layers, self.vocabulary)
        return sum(4 * torch.Size(shape).numel() for shape in shapes.values())


class Bench:
    """All formats over one set of tensors. ``folder`` is new, on the disk under test."""

    def __init__(self, size: Size, folder: Path) -> None:
        self._folder = folder
        self._trine = Trine(decoder_shapes(size.width, size.layers, size.vocabulary))
        self._tensors: Tensors = {name: values.clone() for name, values in self._trine.parameters.items()}
        self._landing: Landing = make_landing(self._tensors)
        self._image = make_filled_image(self._tensors)
        self._bytes = size.bytes
        self._kept = DefaultStager(StagingOptions(False, False, False, False))  # all four need a GPU
        one, two = (distributed_checkpoint(self._tensors, self._landing, threads) for threads in (1, 2))
        self._trines = self._trine.format(self._landing)
        self._formats = (
            self._trines, raw(self._landing), safetensors(self._tensors, self._landing),
            torch_save(self._tensors, self._landing), one, two,
        )  # fmt: skip

    def round(self, turn: int) -> list[Sample]:
        """Measures all stalls, writes and reads once, each in random order."""
        order, samples = random.Random(turn), self.stalls(turn)
        for action in order.sample(self._writes(), len(self._writes())):
            samples += action()
        for form in order.sample(self._formats, len(self._formats)):
            samples += self._read(form)
        return samples

    def close(self) -> None:
        """Closes the engine and the memory that DCP retains."""
        self._kept.close()
        self._trine.engine.close()

    # ------------------------------------------------------------------ stall

    def stalls(self, turn: int) -> list[Sample]:
        """Measures the seconds that training waits for a save, into warm memory: each format runs untimed before."""
        ways: list[Callable[[], list[Sample]]] = [
            self._memcpy,
            lambda: self._staged("Trine", self._trine.begin),
            lambda: self._staged("dcp.async_save", lambda f: stage_with_dcp(self._tensors, f, None)),
            lambda: self._staged("dcp.async_save, kept memory", lambda f: stage_with_dcp(self._tensors, f, self._kept)),
        ]
        order = random.Random(turn).sample(ways, len(ways))
        return [sample for way in order for sample in (way(), way())[1]]

    def _memcpy(self) -> list[Sample]:
        def copy() -> None:
            for name, values in self._tensors.items():
                self._landing.tensors[name].copy_(values)

        return [self._timed("stall", "memcpy", copy)]

    def _staged(self, mode: str, begin: Callable[[Path], Callable[[], object]]) -> list[Sample]:
        folder, waits = self._new("staged"), list[Callable[[], object]]()
        sample = self._timed("stall", mode, lambda: waits.append(begin(folder)))
        waits[0]()
        shutil.rmtree(folder)
        return [sample]

    # ------------------------------------------------------------------ write

    def _writes(self) -> list[Callable[[], list[Sample]]]:
        def write(form: Format) -> list[Sample]:
            folder, mode = self._new(form.name), "raw, buffered" if form.name == "raw" else form.name
            sample = self._timed("write", mode, lambda: form.write(folder))
            if form.name == "torch.save":  # its caller waits for all of it
                waited = Sample("stall", mode, sample.seconds, sample.cpu_seconds, sample.bytes, sample.disk_bytes)
                return [sample, waited]
            return [sample]

        return [
            *(lambda form=form: write(form) for form in self._formats),
            lambda: self._alone("raw O_DIRECT", lambda f: write_raw(self._landing, f, direct=True)),
            lambda: self._alone("Trine, image to disk", lambda f: write_image(self._image, f)),
        ]

    def _alone(self, mode: str, write: Callable[[Path], None]) -> list[Sample]:
        """A write that is not read later."""
        folder = self._new("alone")
        sample = self._timed("write", mode, lambda: write(folder))
        shutil.rmtree(folder)
        return [sample]

    # ------------------------------------------------------------------ read

    def _read(self, form: Format) -> list[Sample]:
        folder = self._folder / form.name
        rows = [slice(start, stop) for start, stop in self._landing.quarter().values()]
        wanted = sum(values.nbytes for values in self._landing.rows().values())
        samples = []
        for part in ("read cold", "read warm"):
            into = self._trine.parameters if form is self._trines else self._landing.tensors
            self._clear(into)
            forget(folder)
            if part == "read warm":
                warm(folder)
            samples.append(self._timed(part, form.name, lambda: form.read(folder)))
            check(form.name, [(into[name], values) for name, values in self._tensors.items()])
        if form.name == "raw":
            forget(folder)
            samples.append(self._timed("read cold", "raw O_DIRECT", lambda: read_direct(self._landing, folder)))
        self._clear(self._landing.tensors)
        forget(folder)
        samples.append(self._timed("rows cold", form.name, lambda: form.read_rows(folder), wanted))
        right = [self._tensors[name] for name in self._landing.quarter()]
        found = self._landing.rows().values()
        check(form.name, [(a, b[quarter]) for a, b, quarter in zip(found, right, rows, strict=True)])
        self._memcpy()  # the landing is what the bare disk writes
        return samples

    @staticmethod
    def _clear(tensors: Tensors) -> None:
        for values in tensors.values():
            values.zero_()

    # ------------------------------------------------------------------ all of them

    def _new(self, name: str) -> Path:
        """An empty folder; what was in it is gone, from the disk too."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        sync_folder(self._folder)
        return folder

    def _timed(self, part: str, mode: str, action: Callable[[], object], wanted: int | None = None) -> Sample:
        disk, cpu, wall = disk_bytes(), time.process_time(), time.perf_counter()
        action()
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        return Sample(part, mode, seconds, cpu_seconds, wanted or self._bytes, disk_bytes() - disk)


def make_filled_image(tensors: Tensors) -> HostImage:
    """Returns a checkpoint's file image in host memory, as an asynchronous save makes it."""
    image = make_image({name: kind_of(values) for name, values in tensors.items()}, {}, ImageMemory(), "all")
    for name, values in tensors.items():
        image.tensor(name).copy_(values)
    return image


def write_image(image: HostImage, folder: Path) -> None:
    """Writes an image to disk: the second half of a save."""
    write_file(Files(), folder / "image.safetensors", image.memory, image.layout.size)
    sync_folder(folder)


def check(mode: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises unless all read tensors equal the written ones."""
    if not all(torch.equal(found, right) for found, right in pairs):
        raise AssertionError(f"{mode} has read other values than were written")


def disk_bytes() -> int:
    """Returns the bytes that this process has read from disks; 0 if the system does not report them."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in text.splitlines())["read_bytes"])


def measure(size: Size, rounds: int, folder: Path | None = None) -> Rounds:
    """Runs all rounds, after untimed stalls that allocate memory."""
    with TemporaryDirectory(dir=folder, prefix="checkpoints-") as place, closing(Bench(size, Path(place))) as bench:
        bench.stalls(0)
        found = []
        for turn in range(rounds):
            found.append(bench.round(turn))
            print(f"round {turn + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        return found


def conclude(rounds: Rounds) -> tuple[str, dict[str, Any], bool]:
    """Returns the results as text and as a JSON object, and True if all goals are reached."""
    verdicts = [judge(rounds, goal) for goal in GOALS]
    text = "\n".join([table(rounds, BASES), "", *map(str, verdicts)])
    return text, as_json(rounds, verdicts), all(verdict.passed for verdict in verdicts)


def choose_size(gigabytes: float) -> Size:
    """Returns the size with the number of layers, at least one, closest to ``gigabytes``."""
    without, one = Size(layers=0).bytes, Size(layers=1).bytes
    layers = round((gigabytes * GIGABYTE - without) / (one - without))
    return Size(layers=max(1, layers))


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if every goal is reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks checkpoint", description="Cost of a checkpoint.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.3, help="of weights; whole layers of 0.8")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; the system's temporary one by default")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    parser.add_argument("--out", type=Path, help="folder for all samples, as checkpoint.json")
    arguments = parser.parse_args(command)
    size, before = choose_size(arguments.gigabytes), os.getloadavg()[0]
    measure(Size(128, 1, 256), 1, arguments.folder)  # imports what is imported late
    rounds = measure(size, arguments.rounds, arguments.folder)
    text, figures, passed = conclude(rounds)
    about = (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} CPUs, torch {torch.__version__}, "
        f"{size.bytes / GIGABYTE:.2f} GB, "
        f"{arguments.rounds} rounds, load average {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    )
    print(f"{text}\n\n{about}")
    if arguments.write_figures:
        record_text("checkpoint", f"```\n{text}\n```\n\n{about}.")
    if arguments.out:
        conditions = {
            "versions": {
                "python": platform.python_version(), "torch": torch.__version__, "safetensors": version("safetensors"),
            },
            "about": about,
        }  # fmt: skip
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "checkpoint.json").write_text(
            json.dumps(conditions | figures, indent=1) + "\n", encoding="ascii"
        )
    return 0 if passed else 1
