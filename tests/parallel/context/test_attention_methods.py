"""Attention over keys of all ranks by each method, against one process, in fp64."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from engine.parallel.context.choose import AttentionRates, AttentionSizes, Method, choose_method, costs_of
from engine.parallel.context.cuts import contiguous, zigzag
from engine.parallel.context.sequences import ContextOfSequences
from engine.parallel.context.sight import needed_keys
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.parallel.tensor.thread_ranks import SimulatedAxis, run_tensor_ranks
from engine.parallel.tensor.tp_axis import DryAxis, Expected, ExpectedRows, TensorAxis

METHODS: tuple[Method, ...] = get_args(Method)
ROWS, HEADS, LENGTH, WIDTH = 2, 4, 37, 6


def _places(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    places = torch.arange(length)
    return places[:, None], places[None, :]


def _documents(length: int = LENGTH) -> Tensor:
    """Returns the mask of packed documents, other ones in each row."""
    query, key = _places(length)
    starts = torch.tensor([[0, 5, 6, 20], [0, 11, 12, 30]])
    number = (torch.arange(length)[None, :, None] >= starts[:, None, :]).sum(-1)
    return (number[:, None, :, None] == number[:, None, None, :]) & (query >= key)


def _padded() -> Tensor:
    query, key = _places()
    first = torch.tensor([9, 0])[:, None, None, None]
    return (query >= key) & (key >= first)  # queries of the padding see no key


def _additive(mask: Tensor, hidden: float = -math.inf) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, hidden)


def _distances() -> Tensor:
    query, key = _places()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]
    return _additive(query >= key) - slopes * (query - key).clamp(min=0)


def _masks() -> dict[str, Any]:
    query, key = _places()
    window = (query >= key) & (query - key < 6)
    return {
        "all keys": {},
        "causal": {"is_causal": True},
        "window": {"attn_mask": window},
        "documents": {"attn_mask": _documents()},
        "padding": {"attn_mask": _padded()},
        "keys only": {"attn_mask": torch.arange(LENGTH)[None, None, None, :] < 30},
        "added": {"attn_mask": _additive(window)},
        "added, finite": {"attn_mask": _additive(_padded(), torch.finfo(torch.float64).min)},
        "of each head": {"attn_mask": _distances()},
        "scale": {"is_causal": True, "scale": 0.3},
    }


def _drawn(key_heads: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [
        torch.randn(ROWS, heads, LENGTH, width, dtype=torch.float64, generator=draw)
        for heads, width in ((HEADS, WIDTH), (key_heads, WIDTH), (key_heads, 4), (HEADS, 4))
    ]


def _part(full: Tensor, index: Index, rank: int) -> Tensor:
    return full.index_select(-2, torch.as_tensor(index.ranks[rank])).clone()


def _repeated(x: Tensor, times: int) -> Tensor:
    """Repeats key heads as models do."""
    rows, heads, length, width = x.shape
    return x[:, :, None].expand(rows, heads, times, length, width).reshape(rows, heads * times, length, width)


def _of_ranks(
    method: Any, key_heads: int, options: dict[str, Any], ranks: int = 4, cut: Callable[[int, int], Index] = zigzag
) -> tuple[list[Tensor], list[SimulatedAxis], ContextOfSequences]:
    """Returns output and gradients, joined over the ranks, and the axis of each rank."""
    *inputs, grad = _drawn(key_heads)
    index = cut(LENGTH, ranks)
    sets = (None, None, index, None)

    def body(axis: TensorAxis) -> tuple[list[Tensor], Any, ContextOfSequences]:
        context = ContextOfSequences(axis, method)
        local = [_part(x, index, axis.index).requires_grad_() for x in inputs]
        q, k, v = (GlobalTensor(x, tuple(y.shape), sets, context) for x, y in zip(local, inputs, strict=True))
        if key_heads != HEADS:
            k, v = (_repeated(x, HEADS // key_heads) for x in (k, v))  # type: ignore[assignment]
        out = functional.scaled_dot_product_attention(q, k, v, **options)
        assert type(out) is GlobalTensor and out.sets == sets
        torch.autograd.backward(out.local, _part(grad, index, axis.index))
        return [out.local.detach(), *(x.grad for x in local if x.grad is not None)], axis, context

    made = run_tensor_ranks(ranks, body)
    joined = []
    for parts in zip(*(each for each, _, _ in made), strict=True):
        whole = parts[0].new_empty((*parts[0].shape[:-2], LENGTH, parts[0].shape[-1]))
        for rank, part in enumerate(parts):
            whole[..., torch.as_tensor(index.ranks[rank]), :] = part
        joined.append(whole)
    return joined, [axis for _, axis, _ in made], made[0][2]


def _of_one(key_heads: int, options: dict[str, Any]) -> list[Tensor]:
    *inputs, grad = _drawn(key_heads)
    inputs = [x.requires_grad_() for x in inputs]
    q, k, v = inputs[0], *(x.repeat_interleave(HEADS // key_heads, 1) for x in inputs[1:])
    out = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.autograd.backward(out, grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", _masks())
def test_every_method_is_attention_of_one_process(method: Method, mask: str) -> None:
    options = _masks()[mask]
    found, _, context = _of_ranks(method, 2, options)
    assert [used for used, _ in context.attention.used] == [method]
    for own, one in zip(found, _of_one(2, options), strict=True):
        assert torch.allclose(own, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_and_key_heads(method: Method, key_heads: int, ranks: int) -> None:
    options = {"is_causal": True}
    found, _, context = _of_ranks(method, key_heads, options, ranks, contiguous if ranks == 2 else zigzag)
    gathered = method == "heads" and ranks == 3
    assert [used for used, _ in context.attention.used] == ["gather" if gathered else method]
    if gathered:
        assert "4 heads do not divide among 3 ranks" in context.attention.notes[0]
    for own, one in zip(found, _of_one(key_heads, options), strict=True):
        assert torch.allclose(own, one, rtol=1e-12, atol=1e-12)


def test_a_ring_is_a_gather_up_to_rounding() -> None:
    for options in ({"is_causal": True}, {"attn_mask": _documents()}):
        ring, gather = (_of_ranks(method, 2, options)[0] for method in ("ring", "gather"))
        for one, other in zip(ring, gather, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "padding", "keys only", "all keys", "added"])
def test_needed_keys_alone_are_sent(mask: str) -> None:
    options, index = _masks()[mask], zigzag(LENGTH, 4)
    _, axes, _ = _of_ranks("need", 2, options)
    query, key = _places()
    seen = options.get("attn_mask", query >= key if options else torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    seen = seen if seen.dtype is torch.bool else seen == 0
    seen = seen.expand(*seen.shape[:-2], LENGTH, LENGTH)
    a_key = ROWS * 2 * (WIDTH + 4)
    for rank, axis in enumerate(axes):
        wanted = received = 0
        for other in set(range(4)) - {rank}:
            for held in index.ranks[rank]:  # key by key
                wanted += bool(seen[..., torch.as_tensor(index.ranks[other]), held].any())
            for held in index.ranks[other]:
                received += bool(seen[..., torch.as_tensor(index.ranks[rank]), held].any())
        there, again, back = axis.sent["keys"], axis.sent["keys"], axis.sent["key gradients"]
        assert there + again == 2 * 2 * wanted * a_key and back == received * a_key


def _expected(method: Method, key_heads: int, ranks: int, length: int) -> list[Expected | ExpectedRows]:
    told: list[Expected | ExpectedRows] = []
    context = ContextOfSequences(DryAxis(ranks, lambda what, _: told.append(what)), method)
    index = zigzag(length, ranks)
    q, k, v = (
        GlobalTensor(
            torch.empty(ROWS, heads, length // ranks, WIDTH, device="meta", requires_grad=True),
            (ROWS, heads, length, WIDTH), (None, None, index, None), context,
        )
        for heads in (HEADS, key_heads, key_heads)
    )  # fmt: skip
    functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return told


def _planned(method: Method, key_heads: int, ranks: int, length: int) -> dict[str, int]:
    bytes_: dict[str, int] = {}
    for what in _expected(method, key_heads, ranks, length):
        way = "backward" if what.backward else "forward"
        size = what.sent[0] if isinstance(what, ExpectedRows) else what.bytes * (ranks - 1) // ranks
        bytes_[way] = bytes_.get(way, 0) + size
    return bytes_


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_planned_bytes_are_those_of_the_formulas(key_heads: int, ranks: int) -> None:
    length, element = 32, 4
    keys = 2 * ROWS * length * key_heads * WIDTH * (ranks - 1) // ranks * element
    for method in ("gather", "ring"):
        assert _planned(method, key_heads, ranks, length) == {"forward": keys, "backward": 2 * keys}
    served = max(1, key_heads // ranks)
    heads = 2 * ROWS * length * (HEADS // ranks + served) * WIDTH * (ranks - 1) // ranks * element
    assert _planned("heads", key_heads, ranks, length) == {"forward": heads, "backward": heads}
    form = AttentionSizes(ranks, ROWS, length, length, HEADS, key_heads, 2 * WIDTH, element, True)
    assert costs_of(form)["heads"].bytes == heads and costs_of(form)["gather"].bytes == keys


@pytest.mark.parametrize("key_heads", [4, 1])
def test_queries_keys_and_values_travel_to_the_ranks_of_their_heads_at_once(key_heads: int) -> None:
    told = _expected("heads", key_heads, 4, 32)
    assert [what.backward for what in told].count(False) == len(told) // 2 == 2
    _, axes, _ = _of_ranks("heads", key_heads, {"is_causal": True})
    assert all(len(axis.called) == 2 * len(told) for axis in axes), "of sizes and of elements"


@pytest.mark.parametrize("method", METHODS)
def test_a_document_reads_no_bit_of_another_one(method: Method) -> None:
    options = {"attn_mask": _documents()}
    before = _of_ranks(method, 2, options)[0]
    own = _drawn

    def changed(key_heads: int) -> list[Tensor]:
        q, k, v, grad = own(key_heads)
        for x in (q, k, v, grad):
            x[:, :, 20:] += 1.0  # a later document in the first row; in the second one, within a document
            x[1] -= 1.0
        return [q, k, v, grad]

    globals()["_drawn"] = changed
    try:
        after = _of_ranks(method, 2, options)[0]
    finally:
        globals()["_drawn"] = own
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[0, :, :20], other[0, :, :20])


@pytest.mark.parametrize("method", ["gather", "need", "ring"])
def test_nothing_of_the_full_length_is_stored_for_backward(method: Method) -> None:
    shapes: list[tuple[int, ...]] = []

    def note(saved: Tensor) -> Tensor:
        shapes.append(tuple(saved.shape))
        return saved

    index = zigzag(LENGTH, 2)

    def body(axis: TensorAxis) -> None:
        context = ContextOfSequences(axis, method)
        local = [_part(x, index, axis.index).requires_grad_() for x in _drawn(2)[:3]]
        q, k, v = (
            GlobalTensor(x, (*x.shape[:2], LENGTH, x.shape[3]), (None, None, index, None), context) for x in local
        )
        with saved_tensors_hooks(note, lambda saved: saved):
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    run_tensor_ranks(2, body)
    assert shapes and max(max(shape) for shape in shapes) < LENGTH


def test_a_write_to_repeated_heads_is_read() -> None:
    def body(axis: TensorAxis) -> Tensor:
        context, index = ContextOfSequences(axis, "gather"), zigzag(LENGTH, 2)
        q, k, v = (
            GlobalTensor(_part(x, index, axis.index), tuple(x.shape), (None, None, index, None), context)
            for x in _drawn(2)[:3]
        )
        keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        keys.mul_(2.0)
        out = functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
        assert type(out) is GlobalTensor
        return out.local

    q, k, v, _ = _drawn(2)
    wished = functional.scaled_dot_product_attention(q, _repeated(k, 2) * 2, _repeated(v, 2), is_causal=True)
    for rank, found in enumerate(run_tensor_ranks(2, body)):
        assert torch.allclose(found, _part(wished, zigzag(LENGTH, 2), rank), rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_that_is_written_between_two_attentions_is_read_again(method: Method) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = _places()
        mask = keys <= queries
        first = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask &= keys > queries - 5
        return first, functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    inputs, index = _drawn(HEADS)[:3], zigzag(LENGTH, 2)

    def body(axis: TensorAxis) -> bool:
        context = ContextOfSequences(axis, method)
        sets = (None, None, index, None)
        given = [GlobalTensor(_part(x, index, axis.index), tuple(x.shape), sets, context) for x in inputs]
        pairs = zip(attend(*given), attend(*inputs), strict=True)
        return all(torch.allclose(own.local, _part(one, index, axis.index)) for own, one in pairs)  # type: ignore[attr-defined]

    assert all(run_tensor_ranks(2, body))


def test_causal_queries_read_fewer_keys_that_every_rank_has() -> None:
    (q, k, v, _), index = _drawn(HEADS), zigzag(LENGTH, 2)
    k, v = k[:, :, :20], v[:, :, :20]

    def body(axis: TensorAxis) -> Tensor:
        sets, context = (None, None, index, None), ContextOfSequences(axis)
        own = GlobalTensor(_part(q, index, axis.index), tuple(q.shape), sets, context)
        made: Any = functional.scaled_dot_product_attention(own, k, v, is_causal=True)
        return made.local  # type: ignore[no-any-return]

    whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for rank, made in enumerate(run_tensor_ranks(2, body)):
        assert torch.allclose(made, _part(whole, index, rank))


def test_a_mask_without_values_names_no_needed_keys() -> None:
    index = zigzag(LENGTH, 2)
    assert needed_keys(index, LENGTH, False, torch.empty(LENGTH, LENGTH, dtype=torch.bool, device="meta")) is None
    causal = needed_keys(index, LENGTH, True, None)
    assert causal is not None and [runs.tolist() for runs in causal.runs] == [[[0, LENGTH]], [[0, 28]]]


def _form(**changed: Any) -> AttentionSizes:
    llama = {
        "ranks": 8, "rows": 1, "queries": 2**20, "keys": 2**20, "heads": 32, "key_heads": 8, "width": 256,
        "element": 2, "causal": True,
    }  # fmt: skip
    return AttentionSizes(**(llama | changed))


@pytest.mark.parametrize(
    ("changed", "limit", "method"),
    [
        ({}, 80 * 2**30 // 16, "ring"),  # a million tokens: compute hides the keys of another rank
        ({"queries": 4096, "keys": 4096}, None, "heads"),
        ({"queries": 64, "keys": 64, "ranks": 2}, None, "gather"),
        ({"queries": 64, "keys": 64, "heads": 20, "key_heads": 4}, None, "gather"),
        ({"queries": 65536, "keys": 65536, "sent": 10**6, "needed": 9000, "causal": False}, None, "need"),
        ({"queries": 4096, "keys": 4096, "ranks": 2}, 1, "ring"),
    ],
)
def test_the_chosen_method_has_the_least_exposed_time(changed: Any, limit: int | None, method: str) -> None:
    found, reason = choose_method(_form(**changed), limit)
    assert found == method and "exposed" in reason


@pytest.mark.parametrize(
    ("rates", "method"),
    [
        (AttentionRates(4e14, 5e10, 2e-5, "slow links"), "heads"),
        (AttentionRates(1e12, 5e10, 2e-5, "slow products"), "ring"),  # blocks hide the keys of the next rank
        (AttentionRates(4e14, 5e13, 2e-5, "fast links"), "gather"),  # the calls alone cost time
    ],
)
def test_the_rates_of_the_card_decide(rates: AttentionRates, method: str) -> None:
    found, reason = choose_method(_form(queries=4096, keys=4096), None, rates)
    assert found == method and reason.endswith(rates.source)


def test_attention_chooses_by_the_rates_of_its_context() -> None:
    index = zigzag(LENGTH, 2)

    def body(axis: TensorAxis) -> ContextOfSequences:
        context = ContextOfSequences(axis, "auto", rates=AttentionRates(1.0, 1.0, 0.0, "slow products"))
        q, k, v = (
            GlobalTensor(_part(x, index, axis.index), tuple(x.shape), (None, None, index, None), context)
            for x in _drawn(HEADS)[:3]
        )
        functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return context

    for context in run_tensor_ranks(2, body):
        assert [used for used, _ in context.attention.used] == ["ring"]
        assert context.attention.figures["ring"].endswith("slow products")


def test_a_rank_without_queries_of_a_document_needs_none_of_its_keys() -> None:
    index = contiguous(LENGTH, 3)
    needed = needed_keys(index, LENGTH, False, _documents())
    assert needed is not None
    assert all(np.isin(held, np.arange(LENGTH)).all() for held in needed.ranks)
    assert needed.counts[0] < LENGTH and needed.ranks[2].min() >= 11
