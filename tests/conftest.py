"""What all tests share: ranks on a fork server."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_ranks as start_ranks
from tests.ranks import start_server


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(function, world_size, *arguments, env=None, seconds=120)``; see tests/ranks.py."""
    start_server()
    return start_ranks
