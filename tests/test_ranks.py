"""The test ground itself: ranks start fast, failures and hangs are named."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError

RunRanks = Callable[..., list[Any]]


def who(word: str) -> tuple[int, int, str, str | None]:
    """Meet the others, then say who this is."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), word, os.environ.get("TRINE_TEST")


def fail_on_two() -> None:
    """Rank 2 raises while the others wait for it."""
    if dist.get_rank() == 2:
        raise ValueError("the reason")
    dist.barrier()


def sleep_on_one() -> None:
    """Rank 1 never comes back."""
    if dist.get_rank() == 1:
        time.sleep(1000)


def die_on_zero() -> None:
    """Rank 0 ends without a word."""
    if dist.get_rank() == 0:
        os._exit(7)


def test_results_come_by_rank_and_the_environment_arrives(run_ranks: RunRanks) -> None:
    results = run_ranks(who, 4, "hello", env={"TRINE_TEST": "set"})
    assert results == [(rank, 6, "hello", "set") for rank in range(4)]
    assert "TRINE_TEST" not in os.environ


def test_traceback_of_the_failing_rank_is_raised(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 2 failed:.*fail_on_two.*ValueError: the reason"):
        run_ranks(fail_on_two, 3)


def test_a_hang_names_the_ranks_that_do_not_end(run_ranks: RunRanks) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not end within 5.0 s"):
        run_ranks(sleep_on_one, 2, seconds=5.0)
    assert time.monotonic() - started < 20


def test_a_rank_that_dies_is_named_with_its_exit_code(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="rank 0 failed:\nit died with exit code 7"):
        run_ranks(die_on_zero, 2)
