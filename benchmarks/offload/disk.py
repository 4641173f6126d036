"""Optimizer updates with moments on disk, compared with the same reads and writes without an update.

Both move the same bytes in blocks of the same size, equally many at a time, past the page cache: for each element two
fp32 moments are read and written, and the old weight written, so that a failed step can be undone. The plain rows
neither hash nor compute; one mixes reads and writes, one reads first, and the faster is the disk's rate.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Grid
from engine.zero.flat_buckets import Ownership, fill, reserve
from engine.zero.layout import Item, build_layout
from engine.zero.offload.block_file import BLOCK, DEPTH, DiskCalls, MomentBuffers, sector_memory, whole_sectors
from engine.zero.offload.scratch_folder import ScratchFolder
from engine.zero.optim.flat_optimizers import FlatAdam
from engine.zero.optim.inner_optimizer import GroupOptions
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

BUCKETS = 8
READ, WRITTEN = 8, 12
"""Bytes per element: two fp32 moments read; two moments and the old fp32 weight written."""
MIXED, APART, UPDATE = "the disk, reads among writes", "the disk, reads before writes", "an update"


@contextmanager
def disk_works(folder: str, elements: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Yields functions with equal transfers, without and with an update; their files are deleted at the end."""
    scratch = ScratchFolder(folder, 0)
    optimizer = host_optimizer(elements, BUCKETS)
    each = elements // BUCKETS
    size = whole_sectors(READ * each) + whole_sectors((WRITTEN - READ) * each)
    optimizer.use_disk_moments(ScratchFolder(folder, 0), MomentBuffers(4, size), torch.device("cpu"))
    update(optimizer)
    transfers = _Transfers(scratch.path, elements)
    try:
        yield {
            MIXED: partial(transfers.run, mixed=True),
            APART: partial(transfers.run, mixed=False),
            UPDATE: partial(update, optimizer),
        }
    finally:
        transfers.close()
        assert optimizer.disk is not None
        optimizer.disk.close()
        scratch.close()


def disk_cells(seconds: Mapping[str, float], elements: int) -> dict[tuple[str, str], str]:
    """Formats rates of each transfer, from the seconds of a turn."""
    cells = {}
    for name, spent in seconds.items():
        cells[name, "ns an element"] = f"{1e9 * spent / elements:.1f}"
        cells[name, "bytes an element"] = str(READ + WRITTEN)
        cells[name, "GB/s"] = f"{(READ + WRITTEN) * elements / spent / 1e9:.2f}"
        cells[name, "of the disk"] = f"{min(seconds[MIXED], seconds[APART]) / spent:.2f}"
    return cells


class _Transfers:
    """The reads and writes of an update, in the blocks and the number at a time that an update has."""

    def __init__(self, folder: Path, elements: int) -> None:
        self._calls = DiskCalls()
        self._sizes = {"a": READ * elements, "b": READ * elements, "before": (WRITTEN - READ) * elements}
        self._files = {}
        self._valid = "a"
        for name, size in self._sizes.items():
            self._files[name], _ = self._calls.open(folder / name)
            self._calls.allocate(self._files[name], size)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(DEPTH):
            self._free.put(sector_memory(BLOCK).random_())
        self._threads = ThreadPoolExecutor(DEPTH)
        for start in range(0, self._sizes["a"], BLOCK):  # what was never written is not read from the disk
            self._move(self._calls.write, "a", start)

    def run(self, mixed: bool) -> None:
        """Read the moments that the last turn has written, and write as many and the weights."""
        jobs: list[tuple[float, str, int]] = []
        for name, size in self._sizes.items():
            first = 0.0 if mixed or name == self._valid else 1.0
            jobs += [(first + start / size, name, start) for start in range(0, size, BLOCK)]
        under_way: list[Future[None]] = []
        for _, name, start in sorted(jobs):
            call = self._calls.read if name == self._valid else self._calls.write
            under_way.append(self._threads.submit(self._move, call, name, start))
        for each in under_way:
            each.result()
        self._valid = "b" if self._valid == "a" else "a"

    def close(self) -> None:
        self._threads.shutdown()

    def _move(self, call: Callable[[int, memoryview, int], int], name: str, start: int) -> None:
        memory = self._free.get()
        size = min(BLOCK, self._sizes[name] - start)
        call(self._files[name], memory.numpy().data[:size], start)
        self._free.put(memory)


def host_optimizer(elements: int, buckets: int) -> ShardedOptimizer:
    """Returns an optimizer on the host of bf16 parameters in ``buckets`` buckets, with gradients."""
    each = elements // buckets
    parameters = {
        f"weight{n}": nn.Parameter(torch.randn(each, dtype=torch.bfloat16)) for n in range(buckets)
    }  # fmt: skip
    layout = build_layout([Item(name=name, shape=(each,), dtype="bfloat16") for name in parameters], 1, each)
    who = Ownership(0, 1, sharded=True, hosted=frozenset(range(buckets)))
    flats = reserve(layout, parameters, who, torch.device("cpu"))
    for flat in flats:
        fill(flat)
    grid = Grid(dp=1, rank=0)
    factory = partial(FlatAdam, weight_decay=0.1, decoupled=True)
    optimizer = ShardedOptimizer(flats, [GroupOptions()], factory, Comm(grid, RecordingBackend(grid)), True)
    for flat in flats:
        flat.grads.normal_()
    return optimizer


def update(optimizer: ShardedOptimizer) -> None:
    """Runs the host's part of a step, as the engine makes it."""
    optimizer.copies.forget()
    optimizer.step(0.5)
