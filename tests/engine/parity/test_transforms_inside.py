"""Transforms of torch.func inside blocks and in the loss: the training of one process, or one sentence on all ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import verify
from tests import models
from tests.engine.parity.launches import settings

WIDTH = 16
PLAN = {"*.up": "column", "*.down": "row", "embed": "vocabulary", "head": "vocabulary"}
TP2 = {"tensor": 2, "tensor_plan": PLAN}
GRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "dp2-zero3": ({"data": 2}, 3),
    "tp2": (TP2, 0),
    "dp2-tp2-zero3": (TP2 | {"data": 2}, 3),
    "pp2": ({"pipeline": 2}, 0),
    "tp2-pp2": (TP2 | {"pipeline": 2}, 0),
}
Mapped = Callable[[Tensor], Tensor]
Transform = Callable[[Mapped, Tensor], Tensor]
Inside = Callable[["Block", Tensor], Tensor]
Loss = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in jvp


def bend(x: Tensor) -> Tensor:
    return torch.tanh(x) * x


def vjp(function: Mapped, x: Tensor) -> Tensor:
    out, pull, *_ = torch.func.vjp(function, x)
    moved: Tensor = out + pull(torch.ones_like(out))[0]
    return moved


def of_rows(transform: Callable[..., Any]) -> Transform:
    """The sum of a Jacobian's columns, for each row by itself."""
    return lambda function, x: torch.func.vmap(torch.func.vmap(transform(function)))(x).sum(-1)


TRANSFORMS: Mapping[str, Transform] = {
    "vmap": lambda function, x: torch.func.vmap(function)(x),
    "grad": lambda function, x: x + torch.func.grad(lambda y: function(y).square().sum())(x),
    "vjp": vjp,
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1],
    "jacrev": of_rows(torch.func.jacrev),
}
IN_LAYERS = {name: transform for name, transform in TRANSFORMS.items() if name != "jacrev"}


