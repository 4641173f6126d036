"""Ranks that fail together."""

import pytest

from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.agreement import raise_together
from tests.parallel.comm.test_host_group import Desk


def test_all_raise_the_problem_of_the_first_rank_with_the_advice_of_rank_0() -> None:
    desk = Desk()  # ranks 1 and 3 have failed: "a" and "cc"
    with pytest.raises(CheckpointError) as caught, raise_together(desk, str, lambda: " Try another."):
        pass
    assert str(caught.value) == "a Try another."
    assert {text[8:] for text in desk.told.values()} == {b"a Try another."}


def test_rank_0_words_its_own_error_first() -> None:
    desk = Desk()
    with pytest.raises(CheckpointError) as caught, raise_together(desk, lambda error: f"here: {error}"):
        raise ValueError("broken")
    assert str(caught.value) == "here: broken" and caught.value.__suppress_context__


def test_a_lost_rank_is_the_problem() -> None:
    desk = Desk(lost=2)
    with pytest.raises(EngineError, match="has lost rank 2"), raise_together(desk, str):
        pass
    assert desk.unheard == [] and sorted(desk.told) == [1, 3]
