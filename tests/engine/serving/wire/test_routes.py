"""Tinker's routes in process: each reply as the client reads it, each refusal with its status and a sentence."""

import json
from typing import Any

import numpy as np
import pytest

from engine.serving.commands import ForwardBackward, PlainOutput, SampleTokens
from engine.serving.wire import routes
from engine.serving.wire.messages import message_class
from tests.engine.serving.executors import VOCABULARY
from tests.engine.serving.wire.tinker_calls import BASE, TinkerCalls, calls, forward_backward, optim_step, tensor

SAMPLER = {"session_id": "SESSION", "sampling_session_seq_id": 1}
LOSS = {"session_id": "SESSION", "custom_loss_seq_id": 1, "inputs": [{"name": "logprobs", "rank": 1}], "graph": {}}


def test_a_training_run_of_all_calls() -> None:
    with calls() as own:
        model = own.create(rank=4, user_metadata={"renderer": "qwen3"})
        assert model == f"{own.session}:train:0"
        info = own.json("get_info", {"model_id": model})
        assert (info["is_lora"], info["lora_rank"], info["model_data"]["model_name"]) == (True, 4, BASE)
        output = message_class("ForwardBackwardOutput").FromString(
            own.result("forward_backward", forward_backward(model, 1, ((1, 2, 3), (4, 5))))
        )
        (record,) = output.loss_fn_outputs
        field = record.fields["logprobs"]
        assert record.num_datums == 2 and np.frombuffer(field.offsets, np.int64).tolist() == [0, 12, 20]
        assert np.frombuffer(field.data, np.float32).tolist() == [7.0] * 5 and output.metrics["loss:sum"] == 7.0
        assert own.result("optim_step", optim_step(model, 2))["metrics"]["version"] > 0
        path = own.result("save_weights", {"model_id": model, "seq_id": 3, "path": "a"})["path"]
        assert path == f"tinker://{model}/weights/a"
        again = own.result("save_weights", {"model_id": model, "seq_id": 4, "path": "a"})
        assert again["category"] == "user" and "exists" in again["error"]
        assert (
            own.result("save_weights", {"model_id": model, "seq_id": 5, "path": "a", "overwrite": True})["path"] == path
        )
        named = own.result("save_weights_for_sampler", {"model_id": model, "seq_id": 6, "path": "s"})
        assert named["path"] == f"tinker://{model}/sampler_weights/s"
        body = {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 3}
        assert own.result("save_weights_for_sampler", body)["sampling_session_id"] == f"{own.session}:sample:3"
        assert (
            own.result("load_weights", {"model_id": model, "seq_id": 8, "path": path, "optimizer": True})["path"]
            == path
        )
        new = {"session_id": own.session, "model_seq_id": 9, "path": path, "optimizer": False}
        assert own.result("load_weights", new)["model_id"] == f"{own.session}:train:9"
        assert own.executor.models[f"{own.session}:train:9"][0] == own.executor.models[model][0]
        assert own.json("weights_info", {"tinker_path": path})["lora_rank"] == 4
        run = own.client.get(f"/api/v1/training_runs/{model}").json()
        assert run["user_metadata"] == {"renderer": "qwen3"} and run["last_checkpoint"]["checkpoint_id"] == "weights/a"
        listed = own.client.get("/api/v1/checkpoints?limit=1&offset=1").json()
        assert listed["cursor"] == {"offset": 1, "limit": 1, "total_count": 2} and len(listed["checkpoints"]) == 1
        assert own.client.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a").status_code == 200
        assert own.refused("weights_info", {"tinker_path": path})[0] == 404
        session = own.client.get(f"/api/v1/sessions/{own.session}").json()
        assert (session["training_run_ids"], session["display_name"]) == ([model, f"{own.session}:train:9"], None)
        assert session["sampler_ids"] == [f"{own.session}:sample:3"]
        newer = own.json("create_session", {"tags": [], "sdk_version": "0.38", "user_metadata": {"who": "me"}})
        listed = own.client.get("/api/v1/sessions?limit=20&offset=0&access_scope=owned").json()
        assert listed["sessions"] == [newer["session_id"], own.session]
        assert own.client.get("/api/v1/sessions?limit=1&offset=1").json()["sessions"] == [own.session]
        about = own.client.get(f"/api/v1/sessions/{newer['session_id']}").json()
        assert about["user_metadata"] == {"who": "me"} and about["training_run_ids"] == []
        assert own.client.get("/api/v1/sessions/none").status_code == 404
        assert own.result("unload_model", {"model_id": model})["model_id"] == model
        assert own.refused("optim_step", optim_step(model, 9))[0] == 404


