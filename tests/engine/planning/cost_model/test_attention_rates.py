"""Rates of attention by the name of the GPU and the place of context ranks."""

from typing import Any

import pytest

from engine.config import Config, load_config
from engine.parallel.context.choose import ASSUMED
from engine.planning.cost_model.attention_rates import attention_rates
from engine.planning.cost_model.hardware import known_gpus, load_gpu


def _config(ranks: int = 8, **parallel: Any) -> Config:
    return load_config({"train_micro_batch_size_per_gpu": 1, "parallel": parallel}, ranks)


@pytest.mark.parametrize(
    ("card", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("AMD Instinct MI300X", "mi300x"),
        *((load_gpu(name).name, name) for name in known_gpus()),
    ],
)
def test_a_known_card_has_its_rates(card: str, gpu: str) -> None:
    found, spec = attention_rates(_config(context=8), card), load_gpu(gpu)
    assert found.bandwidth == spec.link_rate * spec.reached.link
    assert spec.name in found.source


@pytest.mark.parametrize("card", [None, "", "cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB"])
def test_an_unknown_card_has_assumed_rates(card: str | None) -> None:
    assert attention_rates(_config(context=8), card) is ASSUMED


def test_context_ranks_on_several_nodes_have_the_rates_of_the_network() -> None:
    gpu = load_gpu("h100")
    inside = attention_rates(_config(16, context=8), gpu.name)
    for config in (_config(16, context=16), _config(8, context=8, gpus_per_node=4)):
        between = attention_rates(config, gpu.name)
        assert between.bandwidth == gpu.network_rate * gpu.reached.network < inside.bandwidth
        assert "between nodes" in between.source and "within a node" in inside.source
