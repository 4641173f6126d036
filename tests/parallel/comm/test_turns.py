"""Ranks that are threads take turns: deterministic, each with its own generators, and never stuck."""

import gc
import random
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from engine.parallel.comm.threads import DeadlockError, Turns


def baton(size: int, count: int) -> list[str]:
    """What is done in which order when every rank waits for the next one."""
    turns, done, order = Turns(size), [0] * size, list[str]()

    def body(rank: int) -> None:
        for step in range(count):
            order.append(f"{rank}.{step}")
            done[rank] += 1
            turns.wait(rank, lambda: done[(rank + 1) % size] >= done[rank], lambda: "its neighbour")

    turns.run(body)
    return order


def test_the_order_is_the_same_every_time() -> None:
    first = baton(3, 4)
    assert sorted(first) == sorted(f"{rank}.{step}" for rank in range(3) for step in range(4))
    assert all(baton(3, 4) == first for _ in range(5))


def test_one_rank_runs_at_a_time() -> None:
    turns, inside, ended = Turns(4), 0, 0

    def body(rank: int) -> int:
        nonlocal inside, ended
        inside += 1
        assert inside == 1
        inside -= 1
        turns.wait(rank, lambda: ended > 0 or rank == 3, lambda: "the last")
        ended += 1
        return threading.get_ident()

    assert len(set(turns.run(body))) == 4


def test_each_rank_has_generators_of_its_own() -> None:
    def draws(meet: bool) -> list[tuple[float, float]]:
        turns, arrived = Turns(2), [0, 0]

        def body(rank: int) -> tuple[float, float]:
            torch.manual_seed(rank)
            random.seed(rank)
            drawn = 0.0
            for step in range(3):
                drawn += float(torch.rand(()))
                arrived[rank] += 1
                if meet:
                    turns.wait(rank, lambda step=step: min(arrived) > step, lambda: "both")  # type: ignore[misc]
            return drawn, random.random()

        return turns.run(body)

    assert draws(meet=True) == draws(meet=False)


def test_the_process_is_left_as_it_was() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    Turns(2).run(lambda rank: torch.set_default_dtype(torch.float64))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == torch.float32


def test_a_deadlock_says_who_waits_for_what() -> None:
    turns = Turns(3)

    def body(rank: int) -> None:
        if rank < 2:
            turns.wait(rank, lambda: False, lambda: f"rank {1 - rank}")

    with pytest.raises(DeadlockError) as caught:
        turns.run(body)
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits for rank 1; rank 1 waits for rank 0; rank 2 has ended."
    )


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_error_ends_all(failing: int) -> None:
    turns, after = Turns(3), list[int]()

    def body(rank: int) -> None:
        if rank == failing:
            raise ValueError(f"of rank {rank}")
        turns.wait(rank, lambda: False, lambda: "ever")
        after.append(rank)

    with pytest.raises(ValueError, match=f"of rank {failing}"):
        turns.run(body)
    assert not after


def test_the_cause_is_told_by_the_rank_that_has_it() -> None:
    turns, come = Turns(2), list[int]()

    def body(rank: int) -> None:
        come.append(rank)
        turns.wait(rank, lambda: len(come) == 2, lambda: "both")
        # rank 1 comes second, goes on at once and hears of rank 0's trouble before rank 0 can tell it
        raise ValueError("the cause" if rank == 0 else "rank 0 tells why")

    with pytest.raises(ValueError, match="the cause"):
        turns.run(body)


def test_an_error_keeps_nothing_of_the_ranks_alive() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def body(rank: int) -> None:
        held = torch.zeros(3)
        kept.append(weakref.ref(held))
        raise ValueError(f"of rank {rank} with {held.numel()} numbers")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="with 3 numbers") as caught:
            Turns(2).run(body)
        del caught
        assert len(kept) == 2 and not any(one() is not None for one in kept)
    finally:
        gc.enable()


def test_modes_are_those_of_the_caller() -> None:
    with torch.no_grad():
        assert Turns(2).run(lambda rank: torch.is_grad_enabled()) == [False, False]
    inner: Callable[[int], list[int]] = lambda rank: Turns(2).run(lambda index: 10 * rank + index)  # noqa: E731
    assert Turns(2).run(inner) == [[0, 1], [10, 11]], "ranks may have threads of their own"
