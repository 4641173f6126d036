"""vLLM itself, as a server on the CPU: after each update it generates what the training generates."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import engine
from engine.config import load_config
from engine.errors import EngineError
from engine.serving.commands import (
    AdamParameters,
    CreateModel,
    Datum,
    Failure,
    ForwardBackward,
    LossCall,
    OptimStep,
    SampledOutput,
    SampleTokens,
    SamplingParameters,
    SaveWeights,
)
from engine.serving.executor import CommandExecutor
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.weights_out.blocks import WeightBlocks
from tests.engine.parity.expert_runs import run
from tests.engine.weights_out.test_grids import meet
from tests.engine.weights_out.vllm_process import vllm_server

pytestmark = pytest.mark.peers
WORDS = ("--skip-tokenizer-init", "--max-num-seqs", "4", "--enable-scale-out")
PROMPT, NEW = [1, 2, 3, 4], 24
SIZES: Mapping[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "dtype": "float32",
}  # fmt: skip


def model(**sizes: Any) -> Any:
    """Returns a model with random weights, equal at each call."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a vLLM server with the model before training."""
    folder = tmp_path_factory.mktemp("vllm")
    model().save_pretrained(folder)
    with vllm_server(folder, *WORDS) as url:
        yield url


def tokens_of(url: str) -> list[int]:
    """Greedy tokens of the server."""
    body = {"model": "model", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def version_of(url: str) -> str:
    """Version that the server names."""
    return str(httpx.get(f"{url}/weight_info").json()["weight_version"])


def train(url: str, **sizes: Any) -> Any:
    """Returns an engine whose versions go to the server."""
    rows = torch.arange(64).reshape(2, 32) * 13 % 1024
    config = {
        "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "weights_out": {"to": [{"vllm": url, "check": True}]},
    }  # fmt: skip
    example = {"input_ids": rows, "labels": rows}
    return engine.initialize(model(**sizes), config, example_batch=example), example


def test_vllm_generates_what_the_training_generates(server: str) -> None:
    eng, rows = train(server)
    seen = [tokens_of(server)]
    with ThreadPoolExecutor(1) as pool:
        for number in (1, 2, 3):
            eng.train_batch(rows)
            pending = eng.publish_weights()
            during = pool.submit(tokens_until, pending, server)
            pending.wait()
            expected = eng.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, len(PROMPT) :].tolist()
            seen.append(tokens_of(server))
            assert seen[-1] == expected and version_of(server) == str(number)
            assert all(each in seen[-2:] for each in during.result()), "a reply mixes two versions"
    assert len({tuple(each) for each in seen}) == 4, "each update changes the tokens"
    eng.close()


def tokens_until(pending: Any, url: str) -> list[list[int]]:
    """Greedy tokens of all requests until vLLM has a version."""
    found = []
    while not pending.done:
        found.append(tokens_of(url))
    return found


def test_vllm_follows_data_and_tensor_ranks(server: str) -> None:
    def after(eng: Any) -> Any:
        pending = eng.publish_weights()
        meet(eng)  # thread ranks take turns, and each has filled its image by now
        pending.wait()
        expected = eng.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, len(PROMPT) :].tolist()
        return expected, tokens_of(server) if eng.grid.rank == 0 else expected

    changes = {"zero_optimization": {"stage": 1}, "weights_out": {"to": [{"vllm": server, "check": True}]}}
    found = run({"data": 2, "tensor": 2}, changes, model, after, steps=1).extra
    assert all(expected == tokens for expected, tokens in found)


