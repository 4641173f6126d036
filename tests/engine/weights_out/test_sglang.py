"""SGLang servers follow a training: broadcasts in a real group, failures at any call, all consumers or none."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from engine.config import load_config
from engine.errors import ConfigError, EngineError
from engine.weights_out.blocks import WeightBlocks, WeightConsumer, deliver
from engine.weights_out.consumers.folder import VersionFolder
from engine.weights_out.consumers.sglang import SglangServers
from engine.weights_out.consumers.vllm import VllmServers
from engine.weights_out.version import WeightVersion
from tests.engine.weights_out.fake_sglang import FakeSglang
from tests.engine.weights_out.fake_vllm import FakeVllm
from tests.engine.weights_out.trainer import Trainer, random_weights

HOST = torch.device("cpu")
BUCKET = 600_000
"""Bytes of a bucket: each large tensor has one of its own."""
JOIN = ["init_weights_update_group", "pause_generation"]
COMMIT = [
    "update_weight_version", "begin_weight_update", "update_weights_from_distributed", "end_weight_update",
    "flush_cache", "update_weight_version", "model_info", "continue_generation",
]  # fmt: skip
CHANGES = ["update_weights_from_distributed", "end_weight_update", "flush_cache", "weights_checker"]
"""Calls between which the live weights may be a mix."""


def blocks_of(trainer: Trainer, version: WeightVersion, deadline: float = 30.0) -> WeightBlocks:
    return WeightBlocks(trainer.reader(), version, monotonic() + deadline, BUCKET)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_ranks_of_all_servers_get_each_version(dtype: torch.dtype) -> None:
    trainer = Trainer(3, dtype)
    sglang = [FakeSglang(1), FakeSglang(2)]
    consumer = SglangServers([each.server() for each in sglang], HOST)
    assert consumer.last == 0
    for each in sglang:
        each.calls.clear()
    for number in (1, 2):
        weights = random_weights(number, dtype)
        deliver(blocks_of(trainer, trainer.publish(weights)), [consumer])
        for each in sglang:
            assert all(same(found, weights) for found in each.weights)
            assert each.version == str(number) and not each.paused and not each.open
    for each in sglang:
        assert [name for name, _ in groupby(each.calls)] == [*JOIN, *COMMIT, JOIN[1], *COMMIT], "one group for all"
        assert each.received == 2 * sum(value.nbytes for value in weights.values())
    assert consumer.last == 2


def test_torch_makes_the_same_group() -> None:
    trainer, weights = Trainer(1), random_weights(1)
    sglang = FakeSglang(by_torch=True)
    deliver(blocks_of(trainer, trainer.publish(weights)), [SglangServers([sglang.server()], HOST)])
    assert same(sglang.weights[0], weights)


@pytest.mark.parametrize("path", JOIN)
def test_a_failure_before_weights_change_leaves_the_old_ones_everywhere(path: str, tmp_path: Path) -> None:
    trainer, old, new = Trainer(2), random_weights(1), random_weights(2)
    sglang, vllm, folder = [FakeSglang(), FakeSglang()], FakeVllm(trainer), VersionFolder(tmp_path)
    servers = SglangServers([each.server(f"http://sglang{i}") for i, each in enumerate(sglang)], HOST)
    consumers: list[WeightConsumer] = [servers, VllmServers([vllm.server()]), folder]
    deliver(blocks_of(trainer, trainer.publish(old)), consumers)
    servers._group = None  # so that it joins again
    refusal = httpx.Response(400, json={"success": False, "message": "no memory"})
    sglang[1].fails = lambda called: refusal if called == path else None
    with pytest.raises(EngineError, match="the SGLang server http://sglang1: no memory"):
        deliver(blocks_of(trainer, trainer.publish(new), 3.0), consumers)
    assert all(same(each.weights[0], old) and each.version == "1" and not each.paused for each in sglang)
    assert vllm.version == "1" and not vllm.paused and folder.numbers == [1] and len([*tmp_path.iterdir()]) == 1
    sglang[1].fails = lambda called: None
    deliver(blocks_of(trainer, trainer.publish(new)), consumers)
    assert all(same(each.weights[0], new) and each.version == "3" for each in sglang)
    assert vllm.version == "3" and folder.numbers == [1, 3]


@pytest.mark.parametrize("path", CHANGES)
def test_a_server_that_fails_while_weights_change_stays_paused_and_others_keep_theirs(
    path: str, tmp_path: Path
) -> None:
    trainer, old, new = Trainer(2), random_weights(1), random_weights(2)
    sglang, vllm, folder = FakeSglang(), FakeVllm(trainer), VersionFolder(tmp_path)
    consumers: list[WeightConsumer] = [
        SglangServers([sglang.server()], HOST, check=True),
        VllmServers([vllm.server()]),
        folder,
    ]
    deliver(blocks_of(trainer, trainer.publish(old)), consumers)
    sglang.fails = lambda called: httpx.Response(500) if called == path else None
    with pytest.raises(EngineError, match="the SGLang server http://sglang: status 500"):
        deliver(blocks_of(trainer, trainer.publish(new), 3.0), consumers)
    assert sglang.paused and sglang.version == "2 incomplete"
    assert vllm.version == "1" and not vllm.paused and folder.numbers == [1]
    sglang.fails = lambda called: None
    deliver(blocks_of(trainer, trainer.publish(new)), consumers)
    assert same(sglang.weights[0], new) and sglang.version == "3" and not sglang.paused


def test_a_consumer_that_is_not_prepared_stops_all(tmp_path: Path) -> None:
    trainer, old, new = Trainer(2), random_weights(1), random_weights(2)
    sglang, vllm, folder = FakeSglang(), FakeVllm(trainer), VersionFolder(tmp_path)
    consumers: list[WeightConsumer] = [SglangServers([sglang.server()], HOST), VllmServers([vllm.server()]), folder]
    deliver(blocks_of(trainer, trainer.publish(old)), consumers)
    vllm.fails = lambda called: httpx.Response(500) if called == "update_weights" else None
    with pytest.raises(EngineError, match="the vLLM server http://vllm: status 500"):
        deliver(blocks_of(trainer, trainer.publish(new)), consumers)
    assert same(sglang.weights[0], old) and (sglang.version, sglang.paused) == ("1", False)
    assert folder.numbers == [1] and len([*tmp_path.iterdir()]) == 1


def test_a_broadcast_whose_reply_is_lost_is_not_repeated() -> None:
    trainer = Trainer(1)
    sglang = FakeSglang()
    sglang.loses = lambda called: called == "update_weights_from_distributed"
    began = monotonic()
    with pytest.raises(EngineError, match="the SGLang server http://sglang does not answer"):
        deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [SglangServers([sglang.server()], HOST)])
    assert sglang.calls.count("update_weights_from_distributed") == 1 and monotonic() - began < 10
    assert sglang.paused and sglang.version == "1 incomplete"


def test_an_update_that_a_killed_trainer_has_left_open_is_ended() -> None:
    trainer, weights = Trainer(1), random_weights(1)
    sglang = FakeSglang(open=True)
    deliver(blocks_of(trainer, trainer.publish(weights)), [SglangServers([sglang.server()], HOST)])
    assert same(sglang.weights[0], weights) and not sglang.open


def test_servers_with_other_parameters_are_named() -> None:
    trainer = Trainer(1)
    sglang = [FakeSglang(), FakeSglang()]
    servers = [each.server(f"http://sglang{i}") for i, each in enumerate(sglang)]

    def spoil(called: str) -> None:
        if called == "weights_checker":
            sglang[1].weights[0]["layers.1.scale"][5] += 1

    consumer, sglang[1].fails = SglangServers(servers, HOST, check=True), spoil
    with pytest.raises(
        EngineError, match="other parameters in the SGLang server http://sglang1 than in http://sglang0"
    ):
        deliver(blocks_of(trainer, trainer.publish(random_weights(1))), [consumer])
    assert sglang[1].version == "1 incomplete"


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({}, "no consumer in one entry; give one of folder, vllm, sglang"),
        ({"vllm": "http://a", "folder": "b"}, "folder and vllm in one entry"),
        ({"sglang": "a:1"}, '"a:1" is not an address; give http://HOST:PORT'),
        ({"sglang": "http://a", "pause": "keep"}, '"keep" is no mode of sglang; give wait, abort, retract, in_place'),
        ({"vllm": "http://a", "pause": "retract"}, '"retract" is no mode of vllm; give wait, abort, keep'),
    ],
)
def test_consumers_are_checked(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        load_config({"train_batch_size": 1, "weights_out": {"to": [entry]}})
