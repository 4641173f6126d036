"""Collectives along a dim: what they give, what comes back, what is told of it; ranks are threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.comm.comm import Pending
from engine.parallel.tensor.collectives import copy_to, gather_to, gather_whole, reduce_from, scatter_from, slice_of
from engine.parallel.tensor.thread_ranks import SimulatedAxis, run_tensor_ranks
from engine.parallel.tensor.tp_axis import Expected, TensorAxis

Collective = Callable[..., Tensor]

SHAPE = (4, 8, 12)
SIZES = [2, 4]
DIMS = [-2, -1, 0]


def whole_of(seed: int) -> Tensor:
    """Small whole numbers, so that sums are exact in every order."""
    return torch.randint(-9, 9, SHAPE, generator=torch.Generator().manual_seed(seed)).double()


def run(size: int, function: Collective, given: list[Tensor], grads: list[Tensor], dim: int) -> list[list[Tensor]]:
    """By rank: the result for its tensor, the gradient of that tensor for its gradient of the result."""

    def body(axis: TensorAxis) -> list[Tensor]:
        x, grad = given[axis.index].clone().requires_grad_(), grads[axis.index]
        before = grad.clone(), x.detach().clone()
        y = function(x, axis, dim, "here")
        y.backward(grad)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert torch.equal(grad, before[0]) and torch.equal(x, before[1]), "what others may read is left alone"
        assert isinstance(axis, SimulatedAxis) and all(call.label == "here" for call in axis.called)
        with torch.no_grad():
            assert torch.equal(function(x, axis, dim, "here"), y)
        assert y.is_contiguous()
        y.detach().add_(1)
        return [y.detach() - 1, x.grad]

    return run_tensor_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_f_gathers_and_sums_gradients_into_parts(size: int, dim: int) -> None:
    whole, grads = whole_of(1), [whole_of(10 + rank) for rank in range(size)]
    summed = torch.stack(grads).sum(0).chunk(size, dim)
    for rank, found in enumerate(run(size, gather_to, list(whole.chunk(size, dim)), grads, dim)):
        assert torch.equal(found[0], whole) and torch.equal(found[1], summed[rank])


@pytest.mark.parametrize("leaf", [True, False])
def test_a_sum_is_made_in_place_unless_autograd_begins_there(leaf: bool) -> None:
    """What another pipeline stage has sent is a leaf."""

    def body(axis: TensorAxis) -> tuple[bool, bool, bool]:
        given = whole_of(axis.index).requires_grad_()
        x = given if leaf else given * 1
        y = reduce_from(x, axis)
        y.sum().backward()  # type: ignore[no-untyped-call]
        right = torch.equal(y, whole_of(0) + whole_of(1))
        assert given.grad is not None
        return right, bool((given.grad == 1).all()), y.data_ptr() == x.data_ptr()

    assert run_tensor_ranks(2, body) == [(True, True, not leaf)] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_g_sums_into_parts_and_gathers_gradients(size: int, dim: int) -> None:
    given, grad = [whole_of(rank) for rank in range(size)], whole_of(20)
    summed = torch.stack(given).sum(0).chunk(size, dim)
    for rank, found in enumerate(run(size, scatter_from, given, list(grad.chunk(size, dim)), dim)):
        assert torch.equal(found[0], summed[rank]) and torch.equal(found[1], grad)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_entering_takes_a_slice_and_gathers_gradients(size: int, dim: int) -> None:
    whole, grad = whole_of(1), whole_of(2)
    for rank, found in enumerate(run(size, slice_of, [whole] * size, list(grad.chunk(size, dim)), dim)):
        assert torch.equal(found[0], whole.chunk(size, dim)[rank]) and torch.equal(found[1], grad)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_leaving_gathers_and_takes_a_slice_of_the_gradient(size: int, dim: int) -> None:
    whole, grad = whole_of(1), whole_of(2)
    for rank, found in enumerate(run(size, gather_whole, list(whole.chunk(size, dim)), [grad] * size, dim)):
        assert torch.equal(found[0], whole) and torch.equal(found[1], grad.chunk(size, dim)[rank])


def test_what_is_owned_is_not_copied_first() -> None:
    def body(axis: TensorAxis) -> list[bool]:
        x = torch.ones(4, 3)  # cut along its first dim it is already laid out by rank
        sent: list[int] = []
        start = axis.start_reduce_scatter

        def noted(full: Tensor, label: str) -> tuple[Tensor, Pending]:
            sent.append(full.data_ptr())
            return start(full, label)

        axis.start_reduce_scatter = noted  # type: ignore[method-assign]
        scatter_from(x, axis, 0, owned=True)
        scatter_from(x, axis, 0)
        return [place == x.data_ptr() for place in sent]

    assert run_tensor_ranks(2, body) == [[True, False]] * 2


@pytest.mark.parametrize("owned", [False, True])
def test_a_gradient_that_others_read_is_copied_before_its_sum(owned: bool) -> None:
    """A residual beside a column layer may be given the same gradient tensor."""
    grads = [whole_of(30), whole_of(31)]

    def body(axis: TensorAxis) -> tuple[bool, bool]:
        x, grad = whole_of(1).requires_grad_(), grads[axis.index].clone()
        copy_to(x, axis, owned).backward(grad)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return torch.equal(x.grad, grads[0] + grads[1]), torch.equal(grad, grads[axis.index])

    assert run_tensor_ranks(2, body) == [(True, not owned)] * 2


@pytest.mark.parametrize("function", [scatter_from, slice_of])
def test_parts_are_equal_or_refused_before_anything_is_sent(function: Collective) -> None:
    def body(axis: TensorAxis) -> str:
        try:
            function(torch.zeros(2, 7, 3), axis, -2)
        except EngineError as error:
            assert isinstance(axis, SimulatedAxis) and not axis.called
            return str(error)
        return ""

    message = (
        "dim -2 of a tensor of shape [2, 7, 3] is to be sharded evenly over 2 tensor ranks, but 2 does not divide 7; "
        "make it a multiple of 2, for example by padding."
    )
    assert run_tensor_ranks(2, body) == [message] * 2


@pytest.mark.parametrize("function", [gather_to, scatter_from, slice_of])
def test_second_derivatives_are_refused(function: Collective) -> None:
    def body(axis: TensorAxis) -> None:
        x = torch.zeros(2, 4, 3, requires_grad=True)
        with pytest.raises(EngineError, match="first derivatives only"):
            torch.autograd.grad(function(x, axis, -2).square().sum(), x, create_graph=True)

    run_tensor_ranks(2, body)


DRY = {
    gather_to: ((2, 8, 3), [("all_gather", False), ("reduce_scatter", True)], 2 * 8 * 3 * 4),
    scatter_from: ((2, 2, 3), [("all_gather", True), ("reduce_scatter", False)], 2 * 4 * 3 * 4),
    slice_of: ((2, 2, 3), [("all_gather", True)], 2 * 4 * 3 * 4),
    gather_whole: ((2, 8, 3), [("all_gather", False)], 2 * 8 * 3 * 4),
}


@pytest.mark.parametrize("function", DRY)
def test_a_dry_run_has_the_shapes_and_tells_what_will_be_sent(function: Collective) -> None:
    shape, calls, size = DRY[function]

    def body(axis: TensorAxis) -> None:
        told: list[Expected] = []
        axis.listener = lambda what, _: told.append(what)
        with axis.dry_run():
            x = torch.ones(2, 4, 3, requires_grad=True)
            y = function(x, axis, -2, "here")
            assert y.shape == shape
            y.add_(1)  # as a bias is
            assert sorted(told) == [(op, "here", size, backward) for op, backward in calls]
            told.clear()
            with torch.no_grad():
                function(x, axis, -2, "here")
            assert sorted(told) == [(op, "here", size, False) for op, backward in calls if not backward]
            y.sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None and x.grad.shape == x.shape
        assert isinstance(axis, SimulatedAxis) and not axis.called

    run_tensor_ranks(2, body)


def test_the_sum_that_backward_makes_is_told_of() -> None:
    def body(axis: TensorAxis) -> list[Expected]:
        told: list[Expected] = []
        axis.listener = lambda what, _: told.append(what)
        with axis.dry_run():
            copy_to(torch.ones(2, 3), axis)
            copy_to(torch.ones(2, 3, requires_grad=True), axis)
        return told

    assert run_tensor_ranks(2, body) == [[("all_reduce", "column inputs", 24, True)]] * 2


def test_gathered_parts_of_one_row_are_contiguous() -> None:
    found = run_tensor_ranks(4, lambda axis: gather_to(torch.ones(3, 1, 2), axis, 1))
    assert all(tensor.is_contiguous() and tensor.shape == (3, 4, 2) for tensor in found), "code may say view(-1, 2)"
