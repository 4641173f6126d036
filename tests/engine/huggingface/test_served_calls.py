"""Calls of TRL's generation: which prompts the servers get, which completions a data rank takes, which version."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from engine.errors import ConfigError, EngineError
from engine.huggingface import served_generation
from engine.huggingface.served_generation import ServedGeneration
from engine.weights_out.consumers import vllm
from tests.engine.weights_out.fake_vllm import FakeVllm

GIVEN = {
    "model": torch.nn.Linear(1, 1), "mode": "server", "server_timeout": 0.3, "temperature": 0.5, "top_p": 1.0,
    "top_k": 0, "min_p": None,
    "repetition_penalty": 1.0, "max_completion_length": 8, "logprobs": 0, "generation_kwargs": {"seed": 3},
    "structured_outputs_regex": None,
}  # fmt: skip
OTHERS = [[1], [1]]
"""Rows of data rank 0; the accelerator of this process has data rank 1."""


class Pending:
    """Version that the server has once it is waited for."""

    def __init__(self, fake: FakeVllm) -> None:
        self.number, self._fake = int(fake.version) + 1, fake

    def wait(self) -> None:
        """Lets the server take it over."""
        self._fake.version = str(self.number)


@pytest.fixture
def fake() -> FakeVllm:
    """A server with version 6."""
    return FakeVllm(None, version="6")


@pytest.fixture
def made(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> ServedGeneration:
    """The generation of data rank 1, in whose process rank 0 is."""
    monkeypatch.setattr(vllm, "VllmServer", fake.server)
    monkeypatch.setattr(served_generation, "broadcast_object_list", lambda told: told)
    monkeypatch.setattr(served_generation, "from_first", lambda make, *_: make())
    trained = SimpleNamespace(comm=None, device=torch.device("cpu"), publish_weights=lambda: Pending(fake))
    accelerator: Any = SimpleNamespace(
        is_main_process=True, process_index=1, trained=trained,
        gather_objects=lambda rows: rows + rows if isinstance(rows[0], bool) else OTHERS + rows,
    )  # fmt: skip
    return ServedGeneration(["http://vllm"], accelerator, **GIVEN)


def test_a_data_rank_takes_its_completions_of_the_version_of_this_step(made: ServedGeneration, fake: FakeVllm) -> None:
    asked, own = list[Any](), fake.draw

    def draw(*given: Any) -> Any:
        asked.append(given[1:])
        return own(*given)

    fake.draw = draw
    for number in (7, 8):
        made.sync_weights()
        assert fake.version == str(number)
        _, tokens, values, ids = made.generate([[2], [2]], None, 2)
        assert tokens == [[2, 0], [2, 1]] and values == [[[-0.5], [-0.5]]] * 2 and ids == [[[2], [0]], [[2], [1]]]
    settings = {
        "temperature": 0.5, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 8, "seed": 3, "n": 2,
        "logprobs": 0,
    }  # fmt: skip
    assert sorted(asked[:2], key=str) == [([1], settings), ([2], settings)]


def test_weights_that_were_replaced_are_refused(made: ServedGeneration, fake: FakeVllm) -> None:
    made.sync_weights()
    fake.version = "9"
    with pytest.raises(EngineError, match="from version '9', but version 7 was published"):
        made.generate([[2], [2]], None, 2)


def test_images_are_refused(made: ServedGeneration) -> None:
    with pytest.raises(EngineError, match="prompts with images, which are not sent to vLLM; remove use_vllm"):
        made.generate([[2], [2]], [None, object()], 2)


def test_trl_is_told_of_a_server_whose_log_probabilities_are_raw(made: ServedGeneration, fake: FakeVllm) -> None:
    assert made.vllm_client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    fake.mode = "raw_logprobs"
    again = ServedGeneration(["http://vllm"], made._accelerator, **GIVEN)
    assert again.vllm_client.get_server_info()["model_config"]["logprobs_mode"] == "raw_logprobs"


def test_a_server_that_does_not_answer_is_refused_before_training(made: ServedGeneration, fake: FakeVllm) -> None:
    fake.fails = lambda called: httpx.ConnectError("no route")
    with pytest.raises(ConfigError, match="the vLLM server http://vllm does not answer"):
        ServedGeneration(["http://vllm"], made._accelerator, **GIVEN)


def test_adapters_are_refused(made: ServedGeneration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_generation, "is_peft_model", lambda model: model is GIVEN["model"])
    with pytest.raises(ConfigError, match="a model with adapters and use_vllm, but vLLM loads whole models"):
        ServedGeneration(["http://vllm"], made._accelerator, **GIVEN)
