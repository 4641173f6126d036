"""Blocks with lists of experts on thread ranks: asked twice, and equal to one process with all experts."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.experts.dispatch import AXIS, COMBINE, DISPATCH
from engine.parallel.experts.forms import ListedExperts, expert_bounds
from engine.parallel.experts.listed import share_listed
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.experts.moe import WIDTH, Always, Listed, on_expert_ranks

OWN = ("up.weight", "up.bias", "down.weight", "down.bias")


class Noisy(Listed):
    """Noise on the gate from each generator."""

    def scores(self, x: Tensor) -> Tensor:
        drawn = random.gauss(0, 1) + float(np.random.randn())
        return super().scores(x) * (1 + drawn) + torch.randn(len(x), len(self.experts))


class Backwards(Listed):
    """Experts in another order than that of the list, and two calls of each."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        out = hidden
        for number in (2, 0, 3, 1):
            for part in (slice(0, 2), slice(1, None, 2)):
                if len(rows := hidden[part]):
                    out = out + self.experts[number](rows).sum(0) * (number + 1)
        return out


class First(Listed):
    """Experts of the first ranks alone have rows."""

    def scores(self, x: Tensor) -> Tensor:
        return super().scores(x) - 1e3 * (torch.arange(len(self.experts)) > 1)


class Counting(Listed):
    """A count that no state of the block shows."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.count = itertools.count()


class Other(Counting):
    """Other experts in each forward."""

    def scores(self, x: Tensor) -> Tensor:
        return super().scores(x * 0 + (-1) ** next(self.count) * torch.arange(1.0, WIDTH + 1))


class Shifted(Counting):
    """Rows of another content in each forward, as many as before."""

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.experts[0](hidden + next(self.count))
        return found


def share(block: Listed, comm: Comm) -> None:
    """Shares the experts of a block; parameters of other ranks have no value here."""
    names = tuple(f"moe.experts.{number}" for number in range(len(block.experts)))
    bounds, index = expert_bounds(len(names), comm.grid.size(AXIS)), comm.grid.index(AXIS)
    for number, expert in enumerate(block.experts):
        if not bounds[index] <= number < bounds[index + 1]:
            for parameter in expert.parameters():
                parameter.data.fill_(torch.nan)
    found = ListedExperts("moe", names, WIDTH, WIDTH, OWN)
    share_listed(nn.ModuleDict({"moe": block}), [found], comm, TensorAxis(comm), ForwardPatches())


def run(block: Listed, hidden: Tensor, again: bool = False) -> tuple[Tensor, ...]:
    """Returns the output of a block, and the gradients of its input and of its gate."""
    x = hidden.clone().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False) if again else block(x)
    (y.square() + x).sum().backward()
    gate = block.gate.weight
    assert x.grad is not None
    return y.detach(), x.grad, torch.zeros_like(gate) if gate.grad is None else gate.grad


def made(kind: Callable[[int], Listed], experts: int) -> Listed:
    with torch.random.fork_rng([]):
        torch.manual_seed(experts)
        return kind(experts)


def given(rows: Sequence[int]) -> list[Tensor]:
    """Returns rows of each rank."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(count, WIDTH, generator=draw) for count in rows]


def seed(rank: int) -> None:
    """Seeds every generator that a block draws from."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def grads_of(block: Listed, number: int) -> Tensor:
    """Returns the gradients of an expert, zeros for a parameter without one."""
    parameters = block.experts[number].parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def has_none(block: Listed, number: int) -> bool:
    """Returns True if an expert has no gradient, as one that nobody has called."""
    return all(parameter.grad is None for parameter in block.experts[number].parameters())


def compare(kind: Callable[[int], Listed], experts: int, rows: Sequence[int], again: bool = False) -> None:
    """Compares thread ranks with ``rows`` each to one process."""
    hidden, ranks = given(rows), len(rows)
    bounds = expert_bounds(experts, ranks)

    def body(comm: Comm) -> tuple[tuple[Tensor, ...], Tensor, Listed]:
        rank, block = comm.grid.rank, made(kind, experts)
        share(block, comm)
        seed(rank)
        results = run(block, hidden[rank], again)
        drawn = torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])
        return results, drawn, block

    found, whole = on_expert_ranks(ranks, body), made(kind, experts)
    grads, absent = list[Tensor](), list[bool]()
    for rank, (results, drawn, block) in enumerate(found):
        whole.gate.weight.grad = None
        seed(rank)
        for own, right in zip(results, run(whole, hidden[rank], again), strict=True):
            torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)
        right = torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])
        assert torch.equal(drawn, right), "the numbers after the block are those of one forward"
        assert again or block.calls == int(block.seen) == 1, "one call changes state once"
        grads += [grads_of(block, number) for number in range(bounds[rank], bounds[rank + 1])]
        absent += [has_none(block, number) for number in range(bounds[rank], bounds[rank + 1])]
    for number, own in enumerate(grads):
        torch.testing.assert_close(own, grads_of(whole, number), rtol=1e-5, atol=1e-5)
    assert absent == [has_none(whole, number) for number in range(experts)], "an expert that is called has a gradient"


@pytest.mark.parametrize(
    ("experts", "rows"),
    [(4, (7, 5)), (5, (6, 6)), (5, (4, 3, 9)), (4, (1, 1, 1, 1)), (4, (0, 5)), (4, (0, 0)), (2, (8, 1))],
)
def test_a_shared_list_is_one_process_with_all_experts(experts: int, rows: tuple[int, ...]) -> None:
    compare(Listed, experts, rows)


@pytest.mark.parametrize("rows", [(6, 5), (1, 0), (0, 0)])
def test_an_expert_that_is_called_without_rows_has_a_gradient_of_zeros(rows: tuple[int, ...]) -> None:
    compare(Always, 5, rows)


@pytest.mark.parametrize("rows", [(6, 4), (5, 0), (0, 0, 3)])
def test_a_recomputed_block_exchanges_in_the_same_order_on_a_rank_that_calls_no_expert(rows: tuple[int, ...]) -> None:
    compare(Listed, 4, rows, again=True)


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_whose_experts_get_no_rows_joins_the_gradients_of_its_own_rows(again: bool) -> None:
    compare(First, 6, (4, 3, 5), again=again)


class Weighing(Listed):
    """A block that weighs the results of its experts in place."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        x = hidden.reshape(-1, WIDTH)
        weights, index = self.scores(x).softmax(-1).topk(self.chosen)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(index == number)
            if len(row):
                out.index_add_(0, row, expert(x[row]).mul_(weights[row, slot, None]))
        return hidden + out.view_as(hidden)


