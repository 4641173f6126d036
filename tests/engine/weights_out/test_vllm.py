"""vLLM servers follow a training: order of calls, failures at any call, refusals by name, checksums."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from engine.config import load_config
from engine.errors import ConfigError, EngineError
from engine.outer.messages import StoreRefusedError
from engine.weights_out.blocks import WeightBlocks, deliver
from engine.weights_out.consumers.vllm import VllmServers
from engine.weights_out.version import WeightVersion
from engine.weights_out.vllm_backend import VllmModel
from tests.engine.weights_out.fake_vllm import FakeVllm
from tests.engine.weights_out.trainer import SHAPES, Trainer, random_weights

BUCKET = 600_000
"""Bytes of a bucket: each large tensor has one of its own."""
PREPARE = ["init_weight_transfer_engine", "start_weight_update", *["update_weights"] * 3, "pause"]
INSTALL = ["update_weight_version", "finish_weight_update", "weight_info", "resume"]


def blocks_of(trainer: Trainer, version: WeightVersion, deadline: float = 30.0) -> WeightBlocks:
    return WeightBlocks(trainer.reader(), version, monotonic() + deadline, BUCKET)


def same(one: Mapping[str, Tensor] | None, other: Mapping[str, Tensor]) -> bool:
    return one is not None and one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def fails_once(path: str, failure: Any) -> Any:
    """Returns a function that fails the first request to ``path``."""
    left = [failure]
    return lambda called: left.pop() if called == path and left else None


def test_servers_get_the_blocks_that_changed_and_the_number() -> None:
    trainer, first = Trainer(3), random_weights(1)
    vllm = [FakeVllm(trainer), FakeVllm(trainer)]
    consumer = VllmServers([each.server() for each in vllm])
    assert consumer.last == 0
    for each in vllm:
        each.calls.clear()
    deliver(blocks_of(trainer, trainer.publish(first)), [consumer])
    second = {**first, "layers.0.up.weight": first["layers.0.up.weight"] + 1}
    traffic = [each.staged._reader.traffic for each in vllm if each.staged._reader is not None]
    before = [each.received for each in traffic]
    deliver(blocks_of(trainer, trainer.publish(second)), [consumer])
    changed = second["layers.0.up.weight"].nbytes
    assert [each.received for each in traffic] == [received + changed for received in before]
    for each in vllm:
        assert same(each.weights, second) and each.version == "2" and not each.paused
        assert each.calls == 2 * [*PREPARE, *INSTALL]
    assert consumer.last == VllmServers([vllm[0].server()]).last == 2


@pytest.mark.parametrize("path", [*dict.fromkeys(PREPARE + INSTALL)])
def test_a_call_whose_reply_is_lost_is_repeated(path: str) -> None:
    trainer, weights = Trainer(2), random_weights(1)
    vllm = FakeVllm(trainer)
    vllm.loses = lambda called: called == path and vllm.calls.count(path) == 1
    deliver(blocks_of(trainer, trainer.publish(weights)), [VllmServers([vllm.server()])])
    assert vllm.calls.count(path) > 1
    assert same(vllm.weights, weights) and vllm.version == "1" and not vllm.paused


@pytest.mark.parametrize("path", [*dict.fromkeys(PREPARE)])
def test_a_failure_of_one_server_leaves_the_old_version_on_all(path: str) -> None:
    trainer, old, new = Trainer(2), random_weights(1), random_weights(2)
    vllm = [FakeVllm(trainer), FakeVllm(trainer)]
    consumer = VllmServers([each.server(f"http://vllm{i}") for i, each in enumerate(vllm)])
    deliver(blocks_of(trainer, trainer.publish(old)), [consumer])
    refusal = httpx.Response(500, json={"error": {"message": "no memory"}})
    vllm[1].fails = lambda called: refusal if called == path else None
    with pytest.raises(EngineError, match="the vLLM server http://vllm1: no memory"):
        deliver(blocks_of(trainer, trainer.publish(new)), [consumer])
    for each in vllm:
        assert same(each.weights, old) and each.version == "1" and not each.paused
    vllm[1].fails = lambda called: None
    deliver(blocks_of(trainer, trainer.publish(new)), [consumer])
    assert all(same(each.weights, new) and each.version == "3" for each in vllm)


def test_a_server_without_an_answer_costs_no_more_than_the_deadline() -> None:
    trainer, old = Trainer(2), random_weights(1)
    vllm = [FakeVllm(trainer), FakeVllm(trainer)]
    consumer = VllmServers([each.server(f"http://vllm{i}") for i, each in enumerate(vllm)])
    deliver(blocks_of(trainer, trainer.publish(old)), [consumer])
    vllm[1].fails = lambda called: httpx.ConnectError("no route")
    began = monotonic()
    with pytest.raises(EngineError, match=r"the vLLM server http://vllm1 does not answer .*ConnectError"):
        deliver(blocks_of(trainer, trainer.publish(random_weights(2)), 0.4), [consumer])
    assert monotonic() - began < 3
    assert same(vllm[0].weights, old) and not vllm[0].paused


def test_a_server_that_fails_while_weights_are_replaced_stays_paused() -> None:
    trainer, new = Trainer(2), random_weights(2)
    vllm = FakeVllm(trainer)
    consumer = VllmServers([vllm.server()])
    deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [consumer])
    vllm.fails = lambda called: httpx.Response(500) if called == "finish_weight_update" else None
    with pytest.raises(EngineError, match="the vLLM server http://vllm: status 500"):
        deliver(blocks_of(trainer, trainer.publish(new)), [consumer])
    vllm.fails = fails_once("pause", httpx.Response(500))
    with pytest.raises(EngineError):  # also another training does not resume it
        deliver(blocks_of(trainer, trainer.publish(new)), [VllmServers([vllm.server()])])
    assert vllm.paused and vllm.version == "2 incomplete"
    deliver(blocks_of(trainer, trainer.publish(new)), [VllmServers([vllm.server()])])
    assert same(vllm.weights, new) and vllm.version == "4" and not vllm.paused


def test_an_update_that_a_killed_trainer_has_left_open_is_dropped() -> None:
    trainer, old, new = Trainer(2), random_weights(1), random_weights(2)
    vllm = FakeVllm(trainer)
    deliver(blocks_of(trainer, trainer.publish(old)), [VllmServers([vllm.server()])])
    vllm.server().prepare(blocks_of(trainer, trainer.publish(new)), "http://owner0")
    assert vllm.active and same(vllm.weights, old)
    deliver(blocks_of(trainer, trainer.publish(old)), [VllmServers([vllm.server()])])
    assert same(vllm.weights, old) and vllm.version == "3"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (VllmModel("Other", torch.float32, {}), "the trainer has Model, and vLLM Other"),
        (VllmModel("Model", torch.bfloat16, {}), "'embed.weight' is F32 in the trainer and BF16 in vLLM"),
        (
            VllmModel("Model", torch.float32, {**SHAPES, "layers.1.scale": (7,)}),
            r"'layers.1.scale' has shape \[600\] in the trainer and \[7\] in vLLM",
        ),
        (VllmModel("Model", torch.float32, {**SHAPES, "bias": (7,)}), "vLLM has 'bias', which the trainer does not"),
        (VllmModel("Model", torch.float32, {"head.count": ()}), "publishes 'embed.weight', which vLLM lacks"),
    ],
)
def test_another_model_is_refused_by_name(model: VllmModel, told: str) -> None:
    trainer, began = Trainer(2), monotonic()
    vllm = FakeVllm(trainer, model)
    with pytest.raises(EngineError, match=told):
        deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [VllmServers([vllm.server()])])
    assert (
        monotonic() - began < 1 and "update_weights" not in vllm.calls[: vllm.calls.index("finish_weight_update") - 1]
    )


def test_frozen_weights_that_are_not_published_are_refused_by_name() -> None:
    trainer = Trainer(2, held=("embed.weight",))
    weights = {key: value for key, value in random_weights(1).items() if key != "embed.weight"}
    with pytest.raises(EngineError, match=r"'embed.weight' is frozen .* set weights_out.frozen to true"):
        deliver(blocks_of(trainer, trainer.publish(weights)), [VllmServers([FakeVllm(trainer).server()])])


def test_a_wrong_tensor_is_named() -> None:
    trainer = Trainer(2)
    vllm = FakeVllm(trainer)
    consumer = VllmServers([vllm.server()], check=True)
    deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [consumer])
    vllm.spoils = lambda weights: weights["layers.1.scale"][5].add_(1)
    with pytest.raises(EngineError, match=r"http://vllm has other values of 'layers.1.scale' \(1 tensors\)"):
        deliver(blocks_of(trainer, trainer.publish(random_weights(2))), [consumer])


def test_a_version_that_broke_off_does_not_pass_for_the_one_before() -> None:
    trainer, old = Trainer(1), random_weights(1)
    vllm = FakeVllm(trainer)
    consumer = VllmServers([vllm.server()])
    deliver(blocks_of(trainer, trainer.publish(old)), [consumer])
    assert vllm.staged._reader is not None
    whole, vllm.staged._reader = vllm.staged._reader, trainer.reader(life=900_000)
    with pytest.raises(EngineError, match="the sender is dead"):
        deliver(blocks_of(trainer, trainer.publish(random_weights(2)), 1.0), [consumer])
    vllm.staged._reader = whole
    deliver(blocks_of(trainer, trainer.publish(old)), [consumer])
    assert same(vllm.weights, old) and vllm.version == "3"


def test_a_version_without_a_tensor_is_not_installed() -> None:
    trainer = Trainer(1)
    vllm = FakeVllm(trainer)
    server, version = vllm.server(), trainer.publish(random_weights(1))
    blocks = blocks_of(trainer, version)
    blocks.groups = lambda: [["layers.1.scale"]]  # type: ignore[method-assign]
    server.prepare(blocks, "http://owner0")
    server.pause()
    with pytest.raises(StoreRefusedError, match=r"version 1 of the weights without tensor 'embed\.weight'"):
        server.finish(1)
    assert vllm.weights is None


def test_a_server_without_the_calls_is_named() -> None:
    trainer = Trainer(1)
    vllm = FakeVllm(trainer, fails=lambda called: httpx.Response(404))
    with pytest.raises(
        EngineError, match=r"http://vllm: it has no /init_weight\w+; start vLLM .*VLLM_SERVER_DEV_MODE=1"
    ):
        deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [VllmServers([vllm.server()])])


def test_requests_continue_with_new_weights_after_an_empty_cache() -> None:
    trainer = Trainer(1)
    vllm = FakeVllm(trainer)
    deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [VllmServers([vllm.server(pause="keep")])])
    assert vllm.calls[-2:] == ["reset_prefix_cache", "resume"]


def test_a_word_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"vllm:8000" is not an address; give http://HOST:PORT'):
        load_config({"train_batch_size": 1, "weights_out": {"to": [{"vllm": "vllm:8000"}]}})
