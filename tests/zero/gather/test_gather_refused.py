"""What sharded parameters cannot do is said, on every rank, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.awkward import VOCABULARY, WIDTH, Block, Chain
from tests.zero.gather.test_gather_ranks import batch, message, start

RunRanks = Callable[..., list[Any]]


def opened(grid: dict[str, int]) -> list[str]:
    """Body of a rank: what is refused while parameters of the first stage are open, and that training goes on."""
    with start(Chain(), {"stage": 3}, parallel=grid) as eng:
        eng.train_batch(batch(eng, 0))
        with eng.full_parameters("embed.*"):
            calls: tuple[Callable[[], object], ...] = (
                lambda: eng.train_batch(batch(eng, 1)),
                lambda: eng.eval_batch(batch(eng, 1)),
                eng.full_state_dict,
            )
            told = [message(call) for call in calls]
        eng.train_batch(batch(eng, 1))
    return told


@pytest.mark.parametrize("grid", [{"data": 2}, {"data": 2, "pipeline": 2}], ids=str)
def test_steps_and_states_inside_full_parameters_are_refused_on_every_stage(
    run_ranks: RunRanks, grid: dict[str, int]
) -> None:
    for told in run_ranks(opened, 2 * grid.get("pipeline", 1), grid):
        end = " cannot run inside full_parameters, which keeps parameters gathered; leave its `with` block first."
        assert told == [what + end for what in ("a step", "a step", "full_state_dict")]


class Clamps(Chain):
    """Blocks keep their weights small themselves."""

    class block(Block):  # noqa: N801
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return super().forward(x)


class Follows(Chain):
    """A centre that follows what passes by, kept as a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.lerp_(x.mean((0, 1)), 0.1)
        return super().run(x - self.centre)


class MaxNorm(Chain):
    """torch's embedding writes back the rows that it has shortened."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)


WRITES: dict[str, tuple[type[Chain], str]] = {
    "clamps": (Clamps, ".up.weight"),
    "follows": (Follows, "centre"),
    "max_norm": (MaxNorm, "embed.weight"),
}


def writes(name: str, gather: str) -> str:
    """Body of a rank: what is said to a model that writes into its parameters."""
    with start(WRITES[name][0](), {"stage": 3, "gather": gather}) as eng:
        return message(lambda: eng.train_batch(batch(eng, 0)))


@pytest.mark.parametrize("gather", ["microbatch", pytest.param("step", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_forward_writes_into_parameters_is_not_lost_in_silence(
    run_ranks: RunRanks, name: str, gather: str
) -> None:
    for told in run_ranks(writes, 2, name, gather):
        assert f"{WRITES[name][1]}' is sharded (ZeRO 3) and the model writes into it while it runs" in told


class Repeats(Chain):
    """Another number of rounds on every rank."""

    rounds = 1

    def run(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = super().run(x)
        return x


def repeats(stage: int) -> float:
    """Body of a rank: the loss after a step in which one repeats its blocks, the other repeats some of them."""
    model = Repeats()
    with start(model, {"stage": stage}) as eng:
        if eng.grid.rank == 0:
            model.rounds = 2
        else:
            model.loss = lambda x, ids: Chain.loss(model, model.blocks[2](x), ids)  # type: ignore[method-assign]
        eng.train_batch(batch(eng, 0))
        return eng.train_batch(batch(eng, 1)).loss


def test_ranks_may_need_different_groups(run_ranks: RunRanks) -> None:
    assert run_ranks(repeats, 2, 3) == run_ranks(repeats, 2, 1)


def patterns() -> str:
    """Body of a rank: other patterns on other ranks."""
    with start(Chain(), {"stage": 3}) as eng:
        told = message(eng.full_parameters(("embed.*", "head.*")[eng.grid.rank]).__enter__)
        eng.train_batch(batch(eng, 0))
    return told


def test_ranks_that_open_different_parameters_are_told(run_ranks: RunRanks) -> None:
    for told in run_ranks(patterns, 2):
        assert told.startswith("data ranks use sharded parameters (ZeRO 3) in different orders")


class Tied(Chain):
    """Embedding and head are one."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def ties() -> tuple[str, bool]:
    """Body of a rank: stages write different values into a tied parameter, then the same."""
    with start(Tied(), {"stage": 3}, parallel={"data": 2, "pipeline": 2}) as eng:
        eng.train_batch(batch(eng, 0))

        def write(value: float) -> None:
            with torch.no_grad(), eng.full_parameters("embed.weight") as given:
                given["embed.weight"].fill_(value)

        told = message(lambda: write(0.1 * eng.grid.coord().pp))
        write(0.25)
        with eng.full_parameters("embed.weight") as given:
            kept = bool((given["embed.weight"] == 0.25).all())
        eng.train_batch(batch(eng, 1))
        return told, kept


def test_holders_of_a_tied_parameter_write_alike(run_ranks: RunRanks) -> None:
    for told, kept in run_ranks(ties, 4):
        assert told.startswith("full_parameters: 'embed.weight' is on several stages or tensor ranks, which have")
        assert kept


class Learned(Chain):
    """Positions are a view of a parameter that a module returns; so is what the model returns."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, 9 * WIDTH).view(9, WIDTH))

        def forward(self, length: int) -> Tensor:
            return self.weight[:length]

    def __init__(self) -> None:
        super().__init__()
        self.positions = Learned.Positions()

    def forward(self, ids: Tensor) -> Any:
        positions = self.positions(ids.shape[-1])
        return self.loss(self.run(self.embed(ids) + positions), ids), positions


def returned(stage: int) -> tuple[float, Any]:
    """Body of a rank: loss and output of an evaluation, and of the loop in three calls."""
    with start(Learned(), {"stage": stage}) as eng:
        for micro in torch.split(batch(eng, 0), 2):
            loss, seen = eng(micro)
            seen = seen.detach().clone()
            eng.backward(loss)
            eng.step()
        report, output = eng.eval_batch(batch(eng, 1), return_output=True)
        found = None if output is None else output[1].clone()
        return report.loss, (found, seen)


def test_what_a_model_returns_outlives_its_parameters(run_ranks: RunRanks) -> None:
    whole, sharded = run_ranks(returned, 2, 1), run_ranks(returned, 2, 3)
    for (loss, (output, seen)), (same_loss, (same_output, same_seen)) in zip(whole, sharded, strict=True):
        assert loss == same_loss and torch.equal(seen, same_seen)
        assert output is None if same_output is None else torch.equal(output, same_output)


def closed() -> list[str]:
    """Body of a rank: what an engine says that is over."""
    eng = start(Chain(), {"stage": 3})
    eng.close()
    return [message(call) for call in (eng.full_state_dict, eng.full_parameters("*").__enter__)]


def test_a_closed_engine_says_that_it_is(run_ranks: RunRanks) -> None:
    for state, parameters in run_ranks(closed, 2):
        assert state.startswith("full_state_dict was called after close(), which released the engine's parts; ")
        assert parameters.startswith("full_parameters was called after close(), which released the engine's parts; ")
