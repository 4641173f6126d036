"""Shared memory behind the tensor axis: real processes, beside gloo and against it."""

import gc
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.errors import EngineError
from engine.parallel.comm.backend import Reduction
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.shared_memory import SLOT_BYTES
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import open_world, read_world
from engine.parallel.grid import Axis, Grid
from tests.launches import Launch, Line
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

OFF = {"TRINE_SHARED_MEMORY": "0"}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64)
SIZES = (0, 1, 7, 1000, SLOT_BYTES // 4 + 3)
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest sum: gloo adds in the order of a ring, and rounds half precision after every addition."""


def open_comm(pp: int = 1, dp: int = 1, tp: int = 1) -> Comm:
    """A Comm over the running process group."""
    grid = Grid(pp=pp, dp=dp, tp=tp, rank=dist.get_rank())
    return Comm(grid, TorchBackend(grid, torch.device("cpu")))


def shares(comm: Comm, axis: Axis = "tp") -> bool:
    """Whether a sum over ``axis`` goes past the process group."""
    calls: list[int] = []
    real = dist.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*arguments, **options)

    dist.all_reduce = counted
    try:
        comm.all_reduce(torch.ones(1), axis, "which").wait()
    finally:
        dist.all_reduce = real
    return not calls


def payload(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Different on every rank; whole numbers are so small that they add in any dtype."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 30, (size,), generator=generator, dtype=dtype)


# against gloo


def results() -> tuple[bool, dict[str, Tensor], list[tuple[str, int, int]]]:
    """Whether memory is shared, what every collective gives, and what was counted."""
    comm, found = open_comm(tp=dist.get_world_size()), {}
    ranks, me = comm.grid.tp, comm.grid.rank
    ops: tuple[Reduction, ...] = ("sum", "max")
    for dtype, size in product(DTYPES, SIZES):
        for op in ops:
            tensor = payload(me, size, dtype)
            comm.all_reduce(tensor, "tp", op, op).wait()
            found[f"{op} {dtype} {size}"] = tensor
        whole, shard = payload(me, ranks * size, dtype), torch.empty(size, dtype=dtype)
        comm.reduce_scatter(shard, whole, "tp", "scatter").wait()
        gathered = torch.empty(ranks * size, dtype=dtype)
        comm.all_gather(gathered, shard, "tp", "gather").wait()
        found[f"both {dtype} {size}"] = gathered
    counted = [(row.label, row.calls, row.bytes) for row in comm.tally.rows()]
    shared = shares(comm)
    comm.close()
    return shared, found, counted


@pytest.mark.parametrize("ranks", [wide(2), 3, wide(4)])
def test_results_are_those_of_gloo_and_equal_on_all_ranks(run_ranks: RunRanks, ranks: int) -> None:
    ours, theirs = run_ranks(results, ranks), run_ranks(results, ranks, env=OFF)
    assert [shared for shared, _, _ in ours] == [True] * ranks
    assert [shared for shared, _, _ in theirs] == [False] * ranks
    assert ours[0][2] == theirs[0][2] and ours[0][2]
    first, reference = ours[0][1], theirs[0][1]
    for _, found, _ in ours:
        for name, value in found.items():
            assert torch.equal(value, first[name]), f"{name} differs between ranks"
    for name, expected in reference.items():
        if expected.numel():
            apart, largest = ((value.double().abs().max()) for value in (first[name].double() - expected, expected))
            exact = ranks == 2 or name.startswith("max") or not expected.dtype.is_floating_point
            assert float(apart) <= (0.0 if exact else ROUNDING[expected.dtype] * float(largest)), (name, float(apart))


# who shares


def shared_where(off: int) -> bool:
    """Body of a rank: one of them does not want to, and all do without."""
    if dist.get_rank() == off:
        os.environ |= OFF
    comm = open_comm(tp=2)
    shared = shares(comm)
    comm.close()
    return shared


def test_one_rank_that_may_not_share_decides_for_all(run_ranks: RunRanks) -> None:
    assert run_ranks(shared_where, 2, 2) == [True, True]
    assert run_ranks(shared_where, 2, 1) == [False, False]


def axes_that_share(sizes: dict[str, int]) -> list[str]:
    """Body of a rank."""
    comm = open_comm(**sizes)
    axes: tuple[Axis, ...] = ("tp", "dp", "pp", "replica", "world")
    found: list[str] = [axis for axis in axes if comm.grid.size(axis) > 1 and shares(comm, axis)]
    comm.close()
    return found


def test_groups_of_the_tensor_ranks_share_and_no_others(run_ranks: RunRanks) -> None:
    assert run_ranks(axes_that_share, 2, {"tp": 2}) == [["tp", "replica", "world"]] * 2
    assert run_ranks(axes_that_share, 4, {"tp": 2, "dp": 2}) == [["tp", "replica"]] * 4
    assert run_ranks(axes_that_share, 4, {"tp": 2, "pp": 2}) == [["tp"]] * 4
    assert run_ranks(axes_that_share, 2, {"dp": 2}) == [[]] * 2


# beside other traffic


def interleaved() -> tuple[bool, list[float]]:
    """Body of a rank of 2 x 2: collectives over tp and gloo's over dp under way together, in one order."""
    comm = open_comm(dp=2, tp=2)
    me, found = comm.grid.rank, []
    for turn in range(100):
        first, second, third = (torch.full((300 * turn + 1,), float(me + turn)) for _ in range(3))
        pending = [comm.all_reduce(first, "tp", "a"), comm.all_reduce(second, "dp", "b")]
        comm.all_reduce(third, "tp", "c").wait()
        pending.append(comm.all_reduce(third, "dp", "d"))
        for one in pending if turn % 2 else reversed(pending):
            one.wait()
        found += [float(first[-1]), float(second[0]), float(third[0])]
    shared = shares(comm)
    comm.close()
    return shared, found


def test_two_axes_interleave(run_ranks: RunRanks) -> None:
    for rank, (shared, found) in enumerate(run_ranks(interleaved, 4)):
        tensor, data = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        expected = [
            float(value)
            for turn in range(100)
            for value in (sum(tensor) + 2 * turn, sum(data) + 2 * turn, sum(range(4)) + 4 * turn)
        ]
        assert shared and found == expected


def two_at_once() -> list[float]:
    """Body of a rank: two engines' worth of communication in one process."""
    one, other = open_comm(tp=2), open_comm(tp=2)
    found = []
    for turn in range(20):
        first, second = torch.full((5,), 1.0 + turn), torch.full((70_000,), 2.0 + turn)
        pending = one.all_reduce(first, "tp", "a")
        other.all_reduce(second, "tp", "b").wait()
        pending.wait()
        found += [float(first[0]), float(second[-1])]
    one.close()
    third = torch.ones(3)
    other.all_reduce(third, "tp", "c").wait()
    other.close()
    return [*found, float(third[0])]


def test_two_engines_in_one_process_and_one_closed_first(run_ranks: RunRanks) -> None:
    expected = [value for turn in range(20) for value in (2.0 + 2 * turn, 4.0 + 2 * turn)]
    assert run_ranks(two_at_once, 2) == [[*expected, 2.0]] * 2


# nothing is left


def leftovers() -> list[int]:
    """Body of a rank: how many more Unix sockets and maps of shared memory there are after ten engines than before."""
    before = ours()
    for _ in range(10):
        comm = open_comm(tp=2)
        comm.all_reduce(torch.ones(10), "tp", "x").wait()
        assert [now - then for now, then in zip(ours(), before, strict=True)] == [2, 1]  # the map has a descriptor
        comm.close()
        del comm
    return [now - then for now, then in zip(ours(), before, strict=True)]


def ours() -> list[int]:
    """Descriptors of this process that are Unix sockets, as gloo's are not, or shared memory; maps of such memory."""
    gc.collect()
    table = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace").splitlines()
    sockets = {f"socket:[{line.split()[6]}]" for line in table[1:]}
    opened = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder itself, which is closed by then
            target = os.readlink(entry)
            opened += target in sockets or "memfd:trine" in target
    return [opened, Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:trine")]


def test_opened_and_closed_ten_times_leaves_nothing(run_ranks: RunRanks) -> None:
    assert run_ranks(leftovers, 2) == [[0, 0]] * 2


# who dies


def dies(line: Line, how: str) -> None:
    """Rank 1 ends between two collectives, or with one under way."""
    open_world(read_world())
    comm = open_comm(tp=dist.get_world_size())
    big = torch.ones(SLOT_BYTES)
    for _ in range(3):
        comm.all_reduce(big, "tp", "warm").wait()
    shared = shares(comm)
    line("ready")
    line.hear()
    if comm.grid.rank == 1:
        if how == "under way":
            comm.all_reduce(big, "tp", "blocks")
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        comm.all_reduce(big, "tp", "blocks").wait()
        comm.all_reduce(big, "tp", "blocks").wait()
    line((shared, time.monotonic() - began, str(caught.value)))
    os._exit(0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["between", "under way"])
def test_the_others_hear_at_once_of_a_rank_that_is_killed(ranks: int, how: str) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    with Launch(dies, ranks, how) as launch:
        launch.hear("ready")
        launch.tell("go")
        ended = launch.end(seconds=30)
    assert [rank.code for rank in ended] == [0, -signal.SIGKILL, 0, 0][:ranks], [rank.error for rank in ended]
    for rank in (*ended[:1], *ended[2:]):
        shared, seconds, said = rank.said[-1]
        assert shared and seconds < 2.0
        assert "all_reduce 'blocks' over tp" in said and "has ended or given up" in said
        assert "A peer has probably stopped" in said
    assert not before or set(os.listdir("/dev/shm")) <= before


def interrupted(line: Line) -> None:
    """Rank 0 waits for a rank that does not come, and the user presses Ctrl-C."""
    open_world(read_world())
    comm = open_comm(tp=2)
    if comm.grid.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            line("ready")  # in here, for it may take longer to the wait than the test takes to Ctrl-C
            comm.all_reduce(torch.ones(3), "tp", "alone").wait()
    else:
        line("ready")
    line("interrupted")
    line.hear()
    os._exit(0)


def test_ctrl_c_ends_the_wait() -> None:
    with Launch(interrupted, 2) as launch:
        launch.hear("ready")
        time.sleep(0.3)
        launch.send(signal.SIGINT, 0)
        launch.hear("interrupted", seconds=10)
        launch.tell("go")
        assert [rank.code for rank in launch.end()] == [0, 0]


def never_comes(line: Line) -> None:
    """The user's own process group gives up after two seconds; rank 1 does not take part."""
    rank, store = read_world().rank, TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=2))
    comm = open_comm(tp=2)
    if rank == 0:
        with pytest.raises(EngineError, match="index 1 of this axis did not arrive within 2 s"):
            comm.all_reduce(torch.ones(3), "tp", "alone").wait()
    line("over")
    line.hear()
    os._exit(0)


def test_the_time_out_is_that_of_the_process_group() -> None:
    with Launch(never_comes, 2) as launch:
        launch.hear("over", seconds=30)
        launch.tell("go")
        assert [rank.code for rank in launch.end()] == [0, 0]
