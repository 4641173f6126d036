"""The benchmark of tensor parallelism: its rows, their limits, and tiny runs that train as one process."""

import pytest
import torch

from benchmarks.harness.footprint import Footprint
from benchmarks.harness.report import Sample, loss_spread, medians
from benchmarks.peers.models import Fused, FusedBlock, Name, SplitBlock
from benchmarks.peers.workload import Mode, Workload, make_rows
from benchmarks.training import tensor
from benchmarks.training.comparison import Effort, conclude, measure
from benchmarks.training.lineups import ONE, TENSOR_LOSS_TOLERANCE, make_tensor_lineup
from engine.models.decoder import DecoderConfig

SIZES = DecoderConfig(layers=2, width=32, heads=4, context=16)
HIDDEN = 4 * 16 * 32 * 4
"""Bytes of the hidden states of the whole batch."""


def tiny(model: Name) -> Workload:
    return Workload(SIZES, sequences=4, epsilon=tensor.EPSILON, model=model)


def rows(model: Name, *names: str) -> list[Mode]:
    return [mode for mode in make_tensor_lineup(model, (2, 4)).modes if mode.name in names]


@pytest.mark.parametrize(
    ("seconds", "loss", "well"),
    [(1.2, 5.0, True), (1.3, 5.0, False), (1.2, 5.00001, False)],
    ids=["within", "slow", "another loss"],
)
def test_a_limit_that_is_missed_fails(seconds: float, loss: float, well: bool) -> None:
    nothing = Footprint(0, 0, 0, 0, 0, 0, 0)
    lineup = make_tensor_lineup("llama", (2,))
    samples = [
        Sample(mode.name, 1.0, seconds if mode.name == "Trine tp2" else 1.0, 0.0, 5.0, None, nothing)
        for mode in lineup.modes[:-1]
    ]
    text, _, passed = conclude([[*samples, Sample("torch DTensor tp2", 1.0, 1.0, 0.0, loss, None, nothing)]], lineup)
    assert passed is well and ("FAIL" in text) is not well


@pytest.mark.long
def test_llama_trains_as_one_process_and_sends_what_dtensor_sends() -> None:
    rounds = measure(rows("llama", ONE, "Trine tp2", "torch DTensor tp2"), tiny("llama"), Effort(rounds=1, steps=2))
    assert loss_spread(rounds) <= TENSOR_LOSS_TOLERANCE
    found = {row.mode: row.footprint for row in medians(rounds)}
    # Half of the hidden states' all-reduce, twice, for 4 in a block, the embedding and the head's input; the rest are
    # maxima and sums of the vocabulary-parallel loss and the control of a step.
    around = (4 * 2 + 2) * HIDDEN
    for name in ("Trine tp2", "torch DTensor tp2"):
        assert around <= found[name].sent_bytes <= 1.05 * around
    assert found[ONE].sent_bytes == 0


@pytest.mark.long
def test_the_fused_model_of_the_peer_trains_as_one_process() -> None:
    rounds = measure(rows("fused", ONE, "torch DTensor tp2"), tiny("fused"), Effort(rounds=1, steps=2))
    assert loss_spread(rounds) <= TENSOR_LOSS_TOLERANCE


def test_blocks_with_three_products_are_those_with_one() -> None:
    torch.manual_seed(1)
    fused, x = FusedBlock(SIZES), torch.randn(2, 16, 32)
    assert torch.allclose(SplitBlock(fused)(x), fused(x), atol=1e-6)
    batch = make_rows(Mode(ONE, "plain", 1), tiny("fused"), 0, 0)
    assert Fused(SIZES)(batch[:, :-1]).shape == (4, 16, SIZES.vocabulary)
