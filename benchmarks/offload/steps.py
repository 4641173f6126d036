"""Seconds of whole steps with optimizer state on the device and on the host, next to a lower bound.

bound    forward and backward without an update, plus the bytes of the update at the rate of a plain copy
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import engine
from benchmarks.offload.turns import Work, medians
from benchmarks.peers.zero_offload import ZeroOffloadPeer
from engine.models.decoder import Decoder, DecoderConfig, loss_sum

RULE_BYTES = 28
"""Bytes per fp32 element: weight, gradient and two moments read; weight and moments written."""
ENGINE_BYTES = RULE_BYTES + 8 + 8 + 6 + 6 + 4
"""Bytes per element that the engine moves: AdamW's, plus gradient copy, scaling, check for written weights, and
cast.
"""
VOCABULARY, LENGTH, ROWS = 4096, 64, 4
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "on the device": {},
    "half of it on the host": {"device": "cpu", "ratio": 0.5},
    "on the host": {"device": "cpu"},
}
BARE, COPY, PEER = "without an update", "a plain copy", "DeepSpeed ZeRO-Offload"
COPIED = 1 << 24
"""Number of elements of the copy that measures the rate."""


def step_cells(rounds: int, peers: str) -> dict[tuple[str, str], str]:
    """Measures milliseconds of each placement of the state, relative to the device and to the bound."""
    engines = {name: _engine(dict(offload)) for name, offload in PLACEMENTS.items()}
    bare = _engine({"device": "cpu"})
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    works: dict[str, Work] = {name: partial(eng.train_batch, batch) for name, eng in engines.items()}
    works[BARE] = partial(_without_update, bare, batch)
    source, target = torch.ones(COPIED), torch.zeros(COPIED)
    works[COPY] = partial(target.copy_, source)
    if "deepspeed" in peers.split(","):
        works |= _peer(batch)
    seconds = medians(works, rounds)
    least = seconds[BARE] + bare.plan.rank(0).parameters * ENGINE_BYTES / (8 * COPIED / seconds[COPY])
    cells = {}
    for name in (*PLACEMENTS, BARE, *(name for name in works if name == PEER)):
        cells[name, "step"] = f"{1e3 * seconds[name]:.0f} ms"
        cells[name, "ratio"] = f"{seconds[name] / seconds['on the device']:.2f}"
        cells[name, "of the bound"] = f"{seconds[name] / least:.2f}" if name != BARE else ""
        plan = engines[name].plan.rank(0) if name in engines else None
        cells[name, "device"] = f"{sum(plan.state_bytes.values()) / 2**20:.0f} MiB" if plan else ""
        cells[name, "host"] = f"{sum(plan.host_bytes.values()) / 2**20:.0f} MiB" if plan else ""
    for eng in (*engines.values(), bare):
        eng.close()
    return cells


def _without_update(eng: engine.Engine, batch: Mapping[str, Tensor]) -> None:
    eng.backward(loss_sum(eng(batch), batch))
    eng.zero_grad()


def _peer(batch: Mapping[str, Tensor]) -> dict[str, Work]:
    try:
        return {PEER: partial(ZeroOffloadPeer(_model(), ROWS).step, batch)}
    except Exception as error:  # an optional peer, whose parts may fail to build in many ways
        print(f"{PEER} is left out: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return {}


def _model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocabulary=VOCABULARY, layers=4, width=256, heads=4, context=LENGTH))


def _engine(offload: dict[str, Any]) -> engine.Engine:
    config = {
        "train_batch_size": ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1 << 20, "offload_optimizer": offload},
    }
    return engine.initialize(_model(), config, loss_sum)
