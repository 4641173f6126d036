"""What is known of the whole model on every rank: norms of gradients by name, and weights that rank 0 gives."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models
from tests.engine.every_grid import every_grid
from tests.engine.test_named_state import CLIP, data, loss_of, settings
from tests.selection import wide


def plain(dp: int, scale: float = 1.0) -> tuple[dict[str, float], list[float]]:
    """Norms of the first gradient by parameter, and the losses of three steps that begin at ``scale`` times weights."""
    model = models.decoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    norms: dict[str, float] = {}
    losses: list[float] = []
    for batch in data(dp):
        optimizer.zero_grad()
        loss = loss_of(model(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norms = norms or {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return norms, losses


def norms_of(config: dict[str, Any], world: World) -> tuple[dict[str, float], float, dict[str, float]]:
    """Body of a rank: norms after a step, that of all, and, without a pipeline, norms before the step."""
    dp = config["parallel"].get("data", 1)
    before: dict[str, float] = {}
    example = data(1)[0][:2]
    with engine.initialize(models.decoder, config, loss_of, example_batch=example, world=world) as eng:
        with pytest.raises(EngineError, match="gradient_norms before the first step"):
            eng.gradient_norms()
        mine = data(dp)[0].chunk(dp)[eng.grid.coord().dp]
        if eng.grid.pp == 1:
            for half in mine.chunk(2):
                eng.backward(loss_of(eng(half), half))
            before = eng.gradient_norms()
            report = eng.step()
        else:
            report = eng.train_batch(mine)
        assert report is not None
        sent = eng.sent
        found = eng.gradient_norms()
        rows = [(row.label, row.calls) for row in eng.sent.since(sent).rows() if row.calls]
        assert rows == [("gradient norms", 1)]
        return found, report.grad_norm, before


@pytest.mark.parametrize(("grid", "stage"), every_grid("dp2-zero3", "dp2-tp2-zero1", "pp2"))
def test_norms_of_gradients_are_those_of_one_process(grid: dict[str, int], stage: int) -> None:
    dp = grid.get("data", 1)
    expected, _ = plain(dp)
    ranks = run_thread_ranks(math.prod(grid.values()), partial(norms_of, settings(grid, stage)))
    assert all(found == ranks[0][0] for found, _, _ in ranks)
    found, norm, before = ranks[0]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9) and norm > CLIP  # those of key biases are rounding
    assert math.sqrt(sum(each**2 for each in found.values())) == pytest.approx(norm, rel=1e-6)
    assert not before or before == pytest.approx(expected, rel=1e-5, abs=1e-9)


def loaded(config: dict[str, Any], every: bool, world: World) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Body of a rank: losses of three steps after a load, what was loaded, and what is said of states that do not
    fit.
    """
    dp, told = config["parallel"].get("data", 1), []
    example = data(1)[0][:2]
    state = {key: 0.5 * value for key, value in models.decoder().state_dict().items()}
    with engine.initialize(models.decoder, config, loss_of, example_batch=example, world=world) as eng:
        own = state if every or world.rank == 0 else {}
        first = next(iter(state))
        wrong: tuple[dict[str, Any], ...] = (
            {key: value for key, value in state.items() if key != first},
            state | {"more": torch.zeros(2)},
            state | {first: state[first][:1]},
            state | {first: 3},
        )
        for given in wrong:
            with pytest.raises(CheckpointError) as error:
                eng.load_full_state_dict(given if world.rank == 0 else {})
            told.append(str(error.value))
        before = eng.full_state_dict()
        assert all(torch.equal(value, models.decoder().state_dict()[key]) for key, value in before.items())
        eng.load_full_state_dict({"more": torch.zeros(2), first: state[first].double()}, strict=False)
        eng.load_full_state_dict(own)
        after = eng.full_state_dict()
        losses = [eng.train_batch(batch.chunk(dp)[eng.grid.coord().dp]).loss for batch in data(dp)]
        return losses, after, told


@pytest.mark.parametrize(("grid", "stage"), every_grid("dp2-zero0", "dp2-zero3", "tp2", "pp2"))
@pytest.mark.parametrize("every", [False, wide(True)])
def test_weights_that_rank_0_gives_reach_every_rank(grid: dict[str, int], stage: int, every: bool) -> None:
    dp = grid.get("data", 1)
    ranks = run_thread_ranks(math.prod(grid.values()), partial(loaded, settings(grid, stage), every))
    losses, after, told = ranks[0]
    for key, value in models.decoder().state_dict().items():
        assert torch.equal(after[key], 0.5 * value), key
    assert losses == pytest.approx(plain(dp, 0.5)[1], rel=1e-6)
    assert all(said == told for _, _, said in ranks)
    source = "the state that rank 0 was given"
    assert told[0].startswith(f"{source} lacks ") and told[1].startswith(f"{source} has 'more'")
    assert f"in {source} and" in told[2] and told[3].startswith("load_full_state_dict was given a int as ")


def masters(world: World) -> tuple[float, float]:
    """Body of a rank: how far masters, and an average of one update, are from what was loaded."""
    config = settings({"data": 2}, 1, bf16={"enabled": True}, ema={"decay": 0.5})
    state = {key: 0.5 * value for key, value in models.decoder().state_dict().items()}
    with engine.initialize(models.decoder, config, loss_of, world=world, example_batch=data(1)[0][:2]) as eng:
        eng.train_batch(data(2)[0].chunk(2)[world.rank])
        eng.load_full_state_dict(state)
        with eng.masters() as found:
            exact = max(float((tensor - state[name]).abs().max()) for name, tensor in found.items())
        average = eng.full_state_dict(ema=True)
        return exact, max((float((average[key] - state[key]).abs().max()) for key in average), default=0.0)


def test_masters_and_the_average_follow_a_load() -> None:
    for exact, average in run_thread_ranks(2, masters):
        assert exact == 0.0 and average == 0.0
