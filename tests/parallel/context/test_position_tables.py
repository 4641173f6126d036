"""Models with learned positions, and with masks from triangles of ones, store only a rank's part of both."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.context import recipe as recipes
from engine.parallel.context import recipe_mode
from engine.parallel.context.recipe import TensorRecipe
from engine.planning.activation_memory import LiveStorages
from engine.verify import verify
from tests.parallel.context.test_context_training import batches_of, config_of
from tests.selection import wide

WIDTH, HEADS = 16, 2


class Reader(nn.Module):
    """Decoder of one block with learned positions and a mask from a triangle of ones."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(61, WIDTH), nn.Embedding(places, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 61)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        batch, length = input_ids.shape
        x = self.tokens(input_ids) + self.places(torch.arange(length))
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).transpose(1, 3).unbind(2)
        mask = torch.tril(torch.ones(length, length)).bool()
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        logits = self.head(x + seen.transpose(1, 2).flatten(2))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def reader(places: int = 64) -> nn.Module:
    torch.manual_seed(3)
    return Reader(places)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_LARGE", 64)
    monkeypatch.setattr(recipe_mode, "_LONG", 8)
    monkeypatch.setattr(recipes, "_ROWS", 256)


@pytest.mark.parametrize(
    "parallel",
    [{"context": 2}, *(wide(each) for each in ({}, {"context": 4}, {"context": 2, "data": 2}))],
    ids=str,
)
@pytest.mark.usefixtures("small")
def test_learned_positions_and_triangles_train_as_one_process(
    parallel: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, make = list[Any](), TensorRecipe.whole

    def made(recipe: TensorRecipe) -> Tensor:
        whole.append(tuple(recipe.shape))
        return make(recipe)

    monkeypatch.setattr(TensorRecipe, "whole", made)
    config = config_of({"data": 1, **parallel}, 2)
    threads = parallel.get("data", 1) * parallel.get("context", 1)
    result = verify(reader, config, batches_of("plain", 37), threads=threads)
    assert result is not None and result.holds(), str(result)
    assert (37, 37) not in whole


def _peak(length: int) -> int:
    ids = torch.arange(length)[None] % 61
    batch = {"input_ids": ids, "labels": ids}
    settings = config_of({"data": 1}, 0) | {"train_batch_size": 1}
    with engine.initialize(reader(length), settings) as eng:
        eng.train_batch({name: x[:, :64] for name, x in batch.items()})
        live = LiveStorages()
        with live:
            eng.train_batch(batch)
        return live.peak


def _rows_of_table(world: Any) -> list[int]:
    model = reader()
    with engine.initialize(model, config_of({"data": 1, "context": 2}, 0), world=world) as eng:
        eng.train_batch(batches_of("plain")[0])  # plans the model in a trace
        found = list[int]()
        handle = model.get_submodule("places").register_forward_hook(
            lambda _, args, out: found.append((out.local if hasattr(out, "local") else out).shape[-2])
        )
        eng.train_batch(batches_of("plain")[0])
        handle.remove()
        return found


def test_a_table_of_positions_returns_the_rows_of_a_rank() -> None:
    for rows in run_thread_ranks(2, _rows_of_table):
        assert rows and set(rows) == {18}


@pytest.mark.long
def test_storage_of_a_triangle_grows_as_the_length() -> None:
    shorter, longer = (_peak(length) for length in (8192, 16384))
    assert longer < 2.2 * shorter and longer < 16384**2  # bytes of one mask
