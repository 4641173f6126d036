"""Samples of one request, drawn by the engine that has its weights."""

import numpy as np
import torch
from torch import Tensor

from engine.engine import Engine
from engine.generation.sampling import Completion, GenerationRequest, SamplingOptions
from engine.serving.commands import Array, SampledOutput, SampledSequence, SampleTokens, SamplingParameters
from engine.serving.losses import ServedError
from engine.serving.training import client_tensor

ABSENT = (0, -99999.0)
"""Token and log-probability of an empty place among the likeliest tokens."""


def sample(engine: Engine, command: SampleTokens) -> SampledOutput:
    """Samples the sequences that ``command`` requests; all ranks get the same result.

    All ranks of the engine call it. For each new token, they run a forward, and exchange 8 bytes for each sequence.

    Raises:
        ServedError: the prompt is empty.
    """
    tokens = command.prompt.tolist()
    if not tokens:
        raise ServedError("the prompt is empty; send at least one token.")
    parameters = command.parameters
    request = GenerationRequest(tokens=tokens, sampling=_options(parameters))
    (completions,) = engine.generate_requests([request])
    count = parameters.max_tokens
    top = parameters.top_sample_logprobs
    sequences = tuple(_sequence(completion, top) for completion in completions) if count else ()
    prompt = completions[0].prompt_logprobs
    output = SampledOutput(sequences, None if prompt is None else np.array(prompt, np.float32))
    if not parameters.top_prompt_logprobs:
        return output
    ids, values = _top_of_prompt(engine, command.prompt, parameters.top_prompt_logprobs)
    return SampledOutput(sequences, output.prompt_logprobs, ids, values)


def _options(parameters: SamplingParameters) -> SamplingOptions:
    return SamplingOptions(
        max_new_tokens=max(1, parameters.max_tokens),
        temperature=parameters.temperature,
        top_k=max(0, parameters.top_k),
        top_p=parameters.top_p,
        seed=parameters.seed,
        stop=parameters.stops,
        samples=parameters.samples,
        logprobs=parameters.top_sample_logprobs,
        prompt_logprobs=parameters.prompt_logprobs,
    )


def _sequence(completion: Completion, top: int) -> SampledSequence:
    tokens = np.array(completion.tokens, np.int32)
    logprobs = np.array(completion.logprobs, np.float32)
    if not top:
        return SampledSequence(tokens, logprobs, completion.end == "stop")
    rows = [[*row, *[ABSENT] * (top - len(row))] for row in completion.alternatives or ()]
    ids = np.array([[token for token, _ in row] for row in rows], np.int32)
    values = np.array([[value for _, value in row] for row in rows], np.float32)
    return SampledSequence(tokens, logprobs, completion.end == "stop", ids, values)


def _top_of_prompt(engine: Engine, prompt: Array, count: int) -> tuple[Array, Array]:
    """Returns the likeliest tokens at each position of the prompt [n, count], and their log-probabilities."""
    given = client_tensor(prompt, engine.device)[None]
    output = engine.predict({"input_ids": given})
    logits: Tensor = getattr(output, "logits", output)[0].float()
    best = torch.log_softmax(logits[:-1], -1).topk(min(count, logits.shape[-1]))
    ids = np.full((len(prompt), count), ABSENT[0], np.int32)
    values = np.full((len(prompt), count), ABSENT[1], np.float32)
    width = best.indices.shape[-1]
    ids[1:, :width], values[1:, :width] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    return ids, values
