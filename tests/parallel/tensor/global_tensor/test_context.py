"""What views share and what they are in trees: one copy for one tensor, nothing kept too long, equal specs."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, show_parameter
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import Expected, TensorAxis
from tests.parallel.tensor.global_tensor.rig import normal

linear: Callable[..., Any] = functional.linear


def test_a_view_in_a_tree_is_its_part() -> None:
    def body(axis: TensorAxis) -> None:
        views = global_context(axis)
        view = GlobalTensor(torch.ones(2, 6), (2, 12), (None, Index.even_blocks(12, 2)), views)
        leaves, spec = tree_flatten({"a": [view, 3]})
        assert type(leaves[0]) is Tensor and leaves[0] is view.local and leaves[1] == 3
        again = tree_unflatten([leaves[0] * 2, 3], spec)["a"][0]
        assert (
            isinstance(again, GlobalTensor)
            and again.shape == (2, 12)
            and again.sets == view.sets
            and again.views is views
        )
        same = GlobalTensor(torch.zeros(2, 6), (2, 12), (None, Index.even_blocks(12, 2)), views)
        assert tree_flatten({"a": [same, 3]})[1] == spec
        assert tree_flatten({"a": [GlobalTensor(torch.zeros(2, 6), (2, 6), (None, None), views), 3]})[1] != spec
        assert tree_map(lambda leaf: leaf.dtype, view) is torch.float32

    run_tensor_ranks(2, body)


def test_a_plain_tensor_enters_once_until_its_gradient_has_passed() -> None:
    def body(axis: TensorAxis) -> list[int]:
        views = global_context(axis)
        index = Index.even_blocks(12, 2)
        w = show_parameter(nn.Parameter(torch.randn(6, 4)), (12, 4), (index, None), views)
        x = torch.randn(3, 4, requires_grad=True)
        counts = []
        out = linear(x, w) + linear(x, w)
        torch.autograd.backward(out.local.sum())
        counts.append(len(axis.called))  # type: ignore[attr-defined]
        assert not views._entered
        torch.autograd.backward((linear(x, w) + linear(x, w)).local.sum())
        counts.append(len(axis.called))  # type: ignore[attr-defined]
        first = linear(x, w)
        views.clear()
        torch.autograd.backward((first + linear(x, w)).local.sum())
        counts.append(len(axis.called))  # type: ignore[attr-defined]
        with torch.no_grad():
            linear(x, w)
        assert not views._entered
        return counts

    assert run_tensor_ranks(2, body) == [[1, 2, 4]] * 2


def test_nothing_is_kept_once_the_code_lets_go() -> None:
    def body(axis: TensorAxis) -> None:
        views = global_context(axis, sequence=True)
        index = Index.even_blocks(8, 2)
        local = torch.randn(3, 4, 5, requires_grad=True)
        x = GlobalTensor(local * 1, (3, 8, 5), (None, index, None), views)
        w = show_parameter(nn.Parameter(torch.randn(5, 5)), (10, 5), (Index.even_blocks(10, 2), None), views)
        y = linear(x, w)
        held = [weakref.ref(x.local), weakref.ref(y.local)]
        del x, y
        views.clear()
        gc.collect()
        assert all(ref() is None for ref in held)

    run_tensor_ranks(2, body)


def test_a_parameter_is_read_when_it_is_used() -> None:
    def body(axis: TensorAxis) -> None:
        views = global_context(axis)
        parameter = nn.Parameter(torch.zeros(0))
        w = show_parameter(parameter, (12, 4), (Index.even_blocks(12, 2), None), views)
        x: Any = normal(3, 4).float()
        for value in (1.0, 2.0):
            parameter.data = torch.full((6, 4), value)
            out = linear(x, w)
            assert torch.equal(full(out, "test"), linear(x, torch.full((12, 4), value)))
        assert w.local is parameter and views.gathers == {"test": 2}

    run_tensor_ranks(2, body)


def test_a_parameter_that_plain_code_uses_too_is_summed_at_each_use() -> None:
    def body(axis: TensorAxis) -> tuple[Tensor, int]:
        views = global_context(axis)
        weight = nn.Parameter(torch.arange(12.0).view(4, 3))
        views.equal.add(weight)
        x = GlobalTensor(torch.ones(2, 3), (4, 3), (Index.even_blocks(4, 2), None), views)
        out = full(linear(x, weight), "test").sum() + linear(torch.ones(4, 3), weight).sum()
        torch.autograd.backward(out)
        assert not views.partial and weight.grad is not None
        return weight.grad, len(axis.called)  # type: ignore[attr-defined]

    for grad, calls in run_tensor_ranks(2, body):
        assert torch.equal(grad, torch.full((4, 3), 8.0)) and calls == 2


def test_a_dry_run_tells_all_collectives_and_makes_none() -> None:
    def body(axis: TensorAxis) -> list[Expected]:
        seen: list[Expected] = []
        views = global_context(axis, sequence=True)
        axis.listener = lambda what, _: seen.append(what)
        index = Index.even_blocks(8, 2)
        with axis.dry_run():
            x = GlobalTensor(
                torch.empty(3, 4, 6, device="meta", requires_grad=True), (3, 8, 6), (None, index, None), views
            )
            up = nn.Parameter(torch.empty(6, 6, device="meta"))
            down = nn.Parameter(torch.empty(6, 6, device="meta"))
            columns = Index.even_blocks(12, 2)
            h = functional.dropout(linear(x, show_parameter(up, (12, 6), (columns, None), views)), 0.5)
            y = x + linear(h, show_parameter(down, (6, 12), (None, columns), views))
            assert y.shape == (3, 8, 6) and y.local.shape == (3, 4, 6)
        assert not axis.called  # type: ignore[attr-defined]
        return seen

    size = 3 * 8 * 6 * 4
    expected = {
        ("all_gather", "column inputs", size, False), ("reduce_scatter", "column inputs", size, True),
        ("reduce_scatter", "row outputs", size, False), ("all_gather", "row outputs", size, True),
    }  # fmt: skip
    for seen in run_tensor_ranks(2, body):
        assert set(seen) == expected and len(seen) == 4


def test_one_rank_alone() -> None:
    def body(axis: TensorAxis) -> None:
        views = global_context(axis, sequence=True)
        x = GlobalTensor(torch.randn(2, 4, requires_grad=True), (2, 4), (None, None), views)
        out = torch.fft.fft(linear(torch.relu(x), torch.randn(3, 4))).real
        assert type(out) is Tensor
        torch.autograd.backward(out.sum())

    run_tensor_ranks(1, body)


def test_autocast_reaches_the_parts() -> None:
    def body(axis: TensorAxis) -> None:
        views = global_context(axis)
        index = Index.even_blocks(12, 2)
        x = torch.randn(3, 4, requires_grad=True)
        w = show_parameter(nn.Parameter(torch.randn(6, 4)), (12, 4), (index, None), views)
        v = show_parameter(nn.Parameter(torch.randn(4, 6)), (4, 12), (None, index), views)
        bias = nn.Parameter(torch.randn(4))
        with torch.autocast("cpu", torch.bfloat16):
            h = linear(x, w)
            assert h.dtype is torch.bfloat16 and isinstance(h, GlobalTensor)
            assert functional.layer_norm(h, (12,)).dtype is functional.layer_norm(h.local.detach(), (6,)).dtype
            y = linear(h, v, bias)
            assert y.dtype is torch.bfloat16

    run_tensor_ranks(2, body)
