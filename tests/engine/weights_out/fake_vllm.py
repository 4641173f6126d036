"""vLLM servers of this process: one worker with the states and refusals of vLLM 0.32, and networks that fail."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from torch import Tensor

from engine.config.outer_section import ConsumerConfig
from engine.errors import EngineError
from engine.weights_out.consumers.vllm import VllmServer
from engine.weights_out.vllm_backend import BackendInit, BackendUpdate, StagedVersion, VllmModel
from tests.engine.weights_out.trainer import SHAPES, Trainer

Drawn = list[tuple[list[int], list[float]]]
"""Tokens and log-probabilities of completions."""
Draw = Callable[[Mapping[str, Tensor], Sequence[int], Mapping[str, Any]], Drawn]
"""Function from weights, prompt and sampling parameters to completions."""


def fixed_tokens(weights: Mapping[str, Tensor], prompt: Sequence[int], settings: Mapping[str, Any]) -> Drawn:
    """Completions that name their prompt and their number."""
    return [([*prompt, number], [-0.5] * (len(prompt) + 1)) for number in range(settings.get("n", 1))]


@dataclass(slots=True)
class FakeVllm:
    """Server that loads versions as vLLM does: any exception of an update ends it, one of "finish" does not."""

    trainer: Trainer | None
    """Training of this process; None: one with an address."""
    model: VllmModel = field(default_factory=lambda: VllmModel("Model", torch.float32, dict(SHAPES)))
    weights: Mapping[str, Tensor] | None = None
    """Live weights."""
    version: str = "default"
    paused: bool = False
    active: bool = False
    calls: list[str] = field(default_factory=list)
    """Paths of all requests, without parameters."""
    fails: Callable[[str], httpx.Response | Exception | None] = lambda path: None
    """Failure of a request before the server has it."""
    loses: Callable[[str], bool] = lambda path: False
    """True: the server performs a request, and its reply is lost."""
    spoils: Callable[[dict[str, Tensor]], object] = lambda weights: None
    """Change of the weights on their way to the model."""
    draw: Draw = fixed_tokens
    mode: str = "processed_logprobs"
    spans: bool = True
    """False: as a vLLM that names no versions of tokens."""
    staged: StagedVersion = field(init=False)

    def __post_init__(self) -> None:
        trainer = self.trainer
        self.staged = StagedVersion(None if trainer is None else lambda url: trainer.reader())

    def server(self, url: str = "http://vllm", **options: Any) -> VllmServer:
        """Returns a connection to this server."""
        options = {"pause": ConsumerConfig().pause} | options
        return VllmServer(url, transport=httpx.MockTransport(self.answer), **options)

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answers a request."""
        path = request.url.path
        self.calls.append(path.removeprefix("/"))
        failure = self.fails(self.calls[-1])
        if isinstance(failure, httpx.Response):
            return failure
        if failure is not None:
            raise failure
        body = json.loads(request.read() or b"{}")
        try:
            reply = getattr(self, self.calls[-1].rpartition("/")[2])(body)
        except (EngineError, RuntimeError) as error:
            return httpx.Response(500, json={"error": {"message": f"Call to collective_rpc method failed: {error}"}})
        if self.loses(self.calls[-1]):
            raise httpx.ReadTimeout("lost")
        return httpx.Response(200, json=reply or {})

    def init_weight_transfer_engine(self, body: Any) -> None:
        """As in vLLM."""
        self.staged.open(BackendInit(**body["init_info"]), lambda: self.model)

    def start_weight_update(self, body: Any) -> None:
        """As in vLLM."""
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.staged.drop()
        self.active = True

    def update_weights(self, body: Any) -> None:
        """As in vLLM."""
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        self.active = False
        self.staged.read(BackendUpdate(**body["update_info"]))
        self.active = True

    def finish_weight_update(self, body: Any) -> None:
        """As in vLLM."""
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        if (whole := self.staged.whole()) is not None:
            assert self.paused, "weights are replaced while requests run"
            loaded = {key: value.clone() for key, value in whole.items()}
            self.spoils(loaded)
            self.weights = loaded
        self.staged.drop()
        self.active = False
        self.version = body.get("weight_version", self.version)

    def update_weight_version(self, body: Any) -> None:
        """As in vLLM."""
        self.version = body["new_version"]

    def weight_info(self, body: Any) -> Any:
        """As in vLLM."""
        return {"weight_version": self.version}

    def server_info(self, body: Any) -> Any:
        """As in vLLM."""
        return {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}}

    def generate(self, body: Any) -> Any:
        """As in vLLM at /inference/v1/generate; other keys than these are refused there too."""
        assert body.keys() == {"token_ids", "sampling_params"} and not self.paused
        found = self.draw(self.weights or {}, body["token_ids"], body["sampling_params"])
        return {"choices": [self._choice(*each) for each in found]}

    def _choice(self, tokens: list[int], values: list[float]) -> Any:
        content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, values, strict=True)]
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}] if self.spans else None
        return {
            "token_ids": tokens, "finish_reason": "length", "logprobs": {"content": content}, "weight_versions": spans,
        }  # fmt: skip

    def weight_checker(self, body: Any) -> Any:
        """As in vLLM, for one worker."""
        assert self.weights is not None
        sums = {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in self.weights.items()}
        return {"checksums": {f"dp0:pp0:pcp0:tp0:{key}": value for key, value in sums.items()}}

    def pause(self, body: Any) -> None:
        """As in vLLM."""
        self.paused = True

    def resume(self, body: Any) -> None:
        """As in vLLM."""
        self.paused = False

    def reset_prefix_cache(self, body: Any) -> None:
        """As in vLLM."""
