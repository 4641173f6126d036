"""Hosts that ssh reaches, for the tests of this folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.jobs.hosts import Hosts


@pytest.fixture
def hosts(warm_python: str, tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """``hosts(2)``: two hosts with an sshd, and a third one from which jobs are launched, until the end of the test."""
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(Hosts(count, warm_python, tmp_path))
