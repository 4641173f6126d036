"""Collectives between real gloo processes: values, repeatability, and the bytes that the kernel saw."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from engine.errors import EngineError
from engine.parallel.comm.backend import Channel, Flow, Link
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.host_group import TorchHostGroup
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.grid import Axis, Grid
from tests.ranks import RankError

RunRanks = Callable[..., list[Any]]

AXES: tuple[Axis, ...] = ("dp", "tp", "pp", "replica", "world")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
FLOWS: tuple[Flow, ...] = ("forward", "backward", "state")
SHAPES = {"1x2x2": (1, 2, 2), "2x2x1": (2, 2, 1), "1x4x1": (1, 4, 1)}
MEGABYTES = 16


def open_comm(pp: int, dp: int, tp: int, shard_size: int | None = None) -> Comm:
    """A Comm over the running process group."""
    grid = Grid(pp=pp, dp=dp, tp=tp, rank=dist.get_rank(), shard_size=shard_size)
    return Comm(grid, TorchBackend(grid, torch.device("cpu")))


def payload(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers that bf16 sums exactly, different on every rank and element."""
    return (torch.arange(elements) % 13 + 16 * rank).to(dtype)


def check_values(comm: Comm, axis: Axis, dtype: torch.dtype) -> None:
    """The three collectives against sums and concatenations made locally."""
    peers, me = comm.grid.peers(axis), comm.grid.index(axis)
    elements = 5 * len(peers)
    given = torch.stack([payload(rank, elements, dtype) for rank in peers])
    total, mine = given.sum(0).to(dtype), given[me].clone()
    own = slice(5 * me, 5 * me + 5)

    if len(peers) == 1:  # nothing is sent, so the result must be where it already is
        comm.all_reduce(mine, axis, "x").wait()
        assert torch.equal(mine, given[0])
        return
    shard, spoiled = torch.empty(5, dtype=dtype), mine.clone()
    comm.reduce_scatter(shard, spoiled, axis, "x").wait()
    assert torch.equal(shard, total[own]), (axis, dtype, "reduce_scatter to a tensor of its own")
    inside = mine.clone()
    comm.reduce_scatter(inside[own], inside, axis, "x").wait()
    assert torch.equal(inside[own], total[own]), (axis, dtype, "reduce_scatter in place")
    check_gather(comm, axis, dtype)
    square = mine.view(5, -1)
    comm.all_reduce(square, axis, "x").wait()
    assert torch.equal(square.flatten(), total), (axis, dtype, "all_reduce")
    scalar = torch.tensor(comm.grid.rank + 1).to(dtype)
    comm.all_reduce(scalar, axis, "x").wait()
    assert int(scalar) == sum(rank + 1 for rank in peers), (axis, dtype, "0-dim")


def check_gather(comm: Comm, axis: Axis, dtype: torch.dtype) -> None:
    """All-gather of a shard of its own, and of one that lies in the result."""
    peers, me = comm.grid.peers(axis), comm.grid.index(axis)
    shard = payload(comm.grid.rank, 5, dtype)
    expected = torch.cat([payload(rank, 5, dtype) for rank in peers])
    full = torch.zeros(5 * len(peers), dtype=dtype)
    comm.all_gather(full, shard, axis, "x").wait()
    assert torch.equal(full, expected), (axis, dtype, "all_gather")
    inside = torch.zeros_like(full)
    inside.view(-1, 5)[me] = shard
    comm.all_gather(inside, inside.view(-1, 5)[me], axis, "x").wait()
    assert torch.equal(inside, expected), (axis, dtype, "all_gather in place")


def values_on(sizes: tuple[int, int, int]) -> int:
    """Body of a rank; returns how many axes had company."""
    comm = open_comm(*sizes)
    for dtype in DTYPES:
        for axis in AXES:
            check_values(comm, axis, dtype)
    checked = {record.axis for record in comm.records}
    comm.close()
    return len(checked)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_on_every_axis_and_dtype(run_ranks: RunRanks, shape: str) -> None:
    pp, _, tp = SHAPES[shape]
    expected = sum(size > 1 for size in SHAPES[shape]) + (pp * tp > 1) + 1  # the replica, the world
    assert run_ranks(values_on, 4, SHAPES[shape]) == [expected] * 4


