"""Servers of weights: tokens, addresses, requests of strangers, leases of readers."""

import json
from dataclasses import asdict
from time import monotonic
from typing import Any

import httpx
import pytest
import torch

import engine
from engine.errors import ConfigError, EngineError
from engine.models.decoder import loss_sum
from engine.outer.http.requests import Done
from engine.outer.messages import StoreRefusedError
from engine.web.json_text import dump_json
from engine.weights_out.reader import WeightReader
from engine.weights_out.receiver import follow
from engine.weights_out.version import BLOCKS, CLOSE, GEOMETRY, HASHES, NEWEST, OPEN, BlocksCall, HashesCall, LeaseCall
from tests import models
from tests.engine.weights_out.trainer import Trainer, has, random_weights, receiver_of, targets

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def started(**weights_out: Any) -> engine.Engine:
    config = {**CONFIG, "weights_out": weights_out}
    return engine.initialize(models.decoder(), config, loss_sum, models.batches_for("decoder", 4, 1)[0])


def test_a_token_is_needed_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_WEIGHTS_TOKEN", "secret")
    with started() as eng:
        url = eng.publish_weights().url
        for path in (GEOMETRY, NEWEST, HASHES):
            assert httpx.get(url + path).status_code == 401
        with pytest.raises(EngineError, match="wrong token or none; give trainer and receivers the same TRINE_WEIGHTS"):
            WeightReader(url, "other").geometry()
        assert follow(models.decoder(), url, "secret").update() is not None


def test_weights_without_a_token_are_served_to_this_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINE_WEIGHTS_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"weights_out\.host: 0\.0\.0\.0 lets other hosts connect"):
        started(host="0.0.0.0")


def test_publishing_needs_the_section() -> None:
    with (
        engine.initialize(models.decoder(), CONFIG, loss_sum, models.batches_for("decoder", 4, 1)[0]) as eng,
        pytest.raises(EngineError, match=r"without .weights_out. in the configuration"),
    ):
        eng.publish_weights()


def test_another_model_is_refused_within_a_second_of_a_real_server() -> None:
    with started() as eng:
        url, began = eng.publish_weights().url, monotonic()
        for other, message in (
            (models.decoder(layers=3), "which the trainer does not publish"),
            (models.decoder(layers=1), "which the receiver lacks"),
            (models.decoder().bfloat16(), "is F32 .* in the trainer and BF16"),
            (models.nano(), "the trainer has Decoder, and the receiver NanoGPT|the receiver"),
        ):
            with pytest.raises(EngineError, match=message):
                follow(other, url)
        assert monotonic() - began < 4  # each builds its connection


