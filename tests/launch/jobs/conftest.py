"""Hosts that ssh reaches, for the tests of this folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.jobs.hosts import Hosts, no_hosts


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """``hosts(2)``: two hosts with an sshd, and a third one from which jobs are launched, until the end of the test."""
    if lacking := no_hosts():
        pytest.skip(lacking)
    warm_python = request.getfixturevalue("warm_python")
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(Hosts(count, warm_python, tmp_path))
