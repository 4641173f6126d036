"""Random numbers of Python and NumPy in a forward: equal in a replica, the same on every grid."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.model.rng_streams import HostState
from engine.verify import verify
from tests import models
from tests.engine.every_grid import GRIDS
from tests.engine.parity.launches import settings

WIDTH = 16
WIDER = GRIDS | {"tp2-pp2": ({"data": 1, "tensor": 2, "pipeline": 2}, 0)}
PLAN = {"*.up": "column", "*.down": "row", "embed": "vocabulary", "head": "vocabulary"}


class Block(nn.Module):
    """A perceptron beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + out


class Depth(Block):
    """Stochastic depth inside the block."""

    def forward(self, x: Tensor) -> Tensor:
        drop = self.training and random.random() < 0.4
        return x.clone() if drop else x + (super().forward(x) - x) / 0.6


class Scaled(Block):
    """Scales by what NumPy draws, before and after its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * float(np.random.uniform(0.5, 1.5)))
        return x * (1 + 0.1 * random.gauss(0.0, 1.0)) + 0.01 * float(np.random.randn())


class Decoder(nn.Module):
    """No randomness of its own."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.blocks = nn.Embedding(models.VOCABULARY, WIDTH), nn.ModuleList(self.block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, models.VOCABULARY)

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.trunk(self.embed(ids)))).flatten(0, 1), targets.flatten())


class StochasticDepth(Decoder):
    block = Depth


class NoisyBlocks(Decoder):
    block = Scaled


class LayerDrop(Decoder):
    """Leaves blocks out, as Wav2Vec2 does: another path in every microbatch."""

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or random.random() > 0.3:
                x = block(x)
        return x


class SpecAugment(Decoder):
    """Masks spans of time, drawn by NumPy between two units, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = nn.Parameter(torch.full((WIDTH,), 0.1))

    def trunk(self, x: Tensor) -> Tensor:
        mask = np.zeros(x.shape[:2], dtype=bool)
        for row in mask:
            for start in np.random.choice(x.shape[1] - 3, 2, replace=False):
                row[start : start + 3] = True
        return super().trunk(torch.where(torch.from_numpy(mask)[..., None], self.masked, x))


def parity(model: type[Decoder], grid: str, **changes: Any) -> None:
    """Train on a grid and in one process that draws by the same keys."""
    axes, stage = WIDER[grid]
    parallel = axes | ({"tensor_plan": PLAN} if "tensor" in axes else {})
    config = settings(axes.get("pipeline", 1), parallel=parallel, zero_optimization={"stage": stage}) | changes
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(config["train_batch_size"], 3)]
    ranks = axes["data"] * axes.get("tensor", 1) * axes.get("pipeline", 1)
    result = verify(model, config, batches, threads=ranks)
    assert result is not None and result.holds(), str(result)


FULL = {"activation_checkpointing": {"mode": "full"}}


@pytest.mark.parametrize(
    ("model", "grid", "changes"),
    [
        (LayerDrop, "tp2", {}),
        (SpecAugment, "pp2", {}),
        (NoisyBlocks, "tp2", FULL),
        (StochasticDepth, "pp2", FULL),
        *(
            pytest.param(model, grid, changes, marks=pytest.mark.long)
            for model in (LayerDrop, SpecAugment, NoisyBlocks, StochasticDepth)
            for grid in ("dp2-zero1", "dp2-zero3", "tp2", "pp2", "dp2-tp2-zero3", "dp2-pp2-zero3", "tp2-pp2")
            for changes in ({}, FULL, {"activation_checkpointing": {"mode": "selective"}})
            if not (model is LayerDrop and "pp" in grid)
        ),
    ],
)
def test_host_random_numbers_do_not_depend_on_the_grid(model: type[Decoder], grid: str, changes: Any) -> None:
    parity(model, grid, **changes)


def test_a_path_that_the_host_draws_is_refused_on_a_pipeline_however_rare() -> None:
    class Rare(LayerDrop):
        def trunk(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if np.random.random() > 1e-6:
                    x = block(x)
            return x

    def body(world: World) -> str:
        batch = tuple(torch.zeros(2, 2, 4, dtype=torch.int64))
        with pytest.raises(engine.PlanError) as caught:
            engine.initialize(Rare(), settings(2), example_batch=batch, world=world)
        return str(caught.value)

    for said in run_thread_ranks(2, body):
        assert "chooses the path of the forward by a random number" in said and "(layerdrop 0)" in said


def test_the_generators_of_the_user_are_as_he_left_them() -> None:
    """After a step, an evaluation, and a backward of his own in which blocks run again."""

    def trained() -> list[HostState]:
        random.seed(3)
        np.random.seed(3)
        np.random.randn()  # which draws one more ahead
        batch = tuple(torch.zeros(2, 8, 4, dtype=torch.int64))
        states = [HostState.take()]
        with engine.initialize(NoisyBlocks, settings(1) | FULL, example_batch=batch) as eng:
            for call in (eng.train_batch, eng.eval_batch):
                call(batch)
                states.append(HostState.take())
            for _ in range(4):
                eng.backward(eng(tuple(part[:2] for part in batch)))
                states.append(HostState.take())
            eng.step()
        return states

    first, *others = trained()
    for other in others:
        assert other.python == first.python and other.numpy[2:] == first.numpy[2:]
        assert (other.numpy[1] == first.numpy[1]).all()


def test_draws_that_begin_later_are_noticed() -> None:
    """A model that draws nothing at first costs nothing, and draws by keys once it begins."""

    def body(seed: int) -> list[float]:
        config = settings(1, train_batch_size=4, train_micro_batch_size_per_gpu=2)
        batch = tuple(torch.zeros(2, 4, 4, dtype=torch.int64))
        late = _Late()
        with engine.initialize(late, config, example_batch=batch) as eng:
            for late.begins in (False, False, True, True):
                random.seed(seed)
                eng.train_batch(batch)
        return late.drawn

    first, second = body(1), body(2)
    assert first == second and len(set(first)) == len(first) == 4


class _Late(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.begins, self.drawn = False, list[float]()

    def trunk(self, x: Tensor) -> Tensor:
        if self.begins:
            self.drawn.append(random.random())
        return super().trunk(x)