def gather_large() -> None:
    """Body of a rank: what gloo sends as messages between all ranks, one step beyond the size from which it does."""
    comm = open_comm(1, 3, 1)
    elements = (1 << 16) // 4 // 3 + 1
    shard, full = payload(comm.grid.rank, elements, torch.float32), torch.zeros(3 * elements)
    comm.all_gather(full, shard, "dp", "x").wait()
    assert torch.equal(full, torch.cat([payload(rank, elements, torch.float32) for rank in range(3)]))
    comm.close()


def test_each_slice_of_a_large_gather_is_in_its_place(run_ranks: RunRanks) -> None:
    run_ranks(gather_large, 3)


def noise(dtype: torch.dtype) -> Tensor:
    """Values whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    digits = torch.randn(4096, generator=generator, dtype=torch.float64)
    return (digits * torch.pow(10, digits.flip(0))).to(dtype)


def reduce(comm: Comm, full: Tensor) -> Tensor:
    """The own slice of the sum over dp."""
    shard = torch.empty_like(full.view(comm.grid.dp, -1)[0])
    comm.reduce_scatter(shard, full.clone(), "dp", "x").wait()
    return shard


def exactness() -> None:
    """Body of a rank: the sum is that of the rank order, each time, and in half precision is rounded once."""
    comm = open_comm(1, 4, 1)
    for dtype, wide in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        given = noise(dtype)
        first = reduce(comm, given)
        assert all(torch.equal(reduce(comm, given), first) for _ in range(20)), dtype
        table = torch.zeros(4, 4096, dtype=dtype)
        comm.all_gather(table.view(-1), given, "dp", "x").wait()
        parts = table.to(wide)
        in_order = parts[0] + parts[1] + parts[2] + parts[3]
        own = slice(1024 * comm.grid.rank, 1024 * (comm.grid.rank + 1))
        assert torch.equal(first, in_order[own].to(dtype)), dtype
    comm.close()


def test_reduce_scatter_adds_in_rank_order_every_time(run_ranks: RunRanks) -> None:
    run_ranks(exactness, 4)


def both_paths() -> None:
    """Body of a rank: stage 0 and stage 1 of two data ranks must train on the same bits."""
    comm = open_comm(1, 2, 1)
    for dtype in (torch.float32, torch.bfloat16):
        whole = noise(dtype)
        shard = reduce(comm, whole)
        comm.all_reduce(whole, "dp", "x").wait()
        assert torch.equal(shard, whole.view(2, -1)[comm.grid.rank]), dtype
    comm.close()


def test_two_ranks_get_the_same_bits_from_both_zero_paths(run_ranks: RunRanks) -> None:
    run_ranks(both_paths, 2)


# bytes on the wire


def loopback_bytes() -> int:
    """Bytes that this machine has sent to itself, from /proc/net/dev."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(comm: Comm, collective: Callable[[], None]) -> float:
    """Bytes at the loopback interface over bytes in the tallies of all ranks; others use it too, so the best of 40."""
    best = torch.tensor(math.inf)
    for _ in range(40):
        dist.barrier()
        before, counted = loopback_bytes(), comm.tally.bytes()
        dist.barrier()
        collective()
        dist.barrier()
        sent = (comm.tally.bytes() - counted) * comm.grid.world_size
        best = best.clamp(max=(loopback_bytes() - before) / sent)
        dist.broadcast(best, src=0)
        if best < 1.01:
            break
    return float(best)


