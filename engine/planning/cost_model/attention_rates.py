"""Rates by which attention over context ranks chooses its method: of the GPU type and its links."""

import re

from engine.config import Config
from engine.parallel.context.choose import ASSUMED, AskedMethod, AttentionRates
from engine.planning.cost_model.hardware import known_gpus, load_gpu

_OTHER_LINKS = frozenset(("pcie", "nvl"))
"""Words of card names with other links than those of a GPU type's usual node."""


def asked_method(config: Config, card: str | None) -> AskedMethod:
    """Returns the configured method of context-parallel attention, and GPU and link speeds for the method "auto".

    ``card``: the vendor's name of the GPU; None: unknown.
    """
    return AskedMethod(config.parallel.context_method, attention_rates(config, card))


def attention_rates(config: Config, card: str | None) -> AttentionRates:
    """Returns attention and link rates of the GPU type ``card`` (vendor's device name); assumed rates if it is unknown.

    The link rate is for links within a node if every cp group is on one node, else for links between nodes.
    """
    words = set(re.split(r"[^a-z0-9]+", (card or "").lower()))
    names = words.intersection(known_gpus())
    if not names or words & _OTHER_LINKS:
        return ASSUMED
    gpu = load_gpu(min(names))
    node = config.parallel.gpus_per_node or round(gpu.gpus_per_node)
    inside = all(len({rank // node for rank in group}) == 1 for group in config.grid(0).groups("cp"))
    link, share, latency = (
        (gpu.link_rate, gpu.reached.link, gpu.link_latency)
        if inside
        else (gpu.network_rate, gpu.reached.network, gpu.network_latency)
    )
    place = "within a node" if inside else "between nodes"
    return AttentionRates(gpu.bf16_rate * gpu.reached.attention, link * share, latency, f"rates of {gpu.name} {place}")
