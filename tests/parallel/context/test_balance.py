"""Zig-zag sharding divides causal attention evenly, as counting each pair confirms."""

from itertools import product

import numpy as np
import pytest
import torch

from engine.parallel.context.balance import EVEN, LEAST_CHUNK, by_work, causal_balance, work_balance, work_of_documents
from engine.parallel.context.cuts import zigzag


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_planned_pairs_are_those_that_queries_see(ranks: int) -> None:
    for length, unit in product((2 * ranks * 2, 37, 64, 100), (1, 2)):
        if length < 2 * ranks * unit or length % unit:
            continue
        held = zigzag(length, ranks, unit).ranks
        seen = tuple(sum(1 for query in own for key in range(length) if key <= query) for own in held)
        balance = causal_balance(length, ranks, unit)
        assert balance.pairs == seen
        assert balance.most_over_mean == pytest.approx(max(seen) / (sum(seen) / ranks))


def test_the_rank_with_the_most_work_is_near_the_mean() -> None:
    for ranks, length in product(range(1, 17), (32, 33, 47, 64, 127, 1000, 4096, 8191)):
        if length >= 2 * ranks:
            assert causal_balance(length, ranks).most_over_mean <= 1 + 4 * ranks / length, (ranks, length)


def test_equal_chunks_are_balanced_exactly_and_a_million_tokens_are_counted() -> None:
    assert causal_balance(4096, 8).most_over_mean == 1.0
    assert sum(causal_balance(1_000_000, 16).pairs) == 1_000_000 * 1_000_001 // 2


DRAWS = {
    "uniform": lambda draw, length: draw.integers(1, length // 4),
    "exponential": lambda draw, length: draw.exponential(length / 16) + 1,
    "heavy tail": lambda draw, length: draw.lognormal(np.log(length / 20), 1.2) + 1,
    "long": lambda draw, length: draw.integers(1, length),
}
"""Random lengths of documents in a row."""


def documents(draws: str, length: int, seed: int) -> list[int]:
    """Lengths of documents that fill a row."""
    draw, found = np.random.default_rng(seed), list[int]()
    while sum(found) < length:
        found.append(min(int(DRAWS[draws](draw, length)), length - sum(found)))
    return found


def places_of(lengths: list[int]) -> torch.Tensor:
    """Position ids of packed documents, [S]."""
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize(("ranks", "unit"), [(2, 1), (3, 1), (4, 2), (8, 1)])
def test_documents_of_random_lengths_are_shared_by_work(draws: str, ranks: int, unit: int) -> None:
    worst = 0.0
    for seed in range(10):
        length = 4 * LEAST_CHUNK * ranks + 2 * seed
        ids = torch.stack([places_of(documents(draws, length, seed + row)) for row in range(1 + seed % 2)])
        (work,) = work_of_documents([("position_ids", ids)]).values()
        index, plain = by_work(work, ranks, unit), zigzag(length, ranks, unit)
        assert index.once and index.counts == plain.counts
        assert all(not (runs % unit).any() for runs in index.runs)
        balance = work_balance(work, index)
        assert sum(balance.pairs) == int((ids + 1).sum())
        assert balance.most_over_mean <= EVEN
        assert max(map(len, index.runs)) <= 8
        worst = max(worst, work_balance(work, plain).most_over_mean)
    assert worst > EVEN, "zig-zag chunks would do"


def test_heavy_chunks_go_to_the_rank_with_the_least_work() -> None:
    """Few exchanges follow then, so that attention has few runs: 8 of 9 of those of chunks dealt in turn."""
    runs = 0
    for draws, seed in product(("uniform", "exponential"), range(20)):
        (work,) = work_of_documents([("position_ids", places_of(documents(draws, 2048, seed))[None])]).values()
        runs += max(map(len, by_work(work, 2).runs))
    assert runs <= 80


def test_one_document_stays_in_zig_zag_chunks() -> None:
    assert by_work(np.arange(1, 4097), 4) == zigzag(4096, 4)


@pytest.mark.parametrize(
    ("name", "row", "begins"),
    [
        ("position_ids", [0, 1, 2, 0, 0, 1], [3, 4]),
        ("position_ids", [4, 5, 6, 7, 0, 1], [4]),
        ("seq_idx", [0, 0, 1, 1, 1, 2], [2, 5]),
        ("document_ids", [7, 7, 7, 8, 9, 9], [3, 4]),
        ("position_ids", [0, 1, 2, 3, 4, 5], None),
        ("position_ids", [0, 0, 0, 0, 0, 0], None),
        ("position_ids", [1, 1, 1, 1, 1, 1], None),
        ("segment_ids", [1, 1, 2, 2, 0, 1], None),
        ("input_ids", [0, 1, 2, 0, 0, 1], None),
    ],
)
def test_position_ids_and_numbers_show_documents(name: str, row: list[int], begins: list[int] | None) -> None:
    found = work_of_documents([("labels", torch.tensor([row])), (name, torch.tensor([row]))])
    if begins is None:
        assert not found
    else:
        starts = [max([0, *(begin for begin in begins if begin <= place)]) for place in range(6)]
        assert found[6].tolist() == [place - start + 1 for place, start in enumerate(starts)]
