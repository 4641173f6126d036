"""Dispatch of rows, compared to a count of (token, rank) pairs by hand, on thread ranks."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import DeadlockError
from engine.parallel.experts.dispatch import AXIS, COMBINE, DISPATCH, ROUTING, Dispatch, Round, exchange, swap_rows
from engine.parallel.experts.forms import expert_bounds
from tests.parallel.experts.moe import on_expert_ranks

Numbers = Sequence[Sequence[int]]


def drawn(tokens: int, experts: int, chosen: int, seed: int) -> list[list[int]]:
    """Returns ``chosen`` different experts for each token."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randperm(experts, generator=draw)[:chosen].tolist() for _ in range(tokens)]


def table(numbers: Numbers, chosen: int) -> Tensor:
    """Returns numbers as a tensor [T, k], also without tokens."""
    return torch.tensor(numbers, dtype=torch.int64).view(len(numbers), chosen)


ROUTINGS: dict[str, tuple[int, list[Numbers]]] = {
    "even": (6, [drawn(7, 6, 2, rank) for rank in range(3)]),
    "uneven": (5, [drawn(9, 5, 3, rank) for rank in range(2)]),
    "one expert": (8, [[[5]] * 8] * 4),
    "an idle rank": (6, [[[0, 1], [4, 5], [1, 5]]] * 3),
    "no token on a rank": (4, [drawn(5, 4, 2, 1), []]),
    "no token": (4, [[], []]),
    "one token": (4, [[], [[3, 0]]]),
    "every expert": (5, [drawn(3, 5, 5, rank) for rank in range(2)]),
    "one expert each": (5, [drawn(6, 5, 1, rank) for rank in range(3)]),
    "rows of nobody": (4, [[[-1, -1], [0, -1], [3, 2]], [[-1, 1], [-1, -1]]]),
    "eight to one": (4, [[[0]] * 8 + [[3]]] * 4),
}
"""Experts, and the numbers [T, k] of each rank."""