def test_answers_may_be_written_in_place() -> None:
    compare(Weighing, 4, (5, 6))


def test_noise_is_drawn_once_by_every_generator() -> None:
    compare(Noisy, 4, (6, 5))


def test_answers_come_in_the_order_of_the_calls() -> None:
    compare(Backwards, 4, (4, 3))


def test_each_row_of_another_rank_is_sent_once_and_answered_once() -> None:
    """Two experts of each row: rows are counted by hand from a gate of one process."""
    hidden, block = given((7, 5)), made(Listed, 4)
    chosen = [block.gate(rows).topk(2).indices for rows in hidden]
    out = [int((numbers // 2 != rank).sum()) for rank, numbers in enumerate(chosen)]

    def body(comm: Comm) -> dict[str, int]:
        own = made(Listed, 4)
        share(own, comm)
        run(own, hidden[comm.grid.rank])
        return {row.label: row.bytes for row in comm.tally.rows()}

    for rank, sent in enumerate(on_expert_ranks(2, body)):
        there_and_back = 4 * WIDTH * (out[rank] + out[1 - rank])
        assert sent[DISPATCH] == sent[COMBINE] == there_and_back


def refused(kind: Callable[[int], Listed], call: Callable[[Listed, Tensor], Any]) -> str:
    """Returns the sentence that ranks of two raise."""

    def body(comm: Comm) -> str:
        block = made(kind, 4)
        share(block, comm)
        with pytest.raises(EngineError) as caught:
            call(block, given((6,))[0])
        assert block(torch.zeros(0, WIDTH)) is not None if kind is Listed else True
        return str(caught.value)

    (said,) = set(on_expert_ranks(2, body))
    return said


@pytest.mark.parametrize("kind", [Other, Shifted])
def test_other_rows_in_the_second_pass_are_an_error_that_names_the_block(kind: Callable[[int], Listed]) -> None:
    said = refused(kind, lambda block, x: block(x))
    assert said == (
        "parallel.expert runs the forward of moe twice with equal arguments, random numbers and buffers, but the "
        "second run passed its experts different rows; compute these rows from the arguments of the forward only, or "
        "leave parallel.expert out."
    )


def test_a_member_called_outside_its_block_is_an_error_on_its_own_rank_too() -> None:
    said = refused(Listed, lambda block, x: block.experts[1](x))
    assert said == (
        "moe.experts.1 was called outside the forward of moe, but with parallel.expert only this forward sends rows to "
        "the ranks of the experts; call moe instead, or leave parallel.expert out."
    )


def test_a_block_that_fails_leaves_nothing_for_its_next_call() -> None:
    """The forward raises in the first pass, before anything is sent, and the next call is right."""

    def body(comm: Comm) -> bool:
        block, x = made(Listed, 4), given((3,))[0]
        right = made(Listed, 4)(x)
        share(block, comm)
        with pytest.raises(RuntimeError):
            block(x[:, :2])
        assert not comm.tally.rows() and block.calls == 0
        return torch.allclose(block(x), right, atol=1e-6)

    assert on_expert_ranks(2, body) == [True, True]


def test_a_forward_without_a_gradient_keeps_no_rows() -> None:
    def body(comm: Comm) -> bool:
        block = made(Listed, 4)
        share(block, comm)
        with torch.no_grad():
            return bool(block(given((3,))[0]).requires_grad)

    assert on_expert_ranks(2, body) == [False, False]
