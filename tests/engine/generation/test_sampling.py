"""Sampling from logits: greedy, temperature, top-k, top-p, log-probabilities, and what a drawn token depends on."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.generation.sampling import (
    RowOptions,
    SamplingOptions,
    draw_tokens,
    keep_largest,
    keep_nucleus,
    sequence_logprobs,
    token_logprobs,
    uniform,
)

CPU = torch.device("cpu")
CHANCES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def drawn(options: SamplingOptions, at: list[float]) -> list[int]:
    """Tokens that these uniform numbers draw, one row each."""
    return draw_tokens(CHANCES.log().expand(len(at), -1), RowOptions.of([options] * len(at), CPU), at).tolist()


def test_numbers_draw_tokens_in_proportion_to_their_probability() -> None:
    steps = [(place + 0.5) / 100 for place in range(100)]
    counts = torch.tensor(drawn(SamplingOptions(), steps)).bincount(minlength=4)
    assert counts.tolist() == [10, 40, 20, 30]
    sharper = torch.tensor(drawn(SamplingOptions(temperature=0.5), steps)).bincount(minlength=4) / 100
    assert torch.allclose(sharper, CHANCES**2 / (CHANCES**2).sum(), atol=0.011)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"temperature": 0}, {1}),
        ({"temperature": 1e-45}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # 0.4 of 0.7, which is above a half
    ],
)
def test_filters_keep_the_likeliest(options: dict[str, Any], tokens: set[int]) -> None:
    assert set(drawn(SamplingOptions(**options), [place / 500 for place in range(500)] + [1 - 2**-53])) == tokens


def test_ties_with_the_last_of_the_largest_stay() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 3.0]]).expand(3, -1)
    kept = keep_largest(scores, torch.tensor([2, 0, 1]))
    assert kept.isfinite().tolist() == [[False, True, True, True], [True] * 4, [False, False, False, True]]
    kept = keep_nucleus(CHANCES.expand(2, -1).double(), torch.tensor([0.5, 1.0]))
    assert (kept > 0).tolist() == [[False, True, False, True], [True] * 4]


def test_a_row_does_not_depend_on_other_rows() -> None:
    options = [
        SamplingOptions(temperature=0), SamplingOptions(top_k=3), SamplingOptions(top_p=0.8),
        SamplingOptions(temperature=0.7, top_k=9, top_p=0.9), SamplingOptions(),
    ]  # fmt: skip
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    numbers = [uniform(3, 0, 0, place) for place in range(5)]
    together = draw_tokens(logits, RowOptions.of(options, CPU), numbers).tolist()
    apart = [slice(row, row + 1) for row in range(5)]
    alone = [draw_tokens(logits[row], RowOptions.of(options[row], CPU), numbers[row]) for row in apart]
    assert together == [int(token) for token in alone]


def test_numbers_differ_by_seed_stream_sample_and_position() -> None:
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys) and all(0 <= number < 1 for number in numbers)
    assert numbers == [uniform(*key) for key in keys]


def test_logprobs_are_those_of_the_model() -> None:
    found = token_logprobs(CHANCES.log()[None], torch.tensor([2]), 6)[0]
    assert found[:5].tolist() == pytest.approx([math.log(each) for each in (0.2, 0.4, 0.3, 0.2, 0.1)], abs=1e-6)
    assert found[5:7].tolist() == [-math.inf] * 2 and found[7:11].tolist() == [1, 3, 2, 0]
    logits: Tensor = torch.randn(3, 4)
    prompt = sequence_logprobs(logits, torch.tensor([3, 1, 2]))
    assert math.isnan(prompt[0]) and prompt[1] == logits[0].log_softmax(-1)[1] and prompt.shape == (3,)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "temperature -1.0, but temperature must be finite and not negative"),
        ({"top_p": 0.0}, "top_p 0.0, but top_p must be above 0 and at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens 0, but max_new_tokens must be at least 1"),
        ({"stop": [[]]}, "an empty stop sequence; give at least one token"),
    ],
)
def test_what_options_refuse(options: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineError, match=text):
        SamplingOptions(**options)


def test_stop_none_means_the_ends_of_the_model() -> None:
    assert SamplingOptions().ends([7]) == ((7,),)
    assert SamplingOptions(stop=()).ends([7]) == ()
    assert SamplingOptions(stop=[3, [4, 5]]).ends([7]) == ((3,), (4, 5))
