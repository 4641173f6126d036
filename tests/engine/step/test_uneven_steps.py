"""Lists of microbatches: how a mean weighs, evaluations, and errors that all ranks raise together."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models

ROWS = ((1, 3), (), (5, 1, 2))
"""Rows of each microbatch of each data rank."""
CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0,
        "uneven_microbatches": True,
    }
)
ONCE, EACH = {"stage": 3, "gather": "step"}, {"stage": 3, "reduce": "microbatch"}


class Mean(nn.Module):
    """Returns a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(torch.tanh(self.first(x))).square().mean()
        return loss


def share(rank: int) -> list[Tensor]:
    """The microbatches of a data rank, of rows that are equal on every call."""
    rows = torch.randn(sum(map(sum, ROWS)), 3, generator=torch.Generator().manual_seed(5))
    return list(torch.split(torch.split(rows, [sum(each) for each in ROWS])[rank], list(ROWS[rank])))


def started(world: World, zero: Mapping[str, Any], **changes: Any) -> engine.Engine:
    config = {**CONFIG, "parallel": {"data": world.size}, "zero_optimization": dict(zero), **changes}
    return engine.initialize(Mean(), config, world=world)


def on_ranks(body: Callable[..., Any], *arguments: Any) -> list[Any]:
    return run_thread_ranks(len(ROWS), partial(body, *arguments))


def plain() -> tuple[float, dict[str, Tensor]]:
    """Loss and weights after one step over all rows at once."""
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.cat([row for rank in range(len(ROWS)) for row in share(rank)]))
    loss.backward()
    optimizer.step()
    return float(loss.detach()), model.state_dict()


def one_step(zero: Mapping[str, Any], world: World) -> Any:
    with started(world, zero) as eng:
        before = eng.eval_batch(share(world.rank)).loss
        report = eng.train_batch(share(world.rank))
        return before, report.loss, report.weight, eng.full_state_dict()


@pytest.mark.parametrize("zero", [{"stage": 0}, ONCE, EACH], ids=["zero0", "once", "each"])
def test_a_mean_weighs_as_its_rows_in_steps_and_evaluations(zero: dict[str, Any]) -> None:
    loss, weights = plain()
    (before, trained, weight, found), *others = on_ranks(one_step, zero)
    assert before == pytest.approx(loss, rel=1e-6) and trained == pytest.approx(loss, rel=1e-6) and weight == 12
    assert all(other[:3] == (before, trained, weight) for other in others)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


BAD: dict[str, tuple[Callable[[int], Any], str]] = {
    "no list": (lambda rank: share(0)[0] if rank == 0 else share(rank), "the batch is a Tensor, but with uneven_mi"),
    "no rows": (lambda rank: [torch.ones(0, 3)] if rank == 0 else share(rank), "microbatch 0 of the list has no row"),
    "all empty": (lambda rank: [], "the lists of all data ranks are empty"),
}


def fails(bad: str, zero: Mapping[str, Any], world: World) -> Any:
    with started(world, zero) as eng:
        errors = []
        for call in (eng.train_batch, eng.eval_batch):
            with pytest.raises(engine.EngineError) as raised:
                call(BAD[bad][0](world.rank))
            errors.append(str(raised.value))
        return errors, eng.train_batch(share(world.rank)).loss


@pytest.mark.parametrize("zero", [{"stage": 1}, ONCE, EACH], ids=["zero1", "once", "each"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_lists_raise_on_all_ranks_and_the_next_step_trains(bad: str, zero: dict[str, Any]) -> None:
    (errors, loss), *others = on_ranks(fails, bad, zero)
    assert all(BAD[bad][1] in error for error in errors)
    assert loss == pytest.approx(plain()[0], rel=1e-6)
    for errors, _ in others:
        assert all(BAD[bad][1] in error for error in errors), "the other ranks name the cause too"


def compares_rows(output: Tensor, batch: Any, gather_rows: Any = None) -> Any:
    return gather_rows(output.view(1)).mean()


def test_losses_that_gather_rows_are_refused_before_training() -> None:
    def body(world: World) -> None:
        config = {**CONFIG, "parallel": {"data": world.size}}
        with pytest.raises(engine.EngineError, match="gather_rows needs a forward of every data rank"):
            engine.initialize(Mean(), config, compares_rows, torch.ones(1, 3), world=world)

    run_thread_ranks(2, body)


def test_shared_experts_are_refused() -> None:
    with pytest.raises(engine.ConfigError, match=r"uneven_microbatches: true with parallel\.expert 2"):
        engine.load_config({**CONFIG, "parallel": {"expert": 2}}, 2)


def test_an_empty_first_list_asks_for_an_example() -> None:
    def body(world: World) -> str:
        config = {**CONFIG, "parallel": {"data": 2, "pipeline": 2}}
        batch = models.batches_for("decoder", 1, 1)
        with engine.initialize(models.decoder(), config, loss_sum, world=world) as eng:
            with pytest.raises(engine.EngineError) as raised:
                eng.train_batch([] if eng.grid.row_rank else batch)
            return str(raised.value)

    for number, sentence in enumerate(run_thread_ranks(4, body)):
        assert ("the first list of microbatches is empty" in sentence) == (number in (1, 3)), sentence


def own_loop(zero: Mapping[str, Any], world: World) -> Any:
    """Each rank has at least one backward, and says which is its last."""
    counts = (1, 3, 2)
    rows = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(5))
    with started(world, zero) as eng:
        mine = torch.split(rows, list(counts))[world.rank]
        for number, row in enumerate(mine):
            eng.set_gradient_accumulation_boundary(number + 1 == len(mine))
            eng.backward(eng(row[None]))
            eng.step()
        model = Mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(rows).backward()
        optimizer.step()
        return eng.full_state_dict(), model.state_dict()


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, ONCE], ids=["zero0", "zero2", "once"])
def test_a_loop_of_ones_own_may_have_other_numbers_of_backwards(zero: dict[str, Any]) -> None:
    (found, weights), *_ = on_ranks(own_loop, zero)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