@pytest.mark.parametrize(
    ("path", "data", "status", "message"),
    [
        ("/v1/weights/other", b"{}", 404, "is no request to this rank"),
        (HASHES, b"[1]", 400, "the request is no HashesCall"),
        (HASHES, b"{" * 10_000, 400, "the request is no HashesCall"),
        (HASHES, dump_json({**asdict(HashesCall("run", 1, 0, ())), "more": 1}), 400, "no field of this message"),
        (BLOCKS, dump_json(BlocksCall(1, 0, "unknown", ())), 410, "before their hashes"),
        (BLOCKS, dump_json(BlocksCall(1, 0, "LAYOUT", ((99, 0, 1),))), 400, "blocks that do not exist"),
        (BLOCKS, dump_json(BlocksCall(1, 0, "LAYOUT", ((0, 0, 10**9),))), 400, "blocks that do not exist"),
        (BLOCKS, dump_json(BlocksCall(1, 0, "LAYOUT", ((0, 0, 1),) * 60)), 413, "more than 4,194,304 bytes at once"),
        (BLOCKS, dump_json(BlocksCall(0, 0, "LAYOUT", ((0, 0, 1),))), 410, "version 0 is over"),
        (BLOCKS, dump_json(BlocksCall(2, 0, "LAYOUT", ((0, 0, 1),))), 503, "version 2 is not complete"),
        (BLOCKS, dump_json(BlocksCall(1, 7, "LAYOUT", ((0, 0, 1),))), 410, "owner 7 is not served here"),
        (OPEN, dump_json(LeaseCall("ran", 1, "me", 1.0)), 410, "version 1 is of an earlier run"),
        (OPEN, dump_json(LeaseCall("run", 7, "me", 1.0)), 410, "version 7 is not the newest one"),
        (OPEN, dump_json(LeaseCall("run", 1, "me", -1.0)), 400, "reads for -1.0 seconds"),
    ],
)  # fmt: skip
def test_requests_of_strangers_have_a_status_and_a_sentence(path: str, data: bytes, status: int, message: str) -> None:
    trainer = Trainer(1)
    trainer.publish(random_weights(1))
    server, wanted = trainer.servers["http://owner0"], tuple(trainer.geometry.whole(key) for key in trainer.weights)
    layout = json.loads(b"".join(server.answer(HASHES, dump_json(HashesCall("run", 1, 0, wanted))).parts))["layout"]
    with pytest.raises(StoreRefusedError, match=message) as refusal:
        server.answer(path, data.replace(b"LAYOUT", layout.encode()))
    assert refusal.value.status == status
    live = targets(0, 1)
    receiver_of(trainer.reader(), live).update()
    assert has(live, trainer.weights)


def test_a_version_that_is_read_is_not_replaced_by_steps_and_ends_at_its_deadline() -> None:
    batch = models.batches_for("decoder", 4, 1)[0]
    with started(every=1, deadline=0.5) as eng:
        publisher = eng._parts.publisher
        assert publisher is not None
        eng.train_batch(batch)
        reader = WeightReader(publisher.url, deadline=0.5)
        version = reader.newest()
        assert version is not None
        with reader.leased(None, monotonic() + 60) as found:
            assert found == version
            eng.train_batch(batch)
            assert reader.newest() == version, "a step waits for nobody"
            began = monotonic()
            assert eng.publish_weights().number == version.number + 1
            assert 0.3 < monotonic() - began < 5, "a call waits for the deadline of the trainer"
        for _ in range(2):
            eng.train_batch(batch)
        publisher._reads.wait()  # a thread offers the version of a step
        newest = reader.newest()
        assert newest is not None and newest.number == version.number + 3
        with reader.leased(version, monotonic() + 60) as found:
            assert found == newest
            reader._open(reader.url).ask(CLOSE, LeaseCall(newest.run, newest.number, reader._name, 1.0), Done)
            eng.train_batch(batch)
            assert reader.newest() != newest, "a reader that has ended keeps nothing"


def test_the_dtypes_of_forward_are_published() -> None:
    config = {**CONFIG, "bf16": {"enabled": True}, "weights_out": {}}
    with engine.initialize(models.decoder(), config, loss_sum, models.batches_for("decoder", 4, 1)[0]) as eng:
        model = models.decoder().bfloat16()
        assert follow(model, eng.publish_weights().url).update() is not None
        state = eng.full_state_dict()
        assert all(torch.equal(value, state[key].bfloat16()) for key, value in model.state_dict().items())


def test_a_port_in_use_is_named() -> None:
    with started() as eng:
        port = int(eng.publish_weights().url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"weights_out: port {port} of 127.0.0.1 cannot be served"):
            started(port=port)


def test_a_version_that_is_replaced_before_its_lease_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, weights = Trainer(1), random_weights(2)
    trainer.publish(random_weights(1))
    live, reader = targets(0, 1), trainer.reader()
    receiver, newest = receiver_of(reader, live), reader.newest

    def late(until: float | None = None) -> Any:
        found = newest(until)
        if trainer.number == 1:
            trainer.publish(weights)
        return found

    monkeypatch.setattr(reader, "newest", late)
    version = receiver.update()
    assert version is not None and version.number == 2 and has(live, weights)
