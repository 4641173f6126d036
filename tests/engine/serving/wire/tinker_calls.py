"""Calls of Tinker's client in process: JSON and protobuf bodies against the application, without a network."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.wire.application import ServiceApplication
from engine.serving.wire.messages import message_class
from engine.serving.wire.routes import PREFIX
from engine.serving.wire.served_model import ServedModel
from tests.engine.serving.executors import CONTEXT, VOCABULARY, CountingExecutor, running

BASE = "Qwen/Qwen3-8B"
MODEL = ServedModel((BASE,), CONTEXT, VOCABULARY, ends=(2,), architecture="Qwen3", grid="tp2")


class TinkerCalls:
    """Calls of one session."""

    def __init__(self, client: TestClient, ledger: Ledger, executor: CountingExecutor) -> None:
        self.client, self.ledger, self.executor = client, ledger, executor
        self.session = self.json("create_session", {"tags": [], "sdk_version": "0.38"})["session_id"]

    def post(self, route: str, body: Any, **headers: str) -> Any:
        """Returns the reply to a body: bytes, or JSON values."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(PREFIX + route, content=content, headers=headers)

    def json(self, route: str, body: Any) -> Any:
        """Returns the JSON of a reply with status 200."""
        reply = self.post(route, body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refused(self, route: str, body: Any) -> tuple[int, str]:
        """Returns status and sentence of a refusal."""
        reply = self.post(route, body)
        return reply.status_code, reply.json()["detail"]

    def result(self, route: str, body: Any) -> Any:
        """Returns the reply of a future's poll."""
        return self.poll(self.json(route, body)["request_id"])

    def poll(self, key: str) -> Any:
        """Returns the reply of a poll: JSON values, or bytes."""
        reply = self.post("retrieve_future", {"request_id": key, "allow_metadata_only": True})
        assert reply.status_code == 200, reply.text
        return reply.json() if "json" in reply.headers["content-type"] else reply.content

    def create(self, number: int = 0, rank: int = 8, **more: Any) -> str:
        """Creates a model; returns its id."""
        body = {"session_id": self.session, "model_seq_id": number, "base_model": BASE, **more}
        if rank:
            body["lora_config"] = {"rank": rank, "seed": None}
        found = self.result("create_model", body)
        return str(found["model_id"])


def tensor(values: Any, dtype: int = 0, **parts: Any) -> Any:
    """Returns a dense tensor message."""
    array = np.asarray(values)
    code = dtype or {"f": 1, "i": 2}[array.dtype.kind]
    kind = {1: np.float32, 2: np.int64, 3: np.int32, 4: np.float32}[code]
    data = array.astype(kind).tobytes()
    if code == 4:
        data = (np.frombuffer(data, np.uint32) >> 16).astype(np.uint16).tobytes()
    return message_class("Tensor")(dense=data, dtype=code, shape=array.shape, **parts)


def forward_backward(
    model: str, number: int, rows: Sequence[Sequence[int]] = ((1, 2, 3),), loss: str = "cross_entropy",
    inputs: Mapping[str, Any] | None = None, **more: Any,
) -> bytes:  # fmt: skip
    """Returns the body of a forward_backward."""
    message = message_class("ForwardBackwardRequest")(model_id=model, seq_id=number, loss_fn=loss, **more)
    for row in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(row, np.int32).tobytes()
        given = {"target_tokens": tensor(np.array(row, np.int64)), "weights": tensor(np.ones(len(row)))}
        for name, value in (given if inputs is None else inputs).items():
            datum.loss_fn_inputs[name].CopyFrom(value)
    return bytes(message.SerializeToString())


def optim_step(model: str, number: int, **adam: float) -> dict[str, Any]:
    """Returns the body of an optim_step."""
    return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-3, **adam}, "type": "optim_step"}


@contextmanager
def calls(
    token: str = "", body_bytes: int = 1 << 20, executor: CountingExecutor | None = None, **limits: Any
) -> Iterator[TinkerCalls]:
    """Serves a counting executor in process."""
    queue, executor = FairQueue(), executor or CountingExecutor()
    ledger = Ledger(queue, None, LedgerLimits(**limits))
    application = ServiceApplication(ledger, MODEL, token, body_bytes)
    headers = {"x-api-key": token} if token else {}
    with (
        running(queue, ledger, executor),
        TestClient(application, headers=headers, raise_server_exceptions=True) as client,
    ):
        yield TinkerCalls(client, ledger, executor)
