"""Clients of Tinker's routes over a network that loses replies and doubles requests, and what they train."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from engine.serving.wire.messages import message_class
from engine.serving.wire.routes import PREFIX
from tests.engine.serving.wire.tinker_calls import forward_backward, optim_step

PATIENCE_SECONDS = 240.0
LATER = (408, 429)


class Lossy(httpx.BaseTransport):
    """Network that loses replies after the server has worked, and delivers requests twice.

    Args:
        seed: seed of the draws.
        lost: share of lost replies.
        twice: share of doubled requests.
    """

    def __init__(self, seed: int, lost: float = 0.2, twice: float = 0.1) -> None:
        self._real, self._draw, self._lost, self._twice = httpx.HTTPTransport(), random.Random(seed), lost, twice
        self.lost = self.doubled = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request."""
        body = request.read()
        response = self._real.handle_request(request)
        if self._draw.random() < self._twice:
            response.read()
            response = self._real.handle_request(
                httpx.Request(request.method, request.url, headers=request.headers, content=body)
            )
            self.doubled += 1
        if self._draw.random() < self._lost:
            response.read()
            self.lost += 1
            raise httpx.ReadError("lost")
        return response

    def close(self) -> None:
        """Closes the connections."""
        self._real.close()


class TinkerLine:
    """Requests of one session, which repeat as Tinker's client repeats them.

    Args:
        transport: replaces the network.
    """

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self._client = httpx.Client(base_url=url + PREFIX, transport=transport, timeout=30)
        self.refusals: list[tuple[float, int, str]] = []
        """Time, status and body of replies after which a request was repeated."""
        self.answered = 0
        """Number of results received."""
        attempt = {"x-idempotency-key": f"{time.time_ns()}"}
        self.session = self.post("create_session", {"tags": []}, attempt).json()["session_id"]

    def post(self, route: str, body: Any, headers: Any = None) -> httpx.Response:
        """Returns the reply to a body: bytes, or JSON values."""
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                reply = self._client.post(route, headers=headers, **given)
                if reply.status_code == 200:
                    return reply
                assert reply.status_code in LATER or reply.status_code >= 500, reply.text
                self.refusals.append((time.monotonic(), reply.status_code, reply.text))
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, f"{route} is not answered"
            time.sleep(0.05)

    def future(self, route: str, body: Any) -> str:
        """Returns the id of a request's future."""
        return str(self.post(route, body).json()["request_id"])

    def result(self, key: str) -> Any:
        """Returns the result of a future: JSON values, or the bytes of log-probabilities and the metrics."""
        reply = self.post("retrieve_future", {"request_id": key})
        self.answered += 1
        if "json" in reply.headers["content-type"]:
            found = reply.json()
            assert "error" not in found, found
            return found
        message = message_class("ForwardBackwardOutput").FromString(reply.content)
        fields = [dict(one.fields) for one in message.loss_fn_outputs]
        return [{name: field.data for name, field in one.items()} for one in fields], dict(message.metrics)

    def create(self, rank: int, number: int = 0) -> str:
        """Creates a model with an adapter; returns its id."""
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "model"}
        body["lora_config"] = {"rank": rank, "seed": rank}
        return str(self.result(self.future("create_model", body))["model_id"])

    def close(self) -> None:
        """Ends the session, whose model is unloaded."""
        self.post(f"sessions/{self.session}/finish", {"reason": {"type": "success"}})
        self._client.close()


@dataclass(frozen=True, slots=True)
class TrainedTenant:
    """Results of all commands of a tenant, and the files of its weights and moments."""

    results: list[Any]
    files: dict[str, bytes]


def train_tenant(line: TinkerLine, rank: int, steps: int, folder: Path, vocabulary: int = 61) -> TrainedTenant:
    """Trains an adapter with two requests of data an update, and saves it in the service's ``folder``.

    The numbers of an update are sent in an order of their own. These are 3 * ``steps`` + 2 commands.
    """
    model, draw, results, number = line.create(rank), np.random.default_rng(rank), list[Any](), 0
    for _ in range(steps):
        rows = [[draw.integers(0, vocabulary, draw.integers(3, 12)).tolist() for _ in range(2)] for _ in range(2)]
        one, two, three = number + 1, number + 2, number + 3
        bodies = {
            one: ("forward_backward", forward_backward(model, one, rows[0])),
            two: ("forward_backward", forward_backward(model, two, rows[1])),
            three: ("optim_step", optim_step(model, three, learning_rate=1e-2, grad_clip_norm=1.0)),
        }  # fmt: skip
        keys = {at: line.future(*bodies[at]) for at in draw.permutation(list(bodies)).tolist()}
        results += [line.result(keys[at]) for at in bodies]
        number += 3
    save = {"model_id": model, "seq_id": number + 1, "path": "end", "type": "save_weights"}
    line.result(line.future("save_weights", save))
    place = folder / "weights" / "weights" / model.replace(":", "-") / f"{number + 1:09d}"
    newest = max((one for one in place.iterdir() if one.name.isdigit()), key=lambda one: int(one.name))
    kinds = ("model*", "optim*")  # the states of random generators differ, as they belong to the process
    files = {one.name: one.read_bytes() for kind in kinds for one in newest.rglob(f"{kind}.safetensors")}
    assert files
    return TrainedTenant(results, files)
