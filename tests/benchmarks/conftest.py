"""What all tests of the benchmarks need."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def _shared_server(run_ranks: Callable[..., list[Any]]) -> None:
    """The fork server of the session starts with what all tests need, not with what the benchmark needs."""
    run_ranks(len, 1, ())