def with_experts() -> Any:
    """Returns a mixture of experts, which transformers stacks and vLLM loads one by one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes}))


def test_vllm_gets_experts_as_from_a_published_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with_experts().save_pretrained(first)
    rows = torch.arange(64).reshape(2, 32) * 13 % 1024
    example = {"input_ids": rows, "labels": rows}
    config: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    with vllm_server(first, *WORDS) as url:
        config["weights_out"] = {"to": [{"vllm": url}]}
        with engine.initialize(with_experts(), config, example_batch=example) as eng:
            eng.train_batch(example)
            eng.publish_weights().wait()
            expected = eng.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, len(PROMPT) :].tolist()
            eng.save_pretrained(second)
        published = tokens_of(url)
        # vLLM 0.32 itself does not replace all that it has packed of experts on CPUs
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(second)}}
        httpx.post(f"{url}/collective_rpc", json=reload, timeout=60.0).raise_for_status()
        assert published == tokens_of(url)
    with vllm_server(second, *WORDS) as url:
        assert tokens_of(url) == expected


def test_other_weights_in_vllm_are_named(server: str) -> None:
    eng, rows = train(server)
    eng.train_batch(rows)
    eng.publish_weights().wait()
    publisher = eng._parts.publisher
    reader, consumer = publisher._reader, publisher._consumers[0]
    version = reader.newest()
    consumer.compare(WeightBlocks(reader, version, time.monotonic() + 30))
    httpx.post(f"{server}/weight_checker", json={"action": "reset"}).raise_for_status()
    with pytest.raises(EngineError, match=r"has other values of 'model.embed_tokens.weight', 'model.layers.0"):
        consumer.compare(WeightBlocks(reader, version, time.monotonic() + 30))
    eng.close()


def test_an_update_that_is_left_open_does_not_change_vllm(server: str) -> None:
    eng, rows = train(server)
    eng.train_batch(rows)
    eng.publish_weights().wait()
    before = tokens_of(server)
    eng.train_batch(rows)
    publisher = eng._parts.publisher
    consumers, publisher._consumers = publisher._consumers, ()
    pending = eng.publish_weights()
    version = publisher._reader.newest()
    consumers[0]._servers[0].prepare(WeightBlocks(publisher._reader, version, time.monotonic() + 30), pending.url)
    assert tokens_of(server) == before and version_of(server) == str(version.number - 1)
    publisher._consumers = consumers  # as after a kill
    eng.publish_weights().wait()
    expected = eng.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, len(PROMPT) :].tolist()
    assert tokens_of(server) == expected != before and version_of(server) == str(version.number + 1)
    eng.close()


def test_another_model_is_refused_by_name(server: str) -> None:
    before = tokens_of(server)
    eng, rows = train(server, intermediate_size=192)
    eng.train_batch(rows)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"mlp\.\w+_proj\.weight' has shape \[192, 64\] in the trainer and \[128, 64\]"
    ):
        eng.publish_weights().wait()
    assert time.monotonic() - began < 10 and tokens_of(server) == before
    eng.close()


def test_a_service_samples_saved_weights_through_vllm(server: str, tmp_path: Path) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1, "serve": {"sampler": {"vllm": server}}})
    pool = TenantPool(model, config, TenantLimits(full=1), {"input_ids": torch.zeros(1, 32, dtype=torch.int64)})
    executor = CommandExecutor(pool, tmp_path, vllm=server)
    executor.run(CreateModel("m", "base", None))
    drawn, trained = SamplingParameters(samples=3, max_tokens=8, temperature=0.7, seed=3), pool.get("m")
    for step in range(2):
        data = (Datum(np.arange(1, 9), {"target_tokens": np.arange(2, 10), "weights": np.ones(8, np.float32)}),)
        executor.run(ForwardBackward("m", data, LossCall("cross_entropy")))
        executor.run(OptimStep("m", AdamParameters(lr=1e-2)))
        executor.run(SaveWeights("m", f"saved-{step}", False))
        found = executor.run(SampleTokens(f"saved-{step}", np.array(PROMPT), drawn))
        assert isinstance(found, SampledOutput), found
        for sequence in found.sequences:
            ids = torch.tensor([[*PROMPT, *sequence.tokens.tolist()]])
            logs = trained.predict({"input_ids": ids}).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            expected = logs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
            assert abs(sequence.logprobs - expected).max() < 5e-6, "under the model, before temperature"
    earlier = executor.run(SampleTokens("saved-0", np.array(PROMPT), drawn))
    assert isinstance(earlier, Failure) and "the weights saved-0 are not in the vLLM server" in earlier.error
    executor.close()
