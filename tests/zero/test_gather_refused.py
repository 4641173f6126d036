"""What sharded parameters cannot do is said, on every rank, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import EngineError
from tests.zero.awkward import VOCABULARY, WIDTH, Block, Chain
from tests.zero.test_gather_ranks import batch, start

RunRanks = Callable[..., list[Any]]


def message(act: Callable[[], object]) -> str:
    """What an EngineError says."""
    try:
        act()
    except EngineError as error:
        return str(error)
    return ""


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
        end = " inside full_parameters, which holds them open; leave its `with` block first."
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


@pytest.mark.parametrize("gather", ["microbatch", "step"])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_forward_writes_into_parameters_is_not_lost_in_silence(
    run_ranks: RunRanks, name: str, gather: str
) -> None:
    for told in run_ranks(writes, 2, name, gather):
        assert f"{WRITES[name][1]}' is sharded (ZeRO 3) and the model writes into it while it runs" in told
