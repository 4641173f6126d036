"""The predicted peak of live storages beside the measured one of real gloo ranks, over families of models and grids."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from engine.build.request import Request
from engine.config import load_config
from engine.dry_run.dry_run_rank import MIDDLE
from engine.dry_run.rank_forecast import PlannedKernels
from engine.models.decoder import loss_sum
from engine.parallel.pipeline.schedule.actions import Op
from engine.planning.analysis import PlanRequest
from engine.planning.plan import build_plan
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from tests.engine.dry_run.measured_peak import (
    FAMILIES,
    LENGTH,
    ROWS,
    SHOWN_WHOLE,
    PeakPair,
    Way,
    batch_of,
    compare_peaks,
    decoder,
    forecast_rank,
)
from tests.selection import wide
from tests.tables import Table

RunRanks = Callable[..., list[Any]]
MOST = 0.05
"""Of the measured bytes, by which a prediction may differ."""
WAYS: Mapping[str, Way] = {
    "one rank, full recomputation, bf16": Way(recompute={"mode": "full"}, bf16=True),
    "dp2, ZeRO 1, selective recomputation": Way(dp=2, stage=1, recompute={"mode": "selective"}),
    "dp2, ZeRO 2 of every microbatch": Way(dp=2, stage=2, reduce="microbatch"),
    "dp2, ZeRO 3, full recomputation": Way(dp=2, stage=3, recompute={"mode": "full"}),
    "dp2, every 2nd block on the host, others recomputed": Way(
        dp=2, stage=1, recompute={"mode": "offload", "every": 2, "others": "full"}
    ),
    "pp2, zb-h1, activations on the host": Way(pp=2, schedule="zb-h1", microbatches=6, recompute={"mode": "offload"}),
    "tp2": Way(tp=2),
    "tp2, sequence parallel": Way(tp=2, sequence=True),
    "pp2, 1f1b, every 2nd block recomputed": Way(pp=2, recompute={"mode": "selective", "every": 2}),
    "pp2, interleaved": Way(pp=2, schedule="interleaved", virtual=2),
    "pp2, zb-h1": Way(pp=2, schedule="zb-h1", microbatches=6),
    "pp2, zb-v, full recomputation": Way(pp=2, schedule="zb-v", virtual=2, recompute={"mode": "full"}),
    "dp2 x pp2, ZeRO 1, bf16": Way(dp=2, pp=2, stage=1, bf16=True),
    "dp2 x pp2, ZeRO 2 of every microbatch, zb-h1": Way(
        dp=2, pp=2, stage=2, reduce="microbatch", schedule="zb-h1", microbatches=8
    ),
    "tp2 x pp2, gpipe": Way(tp=2, pp=2, schedule="gpipe"),
}


def check(run_ranks: RunRanks, family: str, way: Way) -> PeakPair:
    """Every rank is within ``MOST``; the worst of them."""
    found: list[PeakPair] = [PeakPair(*one) for one in run_ranks(compare_peaks, way.world, family, way, seconds=300.0)]
    for rank, pair in enumerate(found):
        assert abs(pair.error) <= MOST, f"{family}, {way}, rank {rank}: {pair}, {pair.error:+.1%}"
    return max(found, key=lambda pair: abs(pair.error))


@pytest.mark.parametrize("way", ["one rank, full recomputation, bf16", wide("pp2, zb-h1")])
def test_a_decoder_holds_what_is_predicted(run_ranks: RunRanks, way: str) -> None:
    assert check(run_ranks, "decoder", WAYS[way]).measured > 100_000


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_grids(run_ranks: RunRanks, activation_memory_table: Table, family: str, way: str) -> None:
    pair = check(run_ranks, family, WAYS[way])
    predicted, measured = (f"{count / 1024:,.0f}" for count in (pair.predicted, pair.measured))
    activation_memory_table.cells[way, family] = f"{predicted} / {measured} ({pair.error:+.1%})"


@pytest.mark.long
@pytest.mark.parametrize("family", SHOWN_WHOLE)
def test_shards_that_look_whole(run_ranks: RunRanks, family: str) -> None:
    """What their memory does not allow to view is copied, of shapes as of values."""
    check(run_ranks, family, WAYS["tp2"])


def planned(model: nn.Module, way: Way) -> Any:
    config = load_config(way.settings(), way.world)
    program = Program(model, loss_sum, make_precision(config, model), torch.device("cpu"))
    return build_plan(config, PlanRequest(program, batch_of(ROWS, 0)))


@pytest.mark.long
def test_a_model_without_content_is_left_as_it_was() -> None:
    """A forecast of a model on the meta device is that of the model in memory, and neither is changed."""
    way = Way()
    with torch.device("meta"):
        shapes = decoder()
    ids = torch.empty((ROWS, LENGTH), dtype=torch.int64, device="meta")
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = planned(model, way)
    given = [(model, batch_of(ROWS, 0)), (shapes, {"input_ids": ids, "labels": ids})]
    first, second = (forecast_rank(one, plan, 0, Request(loss_sum), batch) for one, batch in given)
    assert first.peak == second.peak
    assert all(parameter.is_meta for parameter in shapes.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fused_operators_of_a_gpu_keep_less() -> None:
    """A norm keeps no more than its input, and the loss reads logits in chunks: they are never whole."""
    model = decoder()
    plan = planned(model, Way())
    given = model, plan, 0, Request(loss_sum), batch_of(ROWS, 0)
    fused, plain = forecast_rank(*given, PlannedKernels("triton", "")), forecast_rank(*given)
    forward = Op.FORWARD, 0, MIDDLE
    assert fused.peak.bytes < plain.peak.bytes
    assert fused.step.actions[forward].left < plain.step.actions[forward].left
    assert fused.step.actions[forward].left + fused.step.actions[Op.BACKWARD, 0, MIDDLE].left == 0
