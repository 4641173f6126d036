"""Products of rows that travel in pieces, against gathering, multiplying and scattering; ranks are threads."""

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.parallel.comm.comm import Pending
from engine.parallel.tensor.collectives import COLUMN_INPUTS, ROW_OUTPUTS, gather_to, scatter_from
from engine.parallel.tensor.overlap import chunked_matmul as overlap
from engine.parallel.tensor.overlap import moves
from engine.parallel.tensor.overlap.chunked_matmul import Pieced, choose_pieces, gather_multiply, multiply_scatter
from engine.parallel.tensor.thread_ranks import SimulatedAxis, run_tensor_ranks
from engine.parallel.tensor.tp_axis import Expected, Overlap, TensorAxis

SIZE, ROWS, IN, OUT = 2, 8, 6, 10
Results = dict[str, Tensor]


def drawn(*shape: int, seed: int, whole_numbers: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if whole_numbers:
        return torch.randint(-4, 5, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


class Column:
    """x [.., S/T, I] -> y [.., S, O], by gathering first, or in pieces; a second layer shares the gathered x."""

    label = COLUMN_INPUTS

    def __init__(self, axis: TensorAxis, exact: bool, bias: bool, transposed: bool, lead: tuple[int, ...]) -> None:
        draw = partial(drawn, whole_numbers=exact)
        x = draw(*lead, ROWS, IN, seed=1).chunk(axis.size, -2)[axis.index]
        shape = (IN, OUT) if transposed else (OUT, IN)
        self.x = x.clone().requires_grad_()
        self.weight = draw(*shape, seed=2 + axis.index).requires_grad_()
        self.other = draw(OUT, IN, seed=8 + axis.index).requires_grad_()
        self.bias = draw(OUT, seed=4).requires_grad_() if bias else None
        self.dy = draw(*lead, ROWS, OUT, seed=5 + axis.index)
        self.axis, self.transposed = axis, transposed

    def plain(self) -> Tensor:
        whole = gather_to(self.x, self.axis, -2, self.label)
        weight = self.weight.t() if self.transposed else self.weight
        return nn.functional.linear(whole, weight, self.bias) + nn.functional.linear(whole, self.other)

    def pieces(self, pieced: Pieced) -> Tensor:
        y, whole = gather_multiply(self.x, self.weight, self.bias, pieced)
        return y + nn.functional.linear(whole, self.other)

    def results(self, y: Tensor) -> Results:
        y.backward(self.dy.to(y.dtype))  # type: ignore[no-untyped-call]
        found = {"y": y.detach(), "x": self.x.grad, "weight": self.weight.grad, "other": self.other.grad}
        if self.bias is not None:
            found["bias"] = self.bias.grad
        return {name: tensor for name, tensor in found.items() if tensor is not None}


class Row(Column):
    """x [.., S, P] -> y [.., S/T, O]."""

    label = ROW_OUTPUTS

    def __init__(self, axis: TensorAxis, exact: bool, bias: bool, transposed: bool, lead: tuple[int, ...]) -> None:
        super().__init__(axis, exact, False, transposed, lead)
        self.x = drawn(*lead, ROWS, IN, seed=20 + axis.index, whole_numbers=exact).requires_grad_()
        self.dy = drawn(*lead, ROWS, OUT, seed=5, whole_numbers=exact).chunk(axis.size, -2)[axis.index]

    def plain(self) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        return scatter_from(nn.functional.linear(self.x, weight), self.axis, -2, self.label)

    def pieces(self, pieced: Pieced) -> Tensor:
        return multiply_scatter(self.x, self.weight, pieced)


Run = Callable[[Callable[[], Tensor]], Tensor]


def plainly(function: Callable[[], Tensor]) -> Tensor:
    return function()


def recomputed(function: Callable[[], Tensor]) -> Tensor:
    return checkpoint(function, use_reentrant=False)  # type: ignore[no-any-return]


def under_autocast(function: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


def both(kind: type[Column], make: Callable[[type[Column], TensorAxis], Column], run: Run, **given: Any) -> list[Any]:
    """By rank: (in pieces, plain)."""

    def body(axis: TensorAxis) -> tuple[Results, Results]:
        one, other = make(kind, axis), make(kind, axis)
        pieced = Pieced(axis, kind.label, transposed=one.transposed, **given)
        return one.results(run(lambda: one.pieces(pieced))), other.results(run(other.plain))

    return run_tensor_ranks(SIZE, body)


@pytest.mark.parametrize("kind", [Column, Row])
@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_whole_numbers_come_out_exactly(kind: type[Column], pieces: int, lead: tuple[int, ...]) -> None:
    for transposed in (False, True):
        make = lambda kind, axis: kind(axis, True, True, transposed, lead)  # noqa: B023, E731
        for found, expected in both(kind, make, plainly, pieces=pieces):
            assert found.keys() == expected.keys()
            for name in found:
                assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("kind", [Column, Row])
@pytest.mark.parametrize("run", [plainly, recomputed, under_autocast])
def test_results_are_those_of_the_plain_form(kind: type[Column], run: Run) -> None:
    make = lambda kind, axis: kind(axis, False, True, False, (3,))  # noqa: E731
    bound = 1e-2 if run is under_autocast else 1e-6
    for pieces in (1, 2):
        for found, expected in both(kind, make, run, pieces=pieces):
            for name in expected:
                assert found[name].dtype == expected[name].dtype
                deviation = (found[name] - expected[name]).abs().max() / expected[name].abs().max()
                assert float(deviation) <= bound, name


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """Products and weight gradients of each rank's thread."""
    found: dict[int, list[str]] = defaultdict(list)

    def noted(plain: Callable[..., Any], short: str, *given: Any) -> Any:
        found[threading.get_ident()].append(short)
        return plain(*given)

    for module, name, short in ((moves, "_product", "product"), (overlap, "weight_gradient", "dW")):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name), short))
    return found


