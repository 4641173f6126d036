"""The simulated sites train as the rules say, their bytes are those of the messages, and gaps are fractions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.outer.command import BYTES, FEWER, RISE, SHARE, cells_of, feedback_forms, recovered
from benchmarks.outer.sites import CLIPPING, PEAK, WARM_UP, Outcome, train_apart
from benchmarks.outer.text import loss_of, make_model, training_rows
from engine.config.outer_section import OuterConfig
from engine.outer.codecs import make_delta_codec

STEPS = 3


def loop(sites: int, **settings: Any) -> OuterConfig:
    return OuterConfig(sites=sites, weights="equal", **settings)


def trained_together(sites: int) -> dict[str, Tensor]:
    """Train one model on the rows of all sites, with plain torch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
    for step in range(1, STEPS + 1):
        sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for site in range(sites):
            model.zero_grad()
            torch.autograd.backward(loss_of(model, training_rows(site, step)))
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / sites
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.param_groups[0]["lr"] = PEAK * step / WARM_UP * {1: 0.775, 2: 0.325, 3: 0.1}[step]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "outer",
    [
        loop(2, period=1, rule="average"),
        loop(1, period=2, rule="average", wire="fp64"),
        loop(1, period=2, rule="average", wire="fp64", fragments=2),
    ],
)
def test_period_one_and_one_site_are_plain_training_to_the_bit(outer: OuterConfig) -> None:
    found, plain = train_apart(outer, STEPS).weights, trained_together(outer.sites)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_sites_apart_differ_from_sites_together() -> None:
    found, plain = train_apart(loop(2, period=3, rule="average"), STEPS).weights, trained_together(2)
    assert max(float((found[name] - plain[name]).abs().max()) for name in plain) > 1e-5


@pytest.mark.parametrize("wire", ["int8", "topk"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_pushed_bytes_are_those_of_the_messages(wire: str, fragments: int) -> None:
    codec = make_delta_codec(wire)
    whole = sum(codec.message_bytes(parameter.numel()) for parameter in make_model().parameters())
    found = train_apart(loop(2, period=2, rule="average", wire=wire, fragments=fragments, feedback=0.5), 4)
    # one fragment after steps 2 and 4; the other one after steps 1 and 3, and at the end
    assert found.pushed == 2 * whole if fragments == 1 else 2 * whole < found.pushed < 3 * whole


def test_the_gap_is_the_loss_between_dense_and_sparse_pushes() -> None:
    names = ["synchronous, period 1", *(form.name for form in feedback_forms(10))]
    losses, sizes = (2.0, 2.2, 2.6, 2.3, 2.5), (4_000, 400, 40, 40, 20)
    outcomes = {name: Outcome(loss, size, {}) for name, loss, size in zip(names, losses, sizes, strict=True)}
    cells = cells_of(outcomes, 10)
    assert cells[names[2], RISE] == "+30.0%" and cells[names[0], BYTES] == "4,000"
    assert cells[names[4], FEWER] == "200 x" and cells[names[1], SHARE] == ""
    assert (cells[names[3], SHARE], cells[names[4], SHARE]) == ("75%", "25%")
    assert recovered(*(outcomes[name] for name in names[1:4])) == pytest.approx(0.75)
