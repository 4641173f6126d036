"""The test ground itself: ranks start fast, failures and hangs are named."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe, Pool, get_start_method
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ROOT, RankError, _collect, server_address

RunRanks = Callable[..., list[Any]]


def who(word: str) -> tuple[int, int, str, str | None]:
    """Meet the others, then say who this is."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), word, os.environ.get("TRINE_TEST")


def parent_of_its_worker() -> tuple[bool, str]:
    """Whether a process that a rank starts is its own child, and how it was started."""
    with Pool(1) as workers:
        return workers.apply(os.getppid) == os.getpid(), get_start_method()


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


def part_then_die_on_zero() -> None:
    """The others hear that rank 0 is gone some time before it is."""
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        time.sleep(0.5)
        os._exit(7)


def test_another_process_forks_its_ranks_from_the_same_server(run_ranks: RunRanks) -> None:
    code = (
        "import os; from tests.ranks import run_ranks, use_server\n"
        f"use_server({server_address()!r}); print(*run_ranks(os.getppid, 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {*map(int, done.stdout.split())} == {*run_ranks(os.getppid, 1)}


def test_results_come_by_rank_and_the_environment_arrives(run_ranks: RunRanks) -> None:
    results = run_ranks(who, 4, "hello", env={"TRINE_TEST": "set"})
    assert results == [(rank, 6, "hello", "set") for rank in range(4)]
    assert "TRINE_TEST" not in os.environ


def test_a_rank_starts_its_own_workers(run_ranks: RunRanks) -> None:
    """Those of a loader too: a fork server of each rank would import torch for them once more."""
    assert run_ranks(parent_of_its_worker, 2) == [(True, get_start_method())] * 2


def test_traceback_of_the_failing_rank_is_raised(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 2 failed:.*fail_on_two.*ValueError: the reason"):
        run_ranks(fail_on_two, 3)


def test_a_hang_names_the_ranks_that_do_not_end(run_ranks: RunRanks) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not end within 2.0 s"):
        run_ranks(sleep_on_one, 2, seconds=2.0)
    assert time.monotonic() - started < 20


def test_a_rank_that_dies_is_named_with_its_exit_code(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="rank 0 failed:\nit died with exit code 7"):
        run_ranks(die_on_zero, 2)


def test_it_is_named_though_another_tells_of_it_first(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="rank 0 failed:\nit died with exit code 7"):
        run_ranks(part_then_die_on_zero, 2)


def test_of_two_failures_the_earlier_is_raised() -> None:
    lines = [Pipe(duplex=False) for _ in range(3)]
    for (_, theirs), answer in zip(lines, [(False, "gone", 3.0), (True, 5, 1.0), (False, "cause", 2.0)], strict=True):
        theirs.send_bytes(pickle.dumps(answer))
    with pytest.raises(RankError, match="rank 2 failed:\ncause"):
        _collect([ours for ours, _ in lines], [Mock()] * 3, seconds=5.0)