def test_chunks_may_come_in_any_order_and_twice() -> None:
    with calls() as own:
        model, bodies = own.create(), {}
        for number in (3, 1, 2):
            bodies[number] = forward_backward(model, number, ((number,),))
            keys = [own.json("forward_backward", bodies[number])["request_id"] for _ in range(2)]
            assert keys == [f"{model}:{number}"] * 2
        own.poll(f"{model}:3")
        assert own.executor.log == ["CreateModel"] + ["ForwardBackward"] * 3
        status, sentence = own.refused("forward_backward", forward_backward(model, 2, ((9,),)))
        assert status == 400 and "was used before for another request" in sentence


def test_sparse_and_bf16_tensors_arrive_in_full() -> None:
    with calls() as own:
        model, seen = own.create(), list[ForwardBackward]()
        real = own.executor.run

        def run(command: Any) -> Any:
            if isinstance(command, ForwardBackward):
                seen.append(command)
            return real(command)

        own.executor.run = run  # type: ignore[method-assign]
        full = np.array([[0, 5, 0], [0, 0, 0], [7, 0, 9]], np.int64)
        sparse = message_class("Tensor")(dtype=2, shape=(3, 3))
        sparse.sparse_csr.values = np.array([5, 7, 9], np.int64).tobytes()
        sparse.sparse_csr.crow_indices = np.array([0, 1, 1, 3], np.int64).tobytes()
        sparse.sparse_csr.col_indices = np.array([1, 0, 2], np.int64).tobytes()
        halves = tensor(np.array([1.5, -2.0, 0.25]), 4)
        body = forward_backward(model, 1, ((1, 2, 3),), inputs={"target_tokens": sparse, "weights": halves})
        own.result("forward_backward", body)
        (datum,) = seen[0].data
        assert (datum.inputs["target_tokens"] == full).all() and datum.inputs["weights"].tolist() == [1.5, -2.0, 0.25]
        assert datum.tokens.dtype == np.int64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": ()}, "data is empty"),
        ({"rows": ((),)}, "has 0 tokens; give 1 to 256"),
        ({"rows": ((1,) * 300,)}, "has 300 tokens"),
        ({"rows": ((VOCABULARY,),)}, "a token outside of 0 to 255"),
        ({"rows": ((-1,),)}, "a token outside"),
        ({"inputs": {"target_tokens": tensor(np.ones(2, np.int64))}}, "and model_input has 3 tokens"),
        ({"inputs": {"target_tokens": tensor(np.ones(3))}}, "give an integer target"),
        ({"inputs": {"weights": tensor(np.ones(3), 9 - 5)}, "rows": ((1, 2),)}, ""),
        ({"inputs": {str(at): tensor(np.ones(1)) for at in range(17)}}, "loss_fn_inputs has 17 tensors"),
        ({"inputs": {"w": message_class("Tensor")(dense=b"123", dtype=1, shape=(1,))}}, "no multiple of 4"),
        ({"inputs": {"w": message_class("Tensor")(dense=b"1234", dtype=1, shape=(2,))}}, "make them equal"),
        ({"inputs": {"w": message_class("Tensor")(dense=b"1234", dtype=7, shape=(1,))}}, "has the dtype 7"),
        ({"inputs": {"w": message_class("Tensor")(dtype=1, shape=(1 << 40, 1 << 40))}}, "at most 16,777,216"),
    ],
)  # fmt: skip
def test_a_wrong_datum_fails_its_future_and_the_next_number_runs(change: dict[str, Any], words: str) -> None:
    with calls() as own:
        model = own.create()
        failed = own.result("forward_backward", forward_backward(model, 1, **change))
        if words:
            assert failed["category"] == "user" and words in failed["error"] and failed["error"].endswith(".")
        assert "metrics" in own.result("optim_step", optim_step(model, 2))


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("optim_step", b"{", 400, "no JSON object"),
        ("optim_step", b"[1]", 400, "no JSON object"),
        ("optim_step", b'{"a": NaN}', 400, "no JSON object"),
        ("optim_step", b"[" * 5000, 400, "no JSON object"),
        ("optim_step", {"model_id": "x"}, 422, "seq_id is missing"),
        ("optim_step", {"model_id": 4, "seq_id": 1}, 422, "model_id is 4"),
        ("optim_step", {"model_id": "s:train:0", "seq_id": 1}, 404, "is unknown"),
        ("create_model", {"session_id": "SESSION", "model_seq_id": 5, "base_model": "other"}, 400, "is not served"),
        ("create_model", {"session_id": "nobody", "model_seq_id": 5, "base_model": BASE}, 404, "is unknown"),
        (
            "create_model",
            {"session_id": "SESSION", "model_seq_id": 5, "base_model": BASE, "optimizer_config": {"type": "dimuon"}},
            400,
            "adamw only",
        ),
        ("create_sampling_session", SAMPLER | {"model_path": "../x"}, 404, "saved weights"),
        ("asample", {"sampling_session_id": "nobody", "seq_id": 1, "prompt": {"chunks": []}}, 404, "is unknown"),
        ("retrieve_future", {"request_id": "SESSION:train:0:1"}, 404, "is unknown"),
        ("retrieve_future", {}, 422, "request_id is missing"),
        ("session_heartbeat", {"session_id": "gone"}, 410, "is unknown"),
        ("get_info", {"model_id": "gone"}, 404, "is unknown"),
        ("forward_backward", b"\xff\xff\xff", 400, "in protobuf"),
        ("forward_backward", forward_backward("x", 0), 422, "from 1"),
        ("forward_backward", b"\x1a\x00" * 9000, 413, "8,192 data"),
        ("forward_backward", b"\x1a" + b"\x80\x80\x20" + b"\x0a\x00" * 262144, 413, "8,192 data"),
        ("create_custom_loss", LOSS | {"inputs": []}, 422, "logprobs"),
        ("create_custom_loss", LOSS | {"graph": {"nodes": [{"op": "call_module"}]}}, 422, "call_module"),
        ("nothing", {}, 404, "is no request"),
    ],
)  # fmt: skip
def test_a_refused_request_has_a_status_and_a_sentence(route: str, body: Any, status: int, words: str) -> None:
    with calls() as own:
        if isinstance(body, dict):
            body = json.loads(json.dumps(body).replace("SESSION", own.session))
        found, sentence = own.refused(route, body)
        assert (found, words in sentence, sentence.endswith(".")) == (status, True, True), sentence


