"""Plans of attention over context ranks: made once for all layers of a forward, and only copies that sums need."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from engine.parallel.context import choose, cuts, key_flow, methods, recut, sight
from engine.parallel.context.choose import Method
from engine.parallel.context.cuts import zigzag
from engine.parallel.context.rows.call_forms import SeenCall, SeenTensor, SequenceSize, flatten_leaves
from engine.parallel.context.sequences import ContextOfSequences
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis

RANKS, HEADS, LENGTH, WIDTH = 2, 2, 16, 8
PLANNING = {"boxes_of": (key_flow, recut), "choose_method": (methods, choose), "needed_keys": (methods, sight)}
PLANNING |= {"contiguous": (methods, cuts), "own_keys": (methods, key_flow)}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Number of planned things by thread, a rank."""
    counts: Counter[int] = Counter()

    def counted(plan: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[threading.get_ident()] += 1
            return plan(*args, **kwargs)

        return run

    for name, modules in PLANNING.items():
        made = counted(getattr(modules[-1], name))
        for module in modules:
            monkeypatch.setattr(module, name, made)
    return counts


def _documents(start: int) -> Tensor:
    places = torch.arange(LENGTH)
    number = (places >= start).int()
    return ((number[:, None] == number[None, :]) & (places[:, None] >= places[None, :]))[None, None]


def _layers(method: Any, masks: Sequence[Tensor | None], planned: Counter[int]) -> list[tuple[list[int], list[Tensor]]]:
    """Runs an attention for each mask on every rank; returns plans made before each, and outputs with gradients."""
    drawn = torch.randn(3, 1, HEADS, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    index = zigzag(LENGTH, RANKS)
    sets = (None, None, index, None)

    def body(axis: TensorAxis) -> tuple[list[int], list[Tensor]]:
        context = ContextOfSequences(axis, method)
        own, made, outs = torch.as_tensor(index.ranks[axis.index]), [], []
        for mask in masks:
            local = [x.index_select(-2, own).requires_grad_() for x in drawn]
            q, k, v = (GlobalTensor(x, tuple(drawn.shape[1:]), sets, context) for x in local)
            out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
            made.append(planned[threading.get_ident()])
            outs += [out.local.detach(), *torch.autograd.grad(out.local.square().sum(), local)]  # type: ignore[attr-defined]
        return made, outs

    return run_tensor_ranks(RANKS, body)


@pytest.mark.parametrize("method", ["auto", *get_args(Method)])
@pytest.mark.parametrize("masked", [False, True])
def test_layers_after_the_first_one_plan_nothing(method: str, masked: bool, planned: Counter[int]) -> None:
    mask = _documents(5) if masked else None
    for made, _ in _layers(method, [mask] * 3, planned):
        assert made[0] > 0 and made[2] == made[0]


@pytest.mark.parametrize("method", ["auto", "need"])
def test_each_mask_of_a_forward_has_its_own_plan(method: str, planned: Counter[int]) -> None:
    first, second = _documents(2), _documents(9)
    for (_, both), (_, one), (_, other) in zip(
        *(_layers(method, masks, planned) for masks in ([first, second], [first], [second])), strict=True
    ):
        for found, wanted in zip(both, [*one, *other], strict=True):
            assert torch.equal(found, wanted)


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Merges of log-sum-exps."""
    found: list[Any] = []
    merge = torch.logaddexp

    def noted(*args: Tensor) -> Tensor:
        found.append(args)
        return merge(*args)

    monkeypatch.setattr(torch, "logaddexp", noted)
    return found


@pytest.mark.parametrize(("method", "most"), [("heads", 0), ("gather", RANKS), ("ring", RANKS)])
def test_only_queries_with_several_blocks_are_merged(method: Method, most: int, merges: list[Any]) -> None:
    _layers(method, [None], Counter())
    assert len(merges) <= most * RANKS and (not most or merges)


def test_a_call_by_position_needs_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [SeenTensor((2, 8, 4), torch.float32), None]
    leaves, spec = flatten_leaves((tuple(torch.empty(0) for _ in shapes), {}))
    form = SequenceSize(2, 8).form_of(SeenCall(spec, tuple(shapes)))
    assert form is not None and form.positional and len(leaves) == 2
    monkeypatch.setattr(pytree, "tree_flatten", None)
    x = torch.zeros(2, 4, 4)
    assert form.match((x, None), {}) == [x, None]
    refused = [((x,), {}), ((x, 1), {}), ((x, x), {}), ((x, None), {"a": 1}), (([x], None), {}), ((x[0], None), {})]
    assert not any(form.match(args, kwargs) for args, kwargs in refused)
    assert form.call(lambda *given: given, [x, None]) == (x, None)