def wire() -> dict[str, float]:
    """Body of a rank: measured over counted bytes of each collective."""
    comm = open_comm(1, dist.get_world_size(), 1)
    full = torch.ones(MEGABYTES * 2**20 // 4)
    own = full.view(comm.grid.dp, -1)[comm.grid.rank]
    ratios = {
        "reduce_scatter": measure(comm, lambda: comm.reduce_scatter(own, full, "dp", "x").wait()),
        "all_gather": measure(comm, lambda: comm.all_gather(full, own, "dp", "x").wait()),
        "all_reduce": measure(comm, lambda: comm.all_reduce(full, "dp", "x").wait()),
    }
    comm.close()
    return ratios


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_kernel_counts_the_bytes_that_we_count(run_ranks: RunRanks, ranks: int) -> None:
    ratios = run_ranks(wire, ranks)[0]
    print(ratios)
    assert all(0.95 < ratio < 1.05 for ratio in ratios.values()), ratios


# how long a group waits

SECONDS = 77
WIDE = {"2x1x2": (2, 1, 2), "1x2x2": (1, 2, 2), "2x2x1": (2, 2, 1)}


def timeouts(given: bool) -> dict[str, set[float]]:
    """Body of a rank: by grid, the seconds that every group of several axes waits, and the shared memory."""
    found: dict[str, set[float]] = {}
    world, gloo = dist.group.WORLD, torch.device("cpu")
    assert world is not None
    world._get_backend(gloo).options._timeout = timedelta(seconds=5)
    for name, (pp, dp, tp) in WIDE.items():
        grid = Grid(pp=pp, dp=dp, tp=tp, rank=dist.get_rank())
        backend = TorchBackend(grid, gloo, linked=True)
        backend.open_gathers()
        backend.link([Link(Channel("forward", 0, 1), 0, 1)] * (pp > 1))
        backend.connect((0, 1) if pp > 1 else (0,))
        host = TorchHostGroup(grid.rank, grid.world_size, float(SECONDS if given else 5))
        opened = [group for group in distributed_c10d._world.pg_map if group is not world]
        assert len(opened) > 3, "dp or pp, the gathers, stages, the host group"
        found[name] = {group._get_backend(gloo).options._timeout.total_seconds() for group in opened}
        found[name] |= {shared._host_barrier._seconds for shared in backend._shared.values()}
        assert bool(backend._shared) is (tp > 1)
        host.close()
        backend.close()
    return found


@pytest.mark.parametrize("given", [True, False])
def test_every_group_waits_as_long_as_it_was_told(run_ranks: RunRanks, given: bool) -> None:
    """With TRINE_TIMEOUT_SECONDS that long; in a process group of the user's as long as it waits."""
    env = {"TRINE_TIMEOUT_SECONDS": str(SECONDS)} if given else {}
    expected = {name: {float(SECONDS if given else 5)} for name in WIDE}
    assert run_ranks(timeouts, 4, given, env=env) == [expected] * 4


# agreement on gathers


def agree(within: int | None) -> tuple[bool, list[list[bytes]], list[tuple[Axis, str, int, int]]]:
    """Body of a rank: whether memory is shared, what others say in three rounds, and what was counted."""
    comm = open_comm(1, 4, 1, within)
    comm.open_gathers()
    assert isinstance(comm._backend, TorchBackend)
    shared = comm._backend._agreement is not None
    said = [list(comm.agree_on_gathers(bytes([turn, comm.grid.rank]), "round")) for turn in range(3)]
    rows = [(row.axis, row.label, row.calls, row.bytes) for row in comm.tally.rows()]
    comm.close()
    return shared, said, rows


@pytest.mark.parametrize("through", ["memory", "gloo"])
def test_hosts_of_data_ranks_agree_in_either_way_and_are_counted(run_ranks: RunRanks, through: str) -> None:
    env = {"TRINE_SHARED_MEMORY": str(int(through == "memory"))}
    for within in (None, 2):
        size = within or 4
        for rank, (shared, said, rows) in enumerate(run_ranks(agree, 4, within, env=env)):
            first = rank // size * size
            assert shared is (through == "memory")
            assert said == [[bytes([turn, other]) for other in range(first, first + size)] for turn in range(3)]
            assert rows == [("dp_shard" if within else "dp", "round", 3, 3 * 2 * (size - 1))]


# a peer that stops


def lose_a_peer(told: Path) -> None:
    """Body of a rank: rank 1 leaves; rank 0 writes down what its next collective says. Both end by failing."""
    comm = open_comm(1, 2, 1)
    dist.barrier()
    if comm.grid.rank == 1:
        comm.close()
        dist.destroy_process_group()
        for _ in range(400):
            time.sleep(0.0 if told.exists() else 0.05)
        raise SystemExit("the end")
    try:
        comm.all_reduce(torch.ones(2**20), "dp", "gradients").wait()
        said = "nothing"
    except EngineError as error:
        said = str(error)
    told.write_text(said)
    raise SystemExit("the end")


def test_a_survivor_is_told_which_collective_failed(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(lose_a_peer, 2, tmp_path / "told")
    said = (tmp_path / "told").read_text()
    assert "collective #1 all_reduce 'gradients' over dp, 1048576 x float32 between ranks (0, 1) on rank 0" in said
    assert "A peer has probably stopped" in said


def talk(linked: bool) -> tuple[list[float], list[Any]]:
    """Both flows between three stages at once, each in its own order, and a sum over two stages of three."""
    grid = Grid(pp=3, rank=dist.get_rank())
    comm = Comm(grid, TorchBackend(grid, torch.device("cpu"), linked))
    forward = [Link(Channel("forward", 0, to), 0, to) for to in (1, 2)]
    backward = [Link(Channel("backward", source, 0), source, 0) for source in (2, 1)]
    comm.link([*forward, *backward, forward[0]])
    here = comm.grid.coord().pp
    comm.connect((0, 2))
    got: list[float] = []
    if here == 0:
        sends = [comm.send(torch.full((3,), float(i)), link) for i in range(3) for link in forward]
        gradients = [torch.empty(3) for _ in range(2)]
        offers = [comm.receive(g, link) for g, link in zip(gradients, backward, strict=True)]
        for pending in (*offers, *sends):
            pending.wait()
        got = [float(g[0]) for g in gradients]
    else:
        comm.send(torch.full((3,), 10.0 * here), backward[2 - here], "gradients of it").wait()
        for _ in range(3):
            value = torch.empty(3)
            comm.receive(value, forward[here - 1]).wait()
            got.append(float(value[0]))
    if here != 1:
        shared = torch.tensor([1.0 + here])
        comm.sum_over_stages(shared, (0, 2), "ties").wait()
        got.append(float(shared))
    rows = [(row.axis, row.label, row.calls, row.bytes) for row in comm.tally.rows()]
    comm.close()
    return got, rows


@pytest.mark.parametrize("linked", [False, True])
def test_messages_keep_their_order_in_each_flow_and_some_stages_sum(run_ranks: RunRanks, linked: bool) -> None:
    (first, sent), (second, _), (third, back) = run_ranks(talk, 3, linked)
    assert first == [20.0, 10.0, 4.0] and second == [0.0, 1.0, 2.0] and third == [0.0, 1.0, 2.0, 4.0]
    assert sent == [("pp", "forward", 6, 72), ("pp", "ties", 1, 4)]
    assert back == [("pp", "gradients of it", 1, 12), ("pp", "ties", 1, 4)]


def talk_at_once() -> list[float]:
    """Body of a rank: messages of every flow from stage 0 to stage 1, taken in another order than they were sent."""
    grid = Grid(pp=2, rank=dist.get_rank())
    comm = Comm(grid, TorchBackend(grid, torch.device("cpu")))
    links = [Link(Channel(flow, 0, 1), 0, 1) for flow in FLOWS]
    comm.link(links)
    values = [torch.full((3,), 1.0 + number) for number in range(len(links))]
    if grid.rank == 0:
        for pending in [comm.send(value, link) for value, link in zip(values, links, strict=True)]:
            pending.wait()
    else:
        for value, link in reversed(list(zip(values, links, strict=True))):
            comm.receive(value.zero_(), link).wait()
    comm.close()
    return [float(value[0]) for value in values]


def test_flows_between_two_stages_do_not_mix(run_ranks: RunRanks) -> None:
    assert run_ranks(talk_at_once, 2) == [[1.0, 2.0, 3.0]] * 2
