"""A fake vLLM behind an address, in a thread of this process, with a model of transformers that samples."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from engine.web.hosted import HostedApplication, run_in_thread
from engine.web.sockets import address_of, listen
from engine.weights_out.vllm_backend import vllm_model
from tests.engine.weights_out.fake_vllm import FakeVllm


class Sampler:
    """Draws of the fake server: those of a model with its weights, equal for equal weights and prompts."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def __call__(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], settings: Mapping[str, Any]
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of each completion."""
        self._model.load_state_dict(weights)
        drawn = torch.Generator().manual_seed(hash(tuple(prompt)) % 2**31)
        ids, found = torch.tensor([list(prompt)] * settings["n"]), []
        for _ in range(settings["max_tokens"]):
            logs = self._model(ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(logs.exp(), 1, generator=drawn)
            found.append(logs.gather(1, token))
            ids = torch.cat([ids, token], 1)
        return list(zip(ids[:, len(prompt) :].tolist(), torch.cat(found, 1).tolist(), strict=True))


@contextmanager
def fake_server(model: Any, mode: str = "processed_logprobs") -> Iterator[str]:
    """Address of a fake vLLM with a model of transformers."""
    model.config.architectures = [type(model).__name__]  # as in a folder
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    fake = FakeVllm(None, vllm_model(model.config, torch.float32), weights, draw=Sampler(model), mode=mode)

    async def answer(request: Request) -> Response:
        reply = fake.answer(httpx.Request(request.method, str(request.url), content=await request.body()))
        return Response(reply.content, reply.status_code, media_type="application/json")

    application = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    with (
        listen("127.0.0.1", 0, "fake vLLM") as listening,
        run_in_thread(HostedApplication(application, listening, lambda: None), "fake-vllm"),
    ):
        yield address_of(listening)