def test_a_body_above_the_limit_is_413_and_compressed_ones_are_415() -> None:
    with calls(body_bytes=2000) as own:
        assert own.refused("telemetry", b" " * 2001)[0] == 413
        assert own.post("telemetry", b" " * 10, **{"content-encoding": "zstd"}).status_code == 415

        def parts() -> Any:
            yield from (b" " * 500 for _ in range(10))

        assert own.client.post("/api/v1/telemetry", content=parts()).status_code == 413


@pytest.mark.parametrize("key", ["", "secre", "secret2", "tml-secret2", "Secret", "\N{BULLET}"])
def test_without_the_token_nothing_is_answered_but_health(key: str) -> None:
    with calls(token="secret") as own:
        for headers in ({"x-api-key": key.encode()}, {"authorization": b"Bearer " + key.encode()}, {}):
            own.client.headers = {}
            reply = own.client.post("/api/v1/create_session", content=b"{}", headers=headers)  # type: ignore[arg-type]
            assert reply.status_code == 401 and "X-API-Key" in reply.json()["detail"]
        assert own.client.get("/api/v1/healthz").json() == {"status": "ok"}
        assert own.client.get("/v1/status").status_code == 401
        for good in ({"x-api-key": "tml-secret"}, {"authorization": "Bearer secret"}):
            assert own.client.get("/v1/status", headers=good).status_code == 200


def sampled(own: TinkerCalls, number: int = 0, **body: Any) -> dict[str, Any]:
    """Returns the body of an asample in a session on the base model."""
    own.json("create_sampling_session", {"session_id": own.session, "sampling_session_seq_id": 0, "base_model": BASE})
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    given = {"sampling_session_id": f"{own.session}:sample:0", "seq_id": number, "num_samples": 2, "prompt": prompt}
    return {**given, "sampling_params": {"max_tokens": 3}, **body}