def watch(axis: TensorAxis, events: list[str]) -> None:
    """Note where collectives start and end."""

    def noted(start: Callable[..., Any], short: str) -> Callable[..., Any]:
        def started(tensor: Tensor, label: str) -> Any:
            result, pending = start(tensor, label)
            events.append(f"start {short}")

            def wait() -> None:
                pending.wait()
                events.append(f"end {short}")

            return result, Pending(wait)

        return started

    for name in ("gather", "scatter"):
        method = {"gather": "start_all_gather", "scatter": "start_reduce_scatter"}[name]
        setattr(axis, method, noted(getattr(axis, method), name))


def order(kind: type[Column], events: dict[int, list[str]], **given: Any) -> tuple[list[str], list[str]]:
    """Of forward and backward, the same on all ranks."""

    def body(axis: TensorAxis) -> tuple[list[str], list[str]]:
        mine = events[threading.get_ident()]
        mine.clear()
        watch(axis, mine)
        column = kind(axis, True, False, False, ())
        pieced = Pieced(axis, kind.label, **given)
        if kind is Row:
            y = multiply_scatter(column.x, column.weight, pieced)
        else:
            y, _ = gather_multiply(column.x, column.weight, None, pieced)
        forward = mine.copy()
        mine.clear()
        y.sum().backward()  # type: ignore[no-untyped-call]
        return forward, mine.copy()

    first, *others = run_tensor_ranks(SIZE, body)
    assert all(other == first for other in others)
    return first


GATHERED = ["start gather", "start gather", "end gather", "product", "end gather", "product"]
SCATTERED = ["product", "start scatter", "product", "start scatter"]
ENDS = ["end scatter"] * 2


def test_a_piece_travels_while_another_is_multiplied(events: dict[int, list[str]]) -> None:
    assert order(Column, events, pieces=2) == (GATHERED, [*SCATTERED, "dW", *ENDS])
    assert order(Row, events, pieces=2) == ([*SCATTERED, *ENDS], [*GATHERED, "dW"])


