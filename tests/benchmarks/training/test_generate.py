"""Generation beside transformers: both ways are measured, and give equal tokens."""

import pytest

from benchmarks.training.generate import measure


@pytest.mark.long
def test_both_ways_are_measured() -> None:
    assert set(measure(1, width=32)) == {"eng.generate", "eng.generate(sampling=...)"}
