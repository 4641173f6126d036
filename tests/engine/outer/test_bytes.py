"""Pushed bytes of real engines: those that the codecs plan, and their ratio to fp32 gradients in each step."""

from typing import Any

import pytest

import engine
from engine.build import step_parts
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.outer.codecs import make_delta_codec
from tests.engine.outer.thread_sites import ROWS, ThreadSites, config_of, make_store

PERIOD = 100
WHOLE: dict[str, Any] = {"train_micro_batch_size_per_gpu": ROWS}
FEWER = 390
"""Least ratio of the bytes; 400 without scales."""


def small_decoder(width: int) -> Decoder:
    """Returns a decoder; with width 64, that of 137 k parameters."""
    return Decoder(DecoderConfig(vocabulary=256, layers=2, width=width, heads=4, context=64))


def planned(model: Decoder, wire: str) -> int:
    """Returns the bytes of one push of the whole model."""
    codec = make_delta_codec(wire)
    return sum(codec.message_bytes(parameter.numel()) for parameter in model.parameters())


def test_int8_each_hundred_steps_sends_390_times_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sites, small = ThreadSites(monkeypatch), small_decoder(64)
    (rare,) = sites.run({"rule": "diloco", "period": PERIOD, "wire": "int8"}, 1, PERIOD, small, **WHOLE)
    (dense,) = sites.run({"rule": "average", "period": 1}, 1, 2, small, **WHOLE)
    assert rare.outer is not None and dense.outer is not None
    assert rare.outer.pushed_bytes == planned(small, "int8")
    assert dense.outer.pushed_bytes == 2 * planned(small, "fp32")
    assert PERIOD * planned(small, "fp32") >= FEWER * rare.outer.pushed_bytes


@pytest.mark.parametrize("wire", [{"wire": "int4"}, {"wire": "topk", "optimizer": {"type": "SGD", "params": {}}}])
def test_pushed_bytes_are_planned_to_the_byte_for_widths_that_fill_no_block(
    monkeypatch: pytest.MonkeyPatch, wire: dict[str, Any]
) -> None:
    model = small_decoder(20)
    (run,) = ThreadSites(monkeypatch).run({"rule": "average", "period": 2, **wire}, 1, 2, model=model)
    assert run.outer is not None
    assert run.outer.pushed_bytes == planned(model, wire["wire"])


@pytest.mark.parametrize(("outer", "moments"), [(None, 2), ({"rule": "average", "period": 1}, 2), ({"rule": "ssp"}, 0)])
def test_a_site_has_no_optimizer_state_if_the_store_has_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, outer: dict[str, Any] | None, moments: int
) -> None:
    model = small_decoder(64)
    if outer is not None:
        store = make_store(config_of(outer))
        monkeypatch.setattr(step_parts, "open_link", lambda config, fragments: store)
    eng = engine.initialize(model, config_of(outer), loss_fn=loss_sum)
    assert eng.plan.state(eng.grid.coord()).device["optimizer"] == moments * planned(model, "fp32")
    eng.close()