def test_one_piece_is_the_plain_form(events: dict[int, list[str]]) -> None:
    for kind in (Column, Row):
        assert order(kind, events) == order(kind, events, pieces=1)
    assert order(Row, events)[0] == ["product", "start scatter", "end scatter"]


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_is_frozen_is_left_out(frozen: str) -> None:
    def body(axis: TensorAxis, kind: type[Column]) -> None:
        one, other = kind(axis, True, True, False, ()), kind(axis, True, True, False, ())
        for column in (one, other):
            tensor = getattr(column, frozen)
            if tensor is not None:
                tensor.requires_grad_(False)
        found, expected = one.results(one.pieces(Pieced(axis, kind.label, 2))), other.results(other.plain())
        assert found.keys() == expected.keys() and (frozen not in found)
        assert all(torch.equal(found[name], expected[name]) for name in found)

    for kind in (Column, Row):
        run_tensor_ranks(SIZE, partial(body, kind=kind))


def test_pieces_are_chosen_by_size_and_divide_the_rows() -> None:
    def body(axis: TensorAxis) -> list[int]:
        chosen = [choose_pieces(8, 1 << 30, "cpu", axis)]
        axis.overlap = Overlap(frozenset({"cpu"}), 100)
        chosen += [choose_pieces(8, size, "cpu", axis) for size in (100, 199, 200, 399, 400, 10_000)]
        chosen += [choose_pieces(rows, 10_000, "cpu", axis) for rows in (6, 7)]
        with axis.dry_run():
            chosen.append(choose_pieces(8, 10_000, "cpu", axis))
        return chosen

    assert run_tensor_ranks(SIZE, body) == [[1, 1, 1, 2, 2, 4, 4, 3, 1, 1]] * SIZE


def test_what_cannot_be_cut_is_refused_before_anything_is_sent() -> None:
    def body(axis: TensorAxis) -> None:
        weight = torch.zeros(OUT, IN)
        message = "3 pieces were requested of the 4 rows of a tensor rank, but 3 does not divide 4"
        with pytest.raises(EngineError, match=message):
            gather_multiply(torch.zeros(4, IN), weight, None, Pieced(axis, COLUMN_INPUTS, 3))
        with pytest.raises(EngineError, match=message):
            multiply_scatter(torch.zeros(4 * SIZE, IN), weight, Pieced(axis, ROW_OUTPUTS, 3))
        with pytest.raises(EngineError, match=r"dim -2 of a tensor of shape \[7, 6\] is to be sharded evenly"):
            multiply_scatter(torch.zeros(7, IN), weight, Pieced(axis, ROW_OUTPUTS))
        assert isinstance(axis, SimulatedAxis) and not axis.called

    run_tensor_ranks(SIZE, body)


def test_second_derivatives_are_refused() -> None:
    def body(axis: TensorAxis) -> None:
        for kind in (Column, Row):
            column = kind(axis, True, False, False, ())
            y = column.pieces(Pieced(axis, kind.label))
            with pytest.raises(EngineError, match="first derivatives only"):
                torch.autograd.grad(y.square().sum(), column.x, create_graph=True)

    run_tensor_ranks(SIZE, body)


def test_a_dry_run_has_the_shapes_and_tells_what_will_be_sent() -> None:
    def body(axis: TensorAxis) -> None:
        told: list[Expected] = []
        axis.listener = lambda what, _: told.append(what)
        part, x = torch.zeros(3, 4, IN, requires_grad=True), torch.zeros(3, 8, IN, requires_grad=True)
        weight, size = torch.zeros(OUT, IN, requires_grad=True), 3 * 8 * 4
        with axis.dry_run():
            y, whole = gather_multiply(part, weight, None, Pieced(axis, COLUMN_INPUTS, 2))
            assert y.shape == (3, 8, OUT) and whole.shape == (3, 8, IN)
            kinds = [("all_gather", False), ("reduce_scatter", True)]
            assert sorted(told) == [(op, COLUMN_INPUTS, size * IN, backward) for op, backward in kinds]
            told.clear()
            y = multiply_scatter(x, weight, Pieced(axis, ROW_OUTPUTS, 2))
            assert y.shape == (3, 4, OUT)
            kinds = [("all_gather", True), ("reduce_scatter", False)]
            assert sorted(told) == [(op, ROW_OUTPUTS, size * OUT, backward) for op, backward in kinds]
            y.add_(1).sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None and x.grad.shape == x.shape
        assert isinstance(axis, SimulatedAxis) and not axis.called

    run_tensor_ranks(SIZE, body)
