"""Rows of shared experts in closed form, compared with every routing by brute force."""

from itertools import combinations, product

import pytest

from engine.parallel.experts.forms import expert_bounds
from engine.planning.cost_model.expert_exchange import ExchangedRows, ExpertExchange


def ranks_of(chosen: tuple[int, ...], bounds: tuple[int, ...]) -> list[int]:
    """Returns the rank of each chosen expert."""
    return [rank for number in chosen for rank in range(len(bounds) - 1) if bounds[rank] <= number < bounds[rank + 1]]


@pytest.mark.parametrize(
    ("experts", "chosen", "ranks"), [(8, 2, 4), (5, 2, 2), (8, 3, 3), (4, 4, 2), (6, 1, 3), (7, 3, 5)]
)
def test_even_routing_sends_the_mean_over_all_routings(experts: int, chosen: int, ranks: int) -> None:
    bounds, every = expert_bounds(experts, ranks), list(combinations(range(experts), chosen))
    token = ExpertExchange(experts=experts, chosen=chosen, ranks=ranks, tokens=10, width=4)
    row = ExpertExchange(experts=experts, chosen=chosen, ranks=ranks, tokens=10, width=4, form="row")
    for rank in range(ranks):
        assert token.held(rank) == bounds[rank + 1] - bounds[rank]
        hit = [ranks_of(each, bounds) for each in every]
        away = sum(len(set(each) - {rank}) for each in hit) / len(every)
        come = sum(rank in each for each in hit) / len(every)
        assert token.even(rank) == pytest.approx(ExchangedRows(10 * away, 10 * (ranks - 1) * come))
        away = sum(other != rank for each in hit for other in each) / len(every)
        come = sum(each.count(rank) for each in hit) / len(every)
        assert row.even(rank) == pytest.approx(ExchangedRows(10 * away, 10 * (ranks - 1) * come))
    gives = sum(token.even(rank).gives for rank in range(ranks)) / ranks
    assert token.mean() == pytest.approx(ExchangedRows(gives, gives))


def test_qwen3_on_8_ranks_sends_a_token_to_4_67_others() -> None:
    assert ExpertExchange(experts=128, chosen=8, ranks=8, tokens=1, width=1).mean().gives == pytest.approx(
        4.67, abs=5e-3
    )


@pytest.mark.parametrize(("experts", "chosen", "ranks"), [(4, 2, 2), (5, 2, 2), (3, 1, 3), (4, 3, 2), (3, 2, 3)])
def test_no_routing_sends_more_than_the_most_and_one_sends_as_much(experts: int, chosen: int, ranks: int) -> None:
    bounds, tokens = expert_bounds(experts, ranks), 2
    exchange = ExpertExchange(experts=experts, chosen=chosen, ranks=ranks, tokens=tokens, width=4)
    hit = [set(ranks_of(each, bounds)) for each in combinations(range(experts), chosen)]
    gives, gets = set[int](), set[int]()
    for own in product(hit, repeat=tokens):
        gives |= {sum(len(each - {rank}) for each in own) for rank in range(ranks)}
        gets |= {(ranks - 1) * sum(rank in each for each in own) for rank in range(ranks)}
    assert max(gets) == exchange.most().gets
    assert max(gives) <= exchange.most().gives and (chosen >= ranks or max(gives) == exchange.most().gives)


def test_bytes_of_a_step_are_those_of_rows_results_and_their_gradients() -> None:
    exchange = ExpertExchange(experts=8, chosen=2, ranks=4, tokens=100, width=16)
    rows, routing = ExchangedRows(30, 20), 3 * 9 * 8
    forward, backward = 30 * (18 * 2 + 2 * 4) + 20 * 32 + routing, 30 * 32 + 20 * 18 * 2
    assert exchange.sent_bytes(rows) == forward + backward and exchange.sent_bytes(rows, 2) == 2 * forward + backward
    assert exchange.limit == 100 and not exchange.rounds_repeat  # the even share of 200 rows is 50
    wide = ExpertExchange(experts=8, chosen=2, ranks=8, tokens=100, width=16)
    assert wide.limit == 50 and wide.rounds_repeat
    assert wide.round_bytes == (8 * 50 + 200) * (18 * 2 + 2 * 4 + 32)
