"""Requests in one batch: each has its own options, and its result does not depend on its batch mates."""

from functools import partial
from typing import Any

import pytest

from engine.engine import Engine
from engine.generation.sampling import Completion, GenerationRequest, SamplingOptions
from tests.engine.generation.generating import POSITIONS, on_grid, transformers_model

REQUESTS = [
    GenerationRequest(tokens=[5, 9, 2], sampling=SamplingOptions(max_new_tokens=12, seed=1, samples=2, logprobs=1)),
    GenerationRequest(tokens=[7], sampling=SamplingOptions(max_new_tokens=3, temperature=0)),
    GenerationRequest(tokens=[4] * 9, sampling=SamplingOptions(max_new_tokens=5, top_k=3, seed=1, logprobs=3)),
    GenerationRequest(tokens=[4] * 9, sampling=SamplingOptions(max_new_tokens=8, top_p=0.7, seed=1), stream=4),
    GenerationRequest(
        tokens=[11, 3], sampling=SamplingOptions(max_new_tokens=6, temperature=0.5, prompt_logprobs=True)
    ),
]
LLAMA = partial(transformers_model, "Llama")


def alike(one: Completion, other: Completion) -> bool:
    """Equal tokens and ends, and log-probabilities up to rounding."""
    tokens = one.tokens == other.tokens and one.end == other.end
    numbers = one.logprobs is None or one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    prompts = one.prompt_logprobs is None or one.prompt_logprobs == pytest.approx(
        other.prompt_logprobs, abs=1e-5, nan_ok=True
    )
    return bool(tokens and numbers and prompts)


@pytest.mark.parametrize("parallel", [{"data": 1}, {"data": 1, "pipeline": 2}])
def test_a_result_does_not_depend_on_batch_mates(parallel: dict[str, Any]) -> None:
    def body(eng: Engine) -> tuple[Any, Any]:
        return eng.generate_requests(REQUESTS), [eng.generate_requests([each])[0] for each in REQUESTS]

    for together, alone in on_grid(LLAMA, parallel, body):
        assert [len(each) for each in together] == [2, 1, 1, 1, 1]
        for ours, theirs in zip(together, alone, strict=True):
            assert all(map(alike, ours, theirs))
        assert [len(each[0].tokens) for each in together] == [12, 3, 5, 8, 6]
        assert together[0][0].tokens != together[0][1].tokens
        assert [each[0].logprobs is not None for each in together] == [True, False, True, False, False]
        assert [len(row) for row in together[2][0].alternatives] == [3] * 5


def test_a_request_that_is_given_twice_has_a_result_at_each_place() -> None:
    def body(eng: Engine) -> list[int]:
        return [len(found) for found in eng.generate_requests([REQUESTS[0], REQUESTS[1], REQUESTS[0]])]

    assert on_grid(LLAMA, {"data": 1}, body) == [[2, 1, 2]]


def test_a_completion_ends_at_its_stop_sequence() -> None:
    def body(eng: Engine) -> list[Completion]:
        def one(**options: Any) -> Completion:
            sampling = SamplingOptions(temperature=0, max_new_tokens=8, **options)
            return eng.generate_requests([GenerationRequest(tokens=[5, 9, 2], sampling=sampling)])[0][0]

        free = one().tokens
        eng.module.generation_config.eos_token_id = free[3]  # type: ignore[union-attr]
        return [one(stop=()), one(stop=[free[2]]), one(stop=[[free[1], free[2]], [free[2], free[1]]]), one()]

    ((free, token, sequence, end),) = on_grid(LLAMA, {"data": 1}, body)
    assert free.end == "length" and len(free.tokens) == 8
    assert token.end == "stop" and token.tokens == free.tokens[: free.tokens.index(free.tokens[2]) + 1]
    assert sequence.end == "stop" and sequence.tokens[-2:] == free.tokens[1:3]
    assert end.end == "stop" and end.tokens[-1] == free.tokens[3]


def test_a_row_that_has_ended_takes_no_more_positions() -> None:
    """A long prompt at the end of the model's positions, beside a short one that goes on."""

    def body(eng: Engine) -> list[int]:
        short = GenerationRequest(tokens=[3], sampling=SamplingOptions(max_new_tokens=20, temperature=0))
        long = GenerationRequest(tokens=[8] * (POSITIONS - 2), sampling=SamplingOptions(max_new_tokens=2))
        return [len(each[0].tokens) for each in eng.generate_requests([short, long])]

    assert on_grid(partial(transformers_model, "GPT2"), {"data": 1}, body) == [[20, 2]]


def test_a_request_that_continues_draws_the_same_tokens() -> None:
    """Its random numbers depend on positions in the sequence, so a preempted request may start again."""

    def body(eng: Engine) -> tuple[list[int], list[int]]:
        sampling = SamplingOptions(max_new_tokens=8, seed=9)
        whole = eng.generate_requests([GenerationRequest(tokens=[5, 9, 2], sampling=sampling)])[0][0].tokens
        rest = GenerationRequest(tokens=[5, 9, 2, *whole[:3]], sampling=SamplingOptions(max_new_tokens=5, seed=9))
        return whole, whole[:3] + eng.generate_requests([rest])[0][0].tokens

    ((whole, joined),) = on_grid(LLAMA, {"data": 1}, body)
    assert whole == joined


def test_streams_of_equal_requests_differ_and_rows_of_a_batch_have_their_own() -> None:
    def body(eng: Engine) -> tuple[Any, Any]:
        options = SamplingOptions(max_new_tokens=8, seed=2)
        requests = [GenerationRequest(tokens=[5], sampling=options, stream=stream) for stream in range(2)]
        return eng.generate([[5], [5]], sampling=options).tolist(), eng.generate_requests(requests)

    ((tokens, made),) = on_grid(LLAMA, {"data": 1}, body)
    assert [row[1:] for row in tokens] == [each[0].tokens for each in made]
    assert tokens[0] != tokens[1]
