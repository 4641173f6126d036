"""A whole grid in one process: collectives, messages, deadlocks, and engines that train as one process does."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

import engine
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from engine.parallel.comm.backend import Backend, Channel
from engine.parallel.comm.threads import DeadlockError, run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid
from engine.verify import verify
from tests import models
from tests.engine.parity.test_parity_axes import ALL, GRIDS, settings
from tests.selection import wide

FORWARD = Channel("forward", 0, 1)


def backend_of(world: World, **sizes: Any) -> tuple[Grid, Backend]:
    assert world.connect is not None
    grid = Grid(**sizes, rank=world.rank)
    return grid, world.connect(grid)


def test_collectives_give_sums_slices_and_maxima() -> None:
    def body(world: World) -> list[list[float]]:
        grid, backend = backend_of(world, dp=2, tp=2)
        own = torch.arange(4.0) + 10 * grid.rank
        total, most, shard, full = own.clone(), own.clone(), torch.empty(2), torch.empty(4)
        waits = [backend.all_reduce(total, "world"), backend.all_reduce(most, "dp", "max")]
        waits += [backend.reduce_scatter(shard, own.clone(), "tp"), backend.all_gather(full, own[:2], "tp")]
        assert torch.equal(total, own), "nothing appears before the wait"
        for wait in reversed(waits):
            wait()
        return [found.tolist() for found in (total, most, shard, full)]

    found = run_thread_ranks(4, body)
    assert [rank[0] for rank in found] == [[60.0, 64.0, 68.0, 72.0]] * 4
    assert [rank[1][0] for rank in found] == [20.0, 30.0, 20.0, 30.0]
    assert [rank[2] for rank in found] == [[10.0, 12.0], [14.0, 16.0], [50.0, 52.0], [54.0, 56.0]]
    assert [rank[3] for rank in found] == [[0.0, 1.0, 10.0, 11.0]] * 2 + [[20.0, 21.0, 30.0, 31.0]] * 2


def test_messages_keep_their_order_and_a_send_ends_with_its_receipt() -> None:
    received: list[float] = []

    def body(world: World) -> list[float]:
        _, backend = backend_of(world, pp=2)
        values = [torch.full((1,), float(i)) for i in range(3)]
        if world.rank == 0:
            waits = [backend.send(value, 1, FORWARD) for value in values]
            waits[2]()
            return list(received)
        waits = [backend.receive(value, 0, FORWARD) for value in values]
        for value, wait in reversed(list(zip(values, waits, strict=True))):
            wait()
            received.append(float(value))
        return received

    assert run_thread_ranks(2, body)[1] == [2.0, 1.0, 0.0]


def test_a_send_ends_when_it_is_offered_to_be_received() -> None:
    """A pipeline rank that waits for its sends before it takes what it was sent relies on it (``send_completion``)."""

    def body(world: World) -> float:
        _, backend = backend_of(world, pp=2)
        other, got = 1 - world.rank, torch.empty(1)
        arrival = backend.receive(got, other, Channel("forward", other, world.rank))
        backend.send(torch.full((1,), float(world.rank)), other, Channel("forward", world.rank, other))()
        arrival()
        return float(got)

    assert run_thread_ranks(2, body) == [1.0, 0.0]


def test_a_deadlock_names_messages_and_collectives() -> None:
    def body(world: World) -> None:
        _, backend = backend_of(world, pp=2)
        if world.rank == 0:
            backend.receive(torch.empty(1), 1, Channel("backward", 1, 0))()
        else:
            backend.all_reduce(torch.ones(2), "pp")()

    with pytest.raises(DeadlockError) as caught:
        run_thread_ranks(2, body)
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits for message 0 of backward 1 -> 0 from rank 1; rank 1 waits for all_reduce "
        "(sum) of 2 float32 elements over pp, to which ranks [0] have not come."
    )


def test_different_collectives_are_refused() -> None:
    def body(world: World) -> None:
        _, backend = backend_of(world, dp=2)
        backend.all_reduce(torch.ones(2 + world.rank), "dp")()

    with pytest.raises(EngineError, match=r"rank 1 calls all_reduce .* 3 float32 .* rank 0 calls all_reduce .* 2 "):
        run_thread_ranks(2, body)


@pytest.mark.parametrize(
    ("name", "grid", "changes"),
    [
        wide("decoder", "dp2 x tp2 x pp2", {}),
        wide("gpt2", "tp2 x pp2", {"activation_checkpointing": {"mode": "full"}}),
        ("decoder tied", "dp2 x pp2", {"zero_optimization": {"stage": 3}}),
        wide("decoder dropout", "pp4", {"parallel": {"pipeline": 4, "schedule": "zb-h1"}}),
        wide("decoder", "pp2", {"parallel": {"pipeline": 2, "schedule": "zb-v"}}),
    ],
)
def test_an_engine_on_threads_trains_as_one_process(name: str, grid: str, changes: dict[str, Any]) -> None:
    config = settings(grid, (0, "1f1b", "none")) | changes
    wishes = loss_sum if name.startswith("decoder") else None
    batches = models.batches_for(name.split()[0], 16, 2)
    result = verify(ALL[name], config, batches, wishes, threads=prod(GRIDS[grid].values()))
    assert result is not None and result.holds(), str(result)


def test_two_engines_stand_beside_each_other_and_a_run_repeats_to_the_bit() -> None:
    config = settings("dp2", (1, "1f1b", "none")) | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    batches = models.batches_for("decoder", 8, 2)

    def body(world: World) -> list[Tensor]:
        engines = [
            engine.initialize(models.decoder, config, loss_sum, world=world),
            engine.initialize(models.decoder, config, loss_sum, world=world),
        ]
        mine = slice(4 * world.rank, 4 * world.rank + 4)
        for batch in batches:
            for eng in engines:
                eng.train_batch({key: value[mine] for key, value in batch.items()})
        weights = [eng.full_state_dict() for eng in engines]
        for eng in engines:
            eng.close()
        return [found["head.weight"] for found in weights if found]

    first, second = run_thread_ranks(2, body)[0], run_thread_ranks(2, body)[0]
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], second[0])


def test_a_checkpoint_of_threads_is_refused(tmp_path: Any) -> None:
    def body(world: World) -> None:
        config = settings("dp2", (0, "1f1b", "none")) | {"checkpoint": {"folder": str(tmp_path)}}
        with engine.initialize(models.decoder, config, loss_sum, world=world) as eng:
            eng.save_checkpoint()

    with pytest.raises(EngineError, match="the 2 ranks are threads of one process"):
        run_thread_ranks(2, body)


@pytest.mark.long
def test_what_pipelines_replace_in_torch_is_put_back() -> None:
    """Each stage replaces functions of torch while its forward runs, and others run before it is through."""
    before = [vars(torch.autograd.Function)["apply"], dict(vars(CheckpointFunction)), dict(vars(checkpoint))]
    config = settings("tp2 x pp2", (0, "1f1b", "full"))
    result = verify(ALL["gpt2"], config, models.batches_for("gpt2", 16, 2), threads=4)
    assert result is not None and result.holds()
    after = [vars(torch.autograd.Function)["apply"], dict(vars(CheckpointFunction)), dict(vars(checkpoint))]
    assert after == before
