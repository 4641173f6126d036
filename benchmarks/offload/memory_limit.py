"""Trains from disk under a memory limit that is a fraction of the model's state.

    python -m benchmarks memory_limit [--limit-mib 384] [--ranks 1] [--layers 28] [--steps 3] [--folder FOLDER]
    python -m benchmarks memory_limit --data-segment      limits the data segment, where cgroups could be made too

Runs the same steps in two sets of processes: with all state in memory and no limit, and with
``offload_optimizer.device: nvme`` and ``map_memory`` under the limit. Losses must be bitwise equal. The limit is a
memory cgroup for each rank, page cache included, where this user may create one; else RLIMIT_DATA, page cache excluded.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import engine
from benchmarks.harness.figures import record_cells, render_cells
from engine.models.decoder import Decoder, DecoderConfig, loss_sum

CGROUPS = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
STACK = MIB
SECONDS = 20
CORNER = "state"
VOCABULARY, LENGTH = 2048, 16
RETURNED = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Environment of the C library that returns freed tensors' memory to the system."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory limit of one process."""

    group: Path | None
    """Folder of its memory cgroup; None: a limit of the data segment."""
    size: int

    @classmethod
    def of(cls, name: str, size: int) -> "Limit":
        """Makes a cgroup of ``size`` bytes, or a data segment limit if not permitted."""
        group = CGROUPS / name
        try:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(size))
        except OSError:
            return cls(None, size)
        return cls(group, size)

    def enter(self) -> None:
        """Applies the limit to this process."""
        if self.group is None:
            resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))  # of a thread, whose stack counts as data
            resource.setrlimit(resource.RLIMIT_DATA, (self.size, self.size))
        else:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        """Returns the peak of used bytes, page cache included; None if unknown."""
        if self.group is None:
            return None
        return int((self.group / "memory.max_usage_in_bytes").read_text())

    def close(self) -> None:
        """Removes the cgroup after its processes have ended."""
        if self.group is None:
            return
        until = time.monotonic() + SECONDS
        while (self.group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        self.group.rmdir()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    asked = _parser().parse_args(arguments)
    if asked.child:
        return _train(asked)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        plain = _run(asked, "none", folder, [])
        limits = _limits(asked)
        try:
            disk = _run(asked, "nvme", folder, limits)
            peaks = [limit.peak() for limit in limits]
        finally:
            for limit in limits:
                limit.close()
    cells = _cells(asked, plain, disk, peaks)
    print(render_cells(CORNER, cells))
    if asked.write_figures:
        record_cells("offload-limit", CORNER, cells)
    equal = [found["losses"] for found in plain] == [found["losses"] for found in disk]
    enough = all(found["state"] >= 4 * asked.limit_mib * MIB for found in plain)
    print(f"losses {'equal' if equal else 'DIFFER'}; the state is {'' if enough else 'NOT '}4 times the limit")
    return 0 if equal and (enough or asked.smaller) else 1


def _limits(asked: argparse.Namespace) -> list[Limit]:
    """One for each rank."""
    size = asked.limit_mib * MIB
    if asked.data_segment:
        return [Limit(None, size)] * asked.ranks
    return [Limit.of(f"trine-{os.getpid()}-{rank}", size) for rank in range(asked.ranks)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory_limit", description=__doc__)
    parser.add_argument("--limit-mib", type=int, default=384, help="of each rank")
    parser.add_argument("--ranks", type=int, default=1, help="data ranks, with ZeRO 2")
    parser.add_argument("--layers", type=int, default=28, help="of 3.1 million parameters each")
    parser.add_argument("--width", type=int, default=512, help="of the layers")
    parser.add_argument("--steps", type=int, default=3, help="of training")
    parser.add_argument("--folder", help="on the disk to train from; a temporary one by default")
    parser.add_argument("--data-segment", action="store_true", help="limit that (RLIMIT_DATA), not a memory cgroup")
    parser.add_argument("--smaller", action="store_true", help="the state may be less than 4 times the limit")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _cells(
    asked: argparse.Namespace, plain: list[dict[str, Any]], disk: list[dict[str, Any]], peaks: list[int | None]
) -> dict[tuple[str, str], str]:
    state = min(found["state"] for found in plain) / MIB
    peak = max((peak for peak in peaks if peak is not None), default=0) / MIB
    rows = {
        "in memory": (plain, "none", "not counted"),
        "on disk": (disk, f"{asked.limit_mib} MiB", f"{peak:.0f} MiB" if peak else "not counted"),
    }
    ranks = f"{asked.ranks} rank" + "s" * (asked.ranks > 1) + " with a limited data segment" * asked.data_segment
    cells = {}
    for where, (found, limit, most) in rows.items():
        row = f"{ranks}, {where}"
        cells[row, "a rank's state"] = f"{state:.0f} MiB"
        cells[row, "limit"] = limit
        cells[row, "state / limit"] = f"{state / asked.limit_mib:.2f}" if where == "on disk" else ""
        cells[row, "most memory"] = most
        cells[row, "loss of the last step"] = repr(found[0]["losses"][-1])
        cells[row, "seconds a step"] = f"{found[0]['seconds']:.1f}"
    return cells


def _run(asked: argparse.Namespace, device: str, folder: str, limits: Sequence[Limit]) -> list[dict[str, Any]]:
    """What each rank has to tell of its training."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.offload.memory_limit", "--child", device, "--folder", folder]
    for name in ("layers", "width", "steps"):
        command += [f"--{name}", str(getattr(asked, name))]
    processes = []
    for rank in range(asked.ranks):
        enter: Callable[[], None] | None = limits[rank].enter if limits else None
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked.ranks, "MASTER_PORT": port}
        env = os.environ | {key: str(value) for key, value in place.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TRINE_CACHE": "0"} | RETURNED
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=enter))
    told = [process.communicate()[0] for process in processes]
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise SystemExit(f"rank {failed[0]} ended with {processes[failed[0]].returncode}: {told[failed[0]]}")
    return [json.loads(text.splitlines()[-1]) for text in told]


def _train(asked: argparse.Namespace) -> int:
    """Body of a rank: train, and print what there is to tell."""
    torch.set_num_threads(1)

    def make() -> nn.Module:
        with torch.device("meta"):
            return Decoder(DecoderConfig(VOCABULARY, layers=asked.layers, width=asked.width, heads=8, context=LENGTH))

    offload: dict[str, Any] = {}
    if asked.child == "nvme":
        offload = {"device": "nvme", "nvme_path": asked.folder, "buffer_count": 2, "map_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "reduce": "microbatch",  # two buckets are reduced at a time; else as many as backward is ahead, in memory
            "reduce_bucket_size": 1 << 20,
            "offload_optimizer": offload,
        },
    }
    with engine.initialize(make, config, loss_sum) as eng:
        losses, began = [], time.perf_counter()
        for step in range(asked.steps):
            generator = torch.Generator().manual_seed(1000 * step + eng.grid.rank)
            ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
            losses.append(eng.train_batch({"input_ids": ids, "labels": ids}).loss)
        seconds = (time.perf_counter() - began) / asked.steps
        state = sum(eng.plan.rank(eng.grid.rank).state_bytes.values())
    print(json.dumps({"losses": losses, "seconds": seconds, "state": state}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