def test_a_sample_has_ids_tokens_and_the_models_end() -> None:
    with calls() as own:
        seen, real = list[SampleTokens](), own.executor.run
        own.executor.run = lambda command: (seen.append(command), real(command))[1]  # type: ignore[method-assign, arg-type, func-returns-value]
        accepted = own.json("asample", sampled(own))
        assert accepted["sample_sequence_ids"] == [f"{own.session}:sample:0:0:{at}" for at in range(2)]
        reply = message_class("SampleResponse").FromString(own.poll(accepted["request_id"]))
        assert [np.frombuffer(one.tokens, np.int32).tolist() for one in reply.sequences] == [[3, 4, 5]] * 2
        own.result("asample", sampled(own, 1, sampling_params={"stop": [], "temperature": 0.0}))
        own.result("asample", sampled(own, 2, sampling_params={"stop": [5, 6], "seed": 11}))
        commands = [one for one in seen if isinstance(one, SampleTokens)]
        assert [one.parameters.stops for one in commands] == [((2,),), (), ((5,), (6,))]
        assert commands[1].parameters.max_tokens == 254 and commands[2].parameters.seed == 11
        assert own.refused("asample", sampled(own, 3, sampling_params={"stop": "text"}))[0] == 422
        assert own.refused("asample", sampled(own, 3, prompt_alt_tokens_k=2))[0] == 400
        assert "importance_sampling" in own.refused("asample", sampled(own, 3, record_stability_info=True))[1]
        assert own.refused("asample", sampled(own, 3, num_samples=0))[0] == 422


def test_of_unnamed_saves_the_newest_are_retained() -> None:
    with calls() as own:
        model = own.create()
        for number in range(1, 13):
            body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": number}
            own.result("save_weights_for_sampler", body)
        own.result("optim_step", optim_step(model, 13))
        assert len(own.executor.saved) == 8
        body = sampled(own) | {"sampling_session_id": f"{own.session}:sample:1"}
        assert own.refused("asample", body)[0] == 404


def test_a_poll_ends_with_408_and_the_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with calls() as own:
        model = own.create()
        monkeypatch.setattr(routes, "POLL_SECONDS", 0.05)
        own.json("optim_step", optim_step(model, 2))
        reply = own.post("retrieve_future", {"request_id": f"{model}:2"})
        assert reply.status_code == 408 and reply.json()["type"] == "try_again"
        assert reply.json()["queue_state_reason"] == "number 1 of its model has not arrived"


def test_a_full_queue_is_429_with_a_time_to_repeat() -> None:
    with calls(per_session=2) as own:
        model = own.create()
        for number in (2, 3):
            own.json("optim_step", optim_step(model, number))
        reply = own.post("optim_step", optim_step(model, 4))
        assert reply.status_code == 429 and reply.headers["retry-after"] == "2"
        assert "metrics" in own.result("optim_step", optim_step(model, 1))


def test_a_repeated_create_session_opens_one() -> None:
    with calls() as own:
        first, second = (
            own.post("create_session", {"tags": ["a"]}, **{"x-idempotency-key": "k1"}).json() for _ in range(2)
        )
        assert first == second and len(own.ledger.sessions) == 2


def test_a_finished_session_is_gone() -> None:
    with calls() as own:
        own.create()
        assert own.post(f"sessions/{own.session}/finish", {"reason": {"type": "success"}}).status_code == 200
        status, sentence = own.refused("session_heartbeat", {"session_id": own.session})
        assert status == 410 and "was finished by its client" in sentence
        while own.ledger.sessions:
            pass
        assert own.executor.log == ["CreateModel", "UnloadModel"]


def test_numbers_that_are_not_finite_are_text_in_json() -> None:
    with calls() as own:
        model, real = own.create(), own.executor.run
        own.executor.run = lambda command: (real(command), PlainOutput({"norm": float("nan")}))[1]  # type: ignore[method-assign]
        assert own.result("optim_step", optim_step(model, 1))["metrics"] == {"norm": "nan"}


def test_the_status_has_model_tenants_and_routes() -> None:
    with calls() as own:
        model = own.create()
        own.result("forward_backward", forward_backward(model, 1))
        status = own.client.get("/v1/status").json()
        (tenant,) = status["tenants"]
        assert (tenant["model"], tenant["done"], tenant["losses"]) == (model, 1, [7 / 3])
        assert status["model"]["grid"] == "tp2" and status["routes"]["/api/v1/forward_backward"]["requests"] == 1
