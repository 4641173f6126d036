"""Bodies of strangers: random changes of valid JSON, protobuf and graphs give 4xx or a future, never 500; no file is
opened, nothing is imported or run.
"""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine.serving.wire.tinker_calls import BASE, TinkerCalls, calls, forward_backward, optim_step, tensor

BODIES, SEEDS = 2500, 4
_EVENTS = (
    "open",
    "import",
    "exec",
    "compile",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "pickle.find_class",
    "ctypes",
)
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 70, -(1 << 70), 1.5, 1e308, "", "a" * 3000, "../../etc/passwd",
    "tinker://x/weights/y", "\x00", "\ud800", [], [[]], {}, {"a": {}}, [1] * 50, ["x"] * 50, {"__class__": "os.system"},
    "__import__('os')", "s:train:0",
)  # fmt: skip


class Audit:
    """Hook that notes events while it is on; Python cannot remove it."""

    def __init__(self) -> None:
        self.is_on, self.found = False, list[str]()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(_EVENTS):
            self.found.append(f"{event} {str(arguments)[:200]}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes events inside the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


@pytest.fixture(scope="module")
def audit() -> Audit:
    return Audit()


def valid_bodies(own: TinkerCalls, model: str) -> list[tuple[str, Any]]:
    """Returns a valid body of each route."""
    node = {"op": "call_function", "name": "a", "target": "torch.exp", "args": [{"ref": "logprobs"}], "kwargs": {}}
    graph = {"format": 1, "nodes": [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}, node]}
    inputs = [{"name": "logprobs", "rank": 1}, {"name": "advantages", "rank": 1}]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    sampler, session = f"{own.session}:sample:0", own.session
    return [
        ("optim_step", optim_step(model, 1)),
        ("create_model", {"session_id": session, "model_seq_id": 3, "base_model": BASE, "lora_config": {"rank": 8}}),
        ("save_weights", {"model_id": model, "seq_id": 2, "path": "a", "ttl_seconds": 5, "user_metadata": {"a": "b"}}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 1}),
        ("load_weights", {"model_id": model, "seq_id": 3, "path": f"tinker://{model}/weights/a", "optimizer": True}),
        ("load_weights", {"session_id": session, "model_seq_id": 4, "path": "tinker://a/weights/b", "optimizer": True}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 2, "base_model": BASE}),
        ("asample", {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"stop": [1]}}),
        ("create_custom_loss", {"session_id": session, "custom_loss_seq_id": 1, "inputs": inputs, "graph": graph}),
        ("cancel_future", {"request_id": f"{sampler}:1"}),
        ("create_session", {"tags": ["a"], "user_metadata": None, "sdk_version": "0.38.0"}),
        ("session_heartbeat", {"session_id": session}),
        (f"sessions/{session[:-1]}/finish", {"reason": {"type": "success"}}),
        ("get_info", {"model_id": model}),
        ("weights_info", {"tinker_path": f"tinker://{model}/weights/a"}),
        ("telemetry", {"events": [], "platform": "x"}),
    ]


def changed(value: Any, draw: random.Random) -> Any:
    """Returns JSON values with one of them replaced, left out, or named otherwise."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.1:
            return {key: one for key, one in value.items() if key != name}
        if kind < 0.15:
            return {("x" + key if key == name else key): one for key, one in value.items()}
        return value | {name: changed(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [changed(one, draw) if index == at else one for index, one in enumerate(value)]
    return draw.choice(_ODD)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Returns bytes with a few of them changed, cut out or doubled."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del found[at : at + draw.randrange(1, 12)]
            case 2:
                found[at:at] = found[at : at + draw.randrange(1, 40)]
            case _:
                found[at:at] = draw.randbytes(draw.randrange(1, 12))
    return bytes(found)


def fuzz(audit: Audit, seed: int, count: int) -> dict[int, int]:
    """Sends changed bodies; returns the number of replies by status."""
    draw, statuses = random.Random(seed), dict[int, int]()
    with calls(per_session=100_000, depth=100_000) as own:
        model = own.create()
        own.json(
            "create_sampling_session", {"session_id": own.session, "sampling_session_seq_id": 0, "base_model": BASE}
        )
        bodies = valid_bodies(own, model)
        protobufs = [
            forward_backward(model, 1, ((1, 2, 3), (4, 5))),
            forward_backward(
                model, 1, inputs={"target_tokens": tensor(np.ones((3, 2), np.int64)), "w": tensor([1.0, 2, 3], 4)}
            ),
        ]
        for route, body in bodies:  # what is imported or opened once
            own.post(route, body)
        own.post("forward_backward", protobufs[0])
        with audit.watching():
            for _ in range(count):
                if draw.random() < 0.4:
                    reply = own.post("forward_backward", damaged(draw.choice(protobufs), draw))
                else:
                    route, body = draw.choice(bodies)
                    text = json.dumps(changed(body, draw)).encode()
                    reply = own.post(route, damaged(text, draw) if draw.random() < 0.2 else text)
                statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
                assert reply.status_code < 500, reply.text
                if reply.status_code >= 400:
                    assert reply.json()["detail"].endswith("."), reply.text
        assert own.client.get("/api/v1/healthz").status_code == 200
    return statuses


def test_strangers_get_4xx_and_open_nothing(audit: Audit) -> None:
    statuses = fuzz(audit, 0, 600)
    assert audit.found == [] and {200, 400, 404, 422} <= set(statuses), statuses


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
def test_ten_thousand_strangers_get_4xx_and_open_nothing(audit: Audit, seed: int) -> None:
    statuses = fuzz(audit, seed, BODIES)
    assert audit.found == [] and sum(statuses.values()) == BODIES, statuses