class Block(nn.Module):
    """A perceptron beside its input; ``inside`` runs its layers."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.inside = inside

    def layers(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self, x)


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, inside: Inside = Block.layers) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.blocks = nn.Embedding(models.VOCABULARY, WIDTH), nn.ModuleList(Block(inside) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, models.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def cross_entropy(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch[1].flatten())


def called(block: Block, x: Tensor) -> Tensor:
    parameters: dict[str, Tensor] = dict(block.up.named_parameters())
    out: Tensor = block.down(F.gelu(torch.func.functional_call(block.up, parameters, (block.norm(x),))))
    return out


def all_inside(block: Block, x: Tensor) -> Tensor:
    """Each transform once: around layers, of what column layers return, and a layer that is called by its weights."""
    for name in ("jvp", "jacrev", "grad"):
        x = TRANSFORMS[name](bend, x)
    hidden = torch.func.functional_call(block.up, dict(block.up.named_parameters()), (block.norm(x),))
    out: Tensor = block.down(vjp(bend, TRANSFORMS["vmap"](F.gelu, hidden)))
    return out


def around_layers(way: Transform) -> Inside:
    return lambda block, x: block.layers(way(bend, x))


def of_hidden(way: Transform) -> Inside:
    return lambda block, x: block.down(way(bend, block.up(block.norm(x))))


def of_layers(way: Transform) -> Inside:
    return lambda block, x: way(block.layers, x)


PURE: dict[str, Inside] = {
    **{name: around_layers(way) for name, way in TRANSFORMS.items()},
    **{f"{name} of hidden": of_hidden(way) for name, way in IN_LAYERS.items()},
    "functional_call": called,
}
LAYERS: dict[str, Inside] = {name: of_layers(way) for name, way in IN_LAYERS.items()}
OF_THE_BATCH = "vmap of a batch"
LOSSES: dict[str, Loss] = {
    "vmap": lambda out, batch: torch.func.vmap(F.cross_entropy)(out, batch[1]).mean(),
    "grad": lambda out, batch: cross_entropy(out, batch) + TRANSFORMS["grad"](bend, out).square().mean(),
    "vjp": lambda out, batch: cross_entropy(vjp(bend, out), batch),
    "jvp": lambda out, batch: cross_entropy(TRANSFORMS["jvp"](bend, out), batch),
    "jacrev": lambda out, batch: cross_entropy(TRANSFORMS["jacrev"](bend, out), batch),
    OF_THE_BATCH: lambda out, batch: cross_entropy(out, batch) * torch.func.vmap(torch.sum)(batch[1]).sum() / 99,
}


def all_in_loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack([loss(out, batch) for loss in LOSSES.values()]).mean()


def often(name: str, names: Iterable[str]) -> list[Any]:
    """All names in order; all but one are long."""
    return [pytest.param(other, marks=[] if other == name else pytest.mark.long) for other in sorted(names)]


def config_for(grid: str) -> dict[str, Any]:
    axes, stage = GRIDS[grid]
    return settings(axes.get("pipeline", 1), parallel=axes, zero_optimization={"stage": stage})


def trains(grid: str, inside: Inside, loss: Loss = cross_entropy) -> None:
    """Train three steps on the threads of a grid and in one process."""
    config = config_for(grid)
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(config["train_batch_size"], 3)]
    result = verify(lambda: Decoder(inside), config, batches, loss, threads=ranks_of(grid))
    assert result is not None and result.holds(), str(result)


def ranks_of(grid: str) -> int:
    axes = GRIDS[grid][0]
    return int(axes.get("data", 1) * axes.get("tensor", 1) * axes.get("pipeline", 1))


def refused(grid: str, inside: Inside, loss: Loss = cross_entropy) -> str:
    """The sentence with which every rank of a grid refuses a model before its first update."""

    def body(world: World) -> str:
        config = config_for(grid)
        (ids,) = models.token_batches(config["train_batch_size"] // GRIDS[grid][0].get("data", 1), 1)
        batch = ids[:, :-1], ids[:, 1:]
        example = tuple(part[:2] for part in batch)
        with pytest.raises(engine.PlanError) as caught:
            engine.initialize(Decoder(inside), config, loss, example, world=world).train_batch(batch)
        return str(caught.value)

    (sentence,) = set(run_thread_ranks(ranks_of(grid), body))
    return sentence


@pytest.mark.parametrize("grid", ["tp2", pytest.param("dp2-zero3", marks=pytest.mark.long)])
def test_transforms_in_blocks_and_in_the_loss_train_as_in_one_process(grid: str) -> None:
    trains(grid, all_inside, all_in_loss)


@pytest.mark.long
@pytest.mark.parametrize("name", PURE)
@pytest.mark.parametrize("grid", ["dp2-zero3", "tp2", "dp2-tp2-zero3"])
def test_a_transform_of_activations_in_a_block_trains_as_in_one_process(grid: str, name: str) -> None:
    trains(grid, PURE[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("grid", ["dp2-zero3", "tp2", "dp2-tp2-zero3"])
def test_a_transform_in_the_loss_trains_as_in_one_process(grid: str, name: str) -> None:
    trains(grid, Block.layers, LOSSES[name])


@pytest.mark.long
@pytest.mark.parametrize("grid", ["pp2", "tp2-pp2"])
def test_a_sub_module_that_is_called_by_its_weights_trains_on_stages(grid: str) -> None:
    trains(grid, called)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("grid", ["tp2", pytest.param("dp2-tp2-zero3", marks=pytest.mark.long)])
def test_a_layer_that_tensor_ranks_share_is_refused_inside_a_transform(grid: str, name: str) -> None:
    sentence = refused(grid, LAYERS[name])
    assert "test_transforms_inside.py:" in sentence and "calls layer 'blocks.0.up' inside a transform" in sentence


@pytest.mark.parametrize("name", often("jvp", PURE.keys() - {"functional_call"}))
@pytest.mark.parametrize("grid", ["pp2", pytest.param("tp2-pp2", marks=pytest.mark.long)])
def test_a_transform_in_a_block_is_refused_on_stages(grid: str, name: str) -> None:
    assert "runs an operation on activations inside a transform" in refused(grid, PURE[name])


@pytest.mark.long
@pytest.mark.parametrize("grid", ["pp2", "tp2-pp2"])
def test_a_transform_of_the_batch_alone_trains_on_stages(grid: str) -> None:
    trains(grid, Block.layers, LOSSES[OF_THE_BATCH])


@pytest.mark.parametrize("name", often("vmap", LOSSES.keys() - {OF_THE_BATCH}))
@pytest.mark.parametrize("grid", ["pp2", pytest.param("tp2-pp2", marks=pytest.mark.long)])
def test_a_transform_in_the_loss_is_refused_on_stages(grid: str, name: str) -> None:
    assert "runs an operation on activations inside a transform" in refused(grid, Block.layers, LOSSES[name])
