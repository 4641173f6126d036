"""Ranks on cores of their own: lists, parts, and a process that is bound."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import LaunchError
from engine.launch.jobs.bound_cores import MODULE, read_cores, share
from tests.structure import ROOT

SHOWS = "import json, os; print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']]))"


def test_a_list_names_cores_and_ranges() -> None:
    assert read_cores("0-2, 8,5-5") == (0, 1, 2, 5, 8)
    for text in ("", "a", "3-", "4-2", "-1", "1,,2", "0-999999999999"):
        with pytest.raises(LaunchError, match=r"is neither a core nor a range; write a list such as 0-3,8"):
            read_cores(text)


def test_ranks_have_neighbouring_parts_of_one_size() -> None:
    assert [share(range(9), rank, 4) for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    with pytest.raises(LaunchError, match="3 ranks on 2 cores: every bound rank needs its own core; start fewer"):
        share((0, 1), 0, 3)


def bound(rank: int, ranks: int, *words: str) -> "subprocess.CompletedProcess[str]":
    given = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", MODULE, *words, sys.executable, "-c", SHOWS]
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=ROOT, check=False)


def test_a_rank_runs_on_its_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2 or 1
    assert json.loads(bound(0, 1).stdout) == [cores, str(len(cores))]
    if len(cores) > 1:
        assert json.loads(bound(1, 2).stdout) == [cores[half : 2 * half], str(half)]
    last = str(cores[-1])
    assert json.loads(bound(0, 1, "--cores", last).stdout) == [[cores[-1]], "1"]
    done = bound(0, 1, "--cores", "4095")
    assert done.returncode and done.stderr.startswith(
        "trine launch: core 4095 is not one of this host's cores for the job"
    )