def pairs(numbers: Numbers, bounds: Sequence[int], rank: int) -> list[int]:
    """Returns the tokens with at least one expert on ``rank``, in order: counted by hand."""
    return [t for t, row in enumerate(numbers) if any(bounds[rank] <= n < bounds[rank + 1] for n in row)]


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("limit", [None, 1, 3])
def test_a_row_is_sent_once_to_each_rank_of_its_experts(name: str, limit: int | None) -> None:
    experts, numbers = ROUTINGS[name]
    ranks = len(numbers)
    bounds, chosen = expert_bounds(experts, ranks), max(len(row) for rank in [*numbers, [[0]]] for row in rank)

    def body(comm: Comm) -> tuple[list[Round], list[int], list[list[int]]]:
        own = table(numbers[comm.grid.rank], chosen)
        sent = Dispatch(own, torch.tensor(bounds), comm, limit)
        return sent.rounds, sent.token.tolist(), sent.local.tolist()

    found = on_expert_ranks(ranks, body)
    assert len({len(rounds) for rounds, _, _ in found}) == 1 and found[0][0], "as many rounds on every rank"
    given = max(len(rank) for rank in numbers) * chosen
    bound = limit or max(1, 2 * given // ranks)
    for rank, (rounds, tokens, local) in enumerate(found):
        wanted = [pairs(numbers[rank], bounds, other) for other in range(ranks)]
        assert tokens == [token for each in wanted for token in each]
        assert [sum(each) for each in zip(*(r.gives for r in rounds), strict=True)] == list(map(len, wanted))
        assert sorted(i for r in rounds for i in r.rows.tolist()) == list(range(len(tokens))), "each row in one round"
        for number, each in enumerate(rounds):
            assert max(each.gets) <= bound and max(each.gives) <= bound and len(each.rows) == sum(each.gives)
            assert list(each.gets) == [found[other][0][number].gives[rank] for other in range(ranks)]
        owners = [other for other in range(ranks) for _ in wanted[other]]
        for token, owner, numbered in zip(tokens, owners, local, strict=True):
            asked = [n for n in numbers[rank][token] if bounds[owner] <= n < bounds[owner + 1]]
            assert sorted(n + bounds[owner] for n in numbered if n >= 0) == sorted(asked)
            assert all(n < bounds[owner + 1] - bounds[owner] for n in numbered)


def test_rows_and_their_gradients_travel_as_often_as_they_are_sent() -> None:
    """Row 10 r + i is given by rank r; backward brings each row's gradient back to its place."""
    gives = [[2, 0, 1], [1, 3, 0], [0, 0, 0]]
    gets = [list(column) for column in zip(*gives, strict=True)]

    def body(comm: Comm) -> tuple[list[float], list[float], int]:
        rank = comm.grid.rank
        rows = (10.0 * rank + torch.arange(sum(gives[rank]))).repeat(4, 1).T.contiguous().requires_grad_()
        tie = torch.zeros((), requires_grad=True)
        (got,) = exchange((rows,), gives[rank], gets[rank], comm, DISPATCH, (tie,))
        (got * (rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
        assert rows.grad is not None and tie.grad is not None and not tie.grad
        (row,) = comm.tally.rows()
        assert (row.axis, row.label, row.calls) == (AXIS, DISPATCH, 2)
        return got[:, 0].tolist(), rows.grad[:, 3].tolist(), row.bytes

    found = on_expert_ranks(3, body)
    assert [got for got, _, _ in found] == [[0.0, 1.0, 10.0], [11.0, 12.0, 13.0], [2.0]]
    assert [grad for _, grad, _ in found] == [[1.0, 1.0, 3.0], [1.0, 2.0, 2.0, 2.0], []]
    forward, backward = [1, 1, 0], [1, 0, 1]  # rows to other ranks
    assert [sent for _, _, sent in found] == [4 * 4 * (a + b) for a, b in zip(forward, backward, strict=True)]


def test_several_tensors_travel_in_one_node_and_a_missing_gradient_is_zeros() -> None:
    def body(comm: Comm) -> list[float]:
        x, w = torch.ones(2, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)
        rows, weight = exchange((x, w), (1, 1), (1, 1), comm, DISPATCH, ())
        assert rows.grad_fn is weight.grad_fn
        (weight if comm.grid.rank else rows).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and w.grad is not None
        return [*x.grad[:, 0].tolist(), *w.grad[:, 0].tolist()]

    assert on_expert_ranks(2, body) == [[1.0, 0.0, 0.0, 1.0]] * 2


def test_a_rank_without_rows_that_depends_on_nothing_joins_the_backward_by_its_tie() -> None:
    def body(comm: Comm, tied: bool) -> float:
        x = torch.ones(1 - comm.grid.rank, 2, requires_grad=True)
        gives, gets = ((0, 1), (0, 0)) if comm.grid.rank == 0 else ((0, 0), (1, 0))
        (rows,) = exchange((x,), gives, gets, comm, DISPATCH, ())
        made = 3 * rows if len(rows) else torch.zeros(0, 2)
        (back,) = exchange((made,), gets, gives, comm, COMBINE, (rows,) if tied and not len(rows) else ())
        (back.sum() + x.sum()).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return float(x.grad.sum())

    assert on_expert_ranks(2, lambda comm: body(comm, tied=True)) == [8.0, 0.0]
    with pytest.raises(DeadlockError, match=r"waits for exchange"):
        on_expert_ranks(2, lambda comm: body(comm, tied=False))


def test_numbers_are_exchanged_without_a_gradient() -> None:
    def body(comm: Comm) -> list[int]:
        (got,) = swap_rows((torch.tensor([[comm.grid.rank], [7]], dtype=torch.int32),), (1, 1), (1, 1), comm, ROUTING)
        return [int(each) for each in got]

    assert on_expert_ranks(2, body) == [[0, 1], [7, 7]]


def test_a_schedule_fills_one_wait_for_all_tensors_that_travel_together() -> None:
    def body(comm: Comm) -> list[int]:
        filled: list[int] = []
        comm.fill_wait = lambda: filled.append(comm.tally.rows()[0].calls)
        x, w = torch.ones(2, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)
        rows, weight = exchange((x, w), (1, 1), (1, 1), comm, DISPATCH, ())
        (rows.sum() + weight.sum()).backward()  # type: ignore[no-untyped-call]
        return filled

    assert on_expert_ranks(2, body) == [[2, 4]] * 2, "once forward and once backward, when all messages have started"
