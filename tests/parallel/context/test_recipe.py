"""Masks that are functions of short tensors are never made whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.context import recipe as recipes
from engine.parallel.context import recipe_mode, sight
from engine.parallel.context.recipe import TensorRecipe
from engine.parallel.context.recipe_mode import HostTwins, RecipeMode
from engine.planning.activation_memory import LiveStorages
from engine.verify import verify
from tests.parallel.context.test_context_training import batches_of, config_of, llama
from tests.selection import wide

S = 48


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_LARGE", 64)
    monkeypatch.setattr(recipe_mode, "_LONG", 8)
    monkeypatch.setattr(recipes, "_ROWS", 256)
    monkeypatch.setattr(recipes, "_LINES", 4)
    monkeypatch.setattr(sight, "_ELEMENTS", 256)
    monkeypatch.setattr(sight, "_ROWS", 4)


def _documents() -> Tensor:
    return (torch.arange(S) // 11)[None]


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda q, k: k <= q,
    "window": lambda q, k: (k <= q) & (k > q - 7),
    "documents": lambda q, k: (_documents()[:, q[:, 0]][..., None] == _documents()[:, k[0]][:, None]) & (k <= q),
    "added": lambda q, k: torch.where(k <= q, 0.0, -1e9),
    "filled": lambda q, k: (0.5 * (q - k).abs()).masked_fill(k > q, -1e9),
    "expanded": lambda q, k: (k <= q)[None, None].expand(2, -1, -1, -1),
    "sliced": lambda q, k: (k <= q)[3:, ..., 5:40:2].unsqueeze(0),
    "picked": lambda q, k: (k <= q).index_select(0, torch.tensor([4, 40, 7, 9])).index_select(1, torch.tensor([5, 8])),
    "lower": lambda q, k: torch.ones(S, S, dtype=torch.bool).tril(),
    "upper": lambda q, k: torch.triu(torch.full((S, S), -1e9), diagonal=1)[None],
    "band": lambda q, k: torch.tril(torch.ones((S, S)), 2).triu(-3) == 0,
    "negated": lambda q, k: ~(k > q) | (q == 3),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_recipe_and_its_parts_are_what_torch_makes(kind: str) -> None:
    place = torch.arange(S)
    wanted = MASKS[kind](place[:, None], place[None])
    with RecipeMode():
        made = MASKS[kind](place[:, None], place[None])
    assert (
        type(made) is TensorRecipe and made.shape == wanted.shape and made.dtype == wanted.dtype and made.made is None
    )
    rows, columns = torch.tensor([3, 1, 2]), slice(0, 2)
    if kind != "picked":
        part = made.box([*(None,) * (made.ndim - 2), rows, columns])
        assert torch.equal(part, wanted[..., rows, :][..., columns]) and made.made is None
    assert torch.equal(made + 0, wanted + 0)


def _causal() -> tuple[Tensor, Tensor]:
    place = torch.arange(S)
    return place, place[:, None] >= place


def _source() -> tuple[Tensor, ...]:
    place, mask = _causal()
    place += 5
    return (mask,)


def _written(write: Callable[[Tensor], object]) -> Callable[[], tuple[Tensor, ...]]:
    """A write into a mask, or a view of it, after others were made of the mask."""

    def run() -> tuple[Tensor, ...]:
        _, mask = _causal()
        negated, view, copied = ~mask, mask[None].expand(2, -1, -1), mask.to(torch.float32)
        write(mask)
        return mask, negated, view, copied, mask[3:]

    return run


def _trained() -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, S, 8, generator=draw, requires_grad=True) for _ in range(3))
    _, mask = _causal()
    outs = []
    for rows in (5, 9):
        outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        mask[:rows] = True
    torch.autograd.backward((outs[0].square() + outs[1].sin()).sum())
    assert q.grad is not None and k.grad is not None
    return (*outs, q.grad, k.grad)


WRITES: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "a source": _source,
    "item": _written(lambda mask: mask.__setitem__((slice(None), slice(0, 5)), True)),
    "slice": _written(lambda mask: mask[:5, :7].fill_(True)),
    "view": _written(lambda mask: mask[None].masked_fill_(torch.arange(S) < 3, True)),
    "row": _written(lambda mask: mask[:, 0].zero_()),
    "transposed": _written(lambda mask: mask.transpose(0, 1).fill_(True)),
    "detached": _written(lambda mask: mask.detach().fill_(True)),
    "out": _written(lambda mask: torch.logical_not(mask, out=mask)),
    "indices": lambda: torch.where(_causal()[1]),
    "device": lambda: (torch.tensor(_causal()[1].to("meta").is_meta),),
    "between attentions": _trained,
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_reaches_what_shares_memory_in_torch_and_nothing_else(kind: str) -> None:
    wanted = WRITES[kind]()
    with RecipeMode():
        made = WRITES[kind]()
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one + 0, other + 0)


def test_a_tensor_with_a_gradient_or_no_growth_stays_a_tensor() -> None:
    x, place = torch.randn(S, S), torch.arange(S)
    bias = torch.randn(S, requires_grad=True)
    with RecipeMode():
        assert type(x * 2) is type(x + place) is type(bias[:, None] + place) is Tensor


@pytest.mark.parametrize("layout", ["one rank", "cp2"])
@pytest.mark.parametrize("form", ["packed", wide("left"), wide("right")])
def test_packed_and_padded_batches_train_as_one_process(form: str, layout: str) -> None:
    parallel = {"data": 1} | ({"context": 2} if layout == "cp2" else {})
    result = verify(llama, config_of(parallel, 2), batches_of(form), threads=2 if layout == "cp2" else 1)
    assert result is not None and result.holds(), str(result)


@pytest.mark.parametrize(
    ("ranks", "method"), [(1, "auto"), (2, "gather"), *(wide(2, each) for each in ("ring", "need", "heads"))]
)
def test_no_mask_is_made_whole(ranks: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest part of a mask has a block of rows."""
    parts, read = list[Any](), TensorRecipe.box

    def boxed(recipe: TensorRecipe, wanted: Any) -> Tensor:
        made = read(recipe, wanted)
        if recipe.ndim > 1 and recipe.shape[-1] == 36 and recipe.shape[-2] > 1:
            parts.append(tuple(made.shape))
        return made

    def train(world: Any) -> float:
        parallel = {"data": 1, "context": {"size": ranks, "method": method}}
        with engine.initialize(llama(), config_of(parallel, 0), world=world) as eng:
            return eng.train_batch(batches_of("packed")[0]).loss

    monkeypatch.setattr(TensorRecipe, "box", boxed)
    whole, make = list[Any](), TensorRecipe.whole

    def made(recipe: TensorRecipe) -> Tensor:
        whole.append(tuple(recipe.shape))
        return make(recipe)

    monkeypatch.setattr(TensorRecipe, "whole", made)
    assert all(run_thread_ranks(ranks, train))
    assert parts and max(shape[-2] * shape[-1] for shape in parts) <= 256
    assert all(shape[-2] * 36 <= 256 for shape in whole if len(shape) > 1 and shape[-1] == 36), whole


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "method"), [(1, "auto"), (2, "gather"), (2, "ring"), (2, "need"), (4, "gather")])
def test_live_storage_of_packed_sequences_grows_as_their_length(
    ranks: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    shorter, longer = (max(run_thread_ranks(ranks, partial(_peak, length, ranks, method))) for length in (8192, 16384))
    assert longer < 2.2 * shorter, (shorter, longer)
    assert longer < 16384**2 // ranks, "bytes of the rows of one mask"


def _peak(length: int, ranks: int, method: str, world: World) -> int:
    settings = config_of({"data": 1, "context": {"size": ranks, "method": method}}, 0) | {"train_batch_size": 1}
    with engine.initialize(llama(), settings, world=world) as eng:
        place = torch.arange(length)
        ids = place[None] % 61
        batch = {"input_ids": ids, "labels": ids, "position_ids": (place % 700)[None]}
        eng.train_batch({name: x[:, :64] for name, x in batch.items()})
        live = LiveStorages()
        with live:
            eng.train_batch(batch)
        return live.peak


@pytest.mark.parametrize("restart", [None, 3])
def test_the_host_answers_if_positions_hold_several_documents(restart: int | None) -> None:
    """On the meta device, whose tensors answer nothing; transformers asks this in each forward."""
    from transformers.masking_utils import find_packed_sequence_indices

    with RecipeMode(HostTwins()):
        places = (torch.arange(8, device="meta") + 0).unsqueeze(0)
        if restart is not None:
            places = torch.where(places < restart, places, places - restart)
        found = find_packed_sequence_indices(places.expand(2, -1))
    assert (found is None) is (restart is None)


def test_the_host_answers_nothing_about_a_tensor_that_code_has_written() -> None:
    with RecipeMode(HostTwins()):
        places = torch.arange(4, device="meta")
        assert (places == 0).any()
        head = places[:1]
        places[1:].fill_(7)
        with pytest.raises((RuntimeError, NotImplementedError)):
            bool((head == 0).any())
        given = torch.ones(4, dtype=torch.int64, device="meta")
        with pytest.raises((RuntimeError, NotImplementedError)):
            bool((given + torch.arange(4, device="meta") == 0).all())
