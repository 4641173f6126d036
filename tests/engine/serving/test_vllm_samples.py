"""A service samples saved weights through a vLLM server: those saved last, else a refusal."""

from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from engine.config import load_config
from engine.errors import ConfigError
from engine.serving.commands import (
    AdamParameters,
    Command,
    CreateModel,
    Failure,
    ForwardBackward,
    LossCall,
    OptimStep,
    Result,
    SampledOutput,
    SampleTokens,
    SamplingParameters,
    SaveWeights,
)
from engine.serving.executor import CommandExecutor
from engine.serving.tenants.pool import TenantLimits, TenantPool
from tests import models
from tests.engine.serving.test_training import CONFIG, make_data
from tests.engine.weights_out.fake_vllm_server import fake_server

PROMPT, DRAWN = np.arange(1, 6), SamplingParameters(samples=2, max_tokens=4, seed=3)
TRAINED: tuple[Command, ...] = (
    ForwardBackward("m", make_data(3, 0), LossCall("cross_entropy")),
    OptimStep("m", AdamParameters(lr=1e-2, eps=1e-8)),
)


def saved(name: str, parameters: SamplingParameters = DRAWN) -> tuple[Command, Command]:
    """Commands that save weights for sampling, and sample from them."""
    return SaveWeights("m", name, False), SampleTokens(name, PROMPT, parameters)


def ran(folder: Path, url: str, *commands: Command | str) -> list[Result]:
    """Runs commands; a word is a version that another training gives to the server's weights."""
    config = load_config({**CONFIG, "serve": {"sampler": {"vllm": url}}})
    example = {"input_ids": torch.zeros(1, 32, dtype=torch.int64)}
    pool = TenantPool(models.llama, config, TenantLimits(full=1), example)
    executor, found = CommandExecutor(pool, folder, vllm=url), list[Result]()
    try:
        for command in (CreateModel("m", "base", None), *commands):
            if isinstance(command, str):
                httpx.post(f"{url}/update_weight_version", json={"new_version": command}).raise_for_status()
            else:
                found.append(executor.run(command))
    finally:
        executor.close()
    return found[1:]


def test_the_weights_saved_last_are_sampled_and_others_are_refused(tmp_path: Path) -> None:
    with fake_server(models.llama(), "raw_logprobs") as url:
        found = ran(
            tmp_path,
            url,
            *saved("one"),
            *TRAINED,
            saved("one")[1],
            *saved("two"),
            saved("one")[1],
            "9",
            saved("two")[1],
        )
    first, again, second = found[1], found[4], found[6]
    assert isinstance(first, SampledOutput) and isinstance(again, SampledOutput) and isinstance(second, SampledOutput)
    for one, other in zip(first.sequences, again.sequences, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs), "a snapshot does not change while its model trains"
    assert not np.array_equal(first.sequences[0].logprobs, second.sequences[0].logprobs)
    assert found[7] == Failure(
        "the weights one are not in the vLLM server, which has the weights two; save them for sampling again.", "user"
    )
    replaced = found[8]
    assert isinstance(replaced, Failure) and "has sampled tokens from version '9', but version 2" in replaced.error
    model = models.llama()
    ids = torch.tensor([[*PROMPT, *first.sequences[0].tokens]])
    logs = model(ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    expected = logs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].detach().numpy()
    assert np.allclose(first.sequences[0].logprobs, expected, atol=1e-5), "those of the model before training"


@pytest.mark.parametrize(
    ("mode", "parameters", "told"),
    [
        (
            "processed_logprobs",
            DRAWN,
            "has --logprobs-mode processed_logprobs, and clients get log-probabilities under",
        ),
        (
            "raw_logprobs",
            replace(DRAWN, stops=((1, 2),)),
            "given a stop sequence of several tokens, which is",
        ),
        (
            "raw_logprobs",
            replace(DRAWN, prompt_logprobs=True),
            "given prompt_logprobs, which is not sampled",
        ),
    ],
)
def test_a_request_that_vllm_would_answer_differently_is_refused(
    mode: str, parameters: SamplingParameters, told: str, tmp_path: Path
) -> None:
    with fake_server(models.llama(), mode) as url:
        found = ran(tmp_path, url, *saved("one", parameters))[-1]
    assert isinstance(found, Failure) and told in found.error


def test_a_word_that_is_no_address_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'serve\.sampler\.vllm: "vllm:8000" is not an address; give http://HOST:PORT'
    ):
        load_config({**CONFIG, "serve": {"sampler": {"vllm": "vllm:8000"}}})
