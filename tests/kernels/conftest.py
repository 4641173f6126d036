"""Kernels are interpreted here, with bf16 put right."""

import pytest

from tests.kernels.interpreter import repair


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    repair()
