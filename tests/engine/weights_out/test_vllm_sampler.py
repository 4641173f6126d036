"""Samples of vLLM servers: from the version that was asked for, else a refusal by name."""

import httpx
import pytest

from engine.errors import EngineError
from engine.weights_out.blocks import deliver
from engine.weights_out.consumers.vllm import VllmServers
from engine.weights_out.consumers.vllm_sampler import VllmSampler
from tests.engine.weights_out.fake_vllm import FakeVllm
from tests.engine.weights_out.test_vllm import blocks_of
from tests.engine.weights_out.trainer import Trainer, random_weights

PROMPTS = [[1], [2, 2], [3, 3, 3]]


def test_prompts_are_divided_among_servers_and_come_back_in_order() -> None:
    vllm = [FakeVllm(None, version="7") for _ in range(2)]
    found = VllmSampler([each.server() for each in vllm]).sample(PROMPTS, {"n": 2, "max_tokens": 4}, 7, 5.0)
    assert [[sample.tokens for sample in of_prompt] for of_prompt in found] == [
        [[*prompt, 0], [*prompt, 1]] for prompt in PROMPTS
    ]
    assert found[2][1].log_probs == [-0.5] * 4 and not found[2][1].stopped
    assert [each.calls for each in vllm] == [["inference/v1/generate"] * 2, ["inference/v1/generate"]]


def test_tokens_of_another_version_are_refused_by_name() -> None:
    trainer = Trainer(1)
    vllm = FakeVllm(trainer)
    deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [VllmServers([vllm.server()])])
    sampler = VllmSampler([vllm.server()])
    assert len(sampler.sample(PROMPTS, {}, 1, 5.0)) == 3
    with pytest.raises(
        EngineError, match=r"http://vllm has sampled tokens from version '1', but version 2 was published for them"
    ):
        sampler.sample(PROMPTS, {}, 2, 5.0)


def test_one_token_of_an_older_version_is_enough() -> None:
    vllm = FakeVllm(None, version="3")
    answer = vllm.generate

    def mixed(body: object) -> object:
        reply = answer(body)
        reply["choices"][0]["weight_versions"].insert(0, {"version": "2", "start": 0, "end": 1})
        return reply

    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, json=mixed({"token_ids": [1], "sampling_params": {}}))
    )
    server = type(vllm.server())("http://vllm", transport=transport)
    with pytest.raises(EngineError, match="from version '2', but version 3"):
        VllmSampler([server]).sample([[1]], {}, 3, 5.0)


@pytest.mark.parametrize(
    ("vllm", "told"),
    [
        (FakeVllm(None, spans=False), "names no version of its tokens' weights; start vLLM 0.32 or later"),
        (
            FakeVllm(None, fails=lambda called: httpx.Response(404)),
            "it has no /inference/v1/generate; start vLLM 0.32 or later with --enable-scale-out",
        ),
        (FakeVllm(None, fails=lambda called: httpx.ConnectError("no route")), "http://vllm does not answer"),
    ],
)
def test_a_server_that_cannot_sample_is_named(vllm: FakeVllm, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        VllmSampler([vllm.server()]).sample(PROMPTS, {}, 1, 0.3)


def test_a_reply_that_is_lost_is_asked_for_again() -> None:
    vllm = FakeVllm(None, version="1")
    vllm.loses = lambda called: len(vllm.calls) == 1
    assert len(VllmSampler([vllm.server()]).sample([[1]], {}, 1, 5.0)[0]) == 1 and len(vllm.calls) == 2
