"""One dry run for equal ranks and blocks equals the dry run of each of them, byte for byte."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.build.request import Request
from engine.config import load_config
from engine.dry_run.dry_run_rank import FIRST, DryRunRank, DryRunStep
from engine.dry_run.rank_forecast import PlanDryRun, RankLikeness
from engine.dry_run.shortened_models import PERIODS, continued, shortened_step
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.pipeline.schedule.actions import Op
from engine.planning.activation_memory import ActionMemory, LivePeak
from engine.planning.analysis import PlanRequest
from engine.planning.plan import Plan, build_plan
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from tests.engine.dry_run.measured_peak import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Way,
    batch_of,
    forecast_rank,
    hugging_face,
)
from tests.selection import wide

PIPELINES = {
    "1f1b": Way(pp=4),
    "interleaved": Way(pp=4, schedule="interleaved", virtual=2),
    "zb-v, full recomputation": Way(pp=4, schedule="zb-v", virtual=2, recompute={"mode": "full"}),
    "zb-h1, ZeRO 1": Way(dp=2, pp=4, stage=1, schedule="zb-h1", microbatches=8),
    "tp2, ZeRO 3": Way(dp=2, tp=2, pp=4, stage=3, sequence=True),
}
ALONE = {
    "ZeRO 3 of every microbatch, selective": Way(dp=4, stage=3, reduce="microbatch", recompute={"mode": "selective"}),
    "one rank": Way(),
    "ZeRO 1, bf16": Way(dp=2, stage=1, bf16=True),
    "ZeRO 2, full": Way(dp=2, stage=2, recompute={"mode": "full"}),
    "tp2, ZeRO 3": Way(dp=2, tp=2, stage=3, sequence=True),
}


def deep(layers: int) -> nn.Module:
    with torch.device("meta"):
        sizes = DecoderConfig(vocabulary=VOCABULARY, layers=layers, width=WIDTH, heads=4, context=LENGTH)
        return Decoder(sizes)


def sliding(layers: int) -> nn.Module:
    """Windowed and full attention by turns, experts in every block."""
    with torch.device("meta"):
        return hugging_face(
            "GptOssForCausalLM", hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=16, max_position_embeddings=LENGTH,
        )  # fmt: skip


def planned(model: nn.Module, way: Way, bucket: int = 20_000) -> Plan:
    settings = way.settings()
    settings["zero_optimization"]["reduce_bucket_size"] = bucket
    config = load_config(settings, way.world)
    loss = loss_sum if isinstance(model, Decoder) else None
    program = Program(model, loss, make_precision(config, model), torch.device("cpu"))
    return build_plan(config, PlanRequest(program, batch_of(ROWS, 0)))


def request_of(model: nn.Module) -> Request:
    return Request(loss_sum if isinstance(model, Decoder) else None)


@pytest.mark.long
@pytest.mark.parametrize("name", ["1f1b", *(wide(name) for name in PIPELINES if name != "1f1b")])
def test_ranks_that_are_alike_run_dry_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, model = PIPELINES[name], deep(4 if name == "1f1b" else 16)
    plan = planned(model, way)
    alone = [
        forecast_rank(model, plan, plan.grid(0).rank_at(pp=pp), request_of(model), batch_of(ROWS, 0))
        for pp in range(way.pp)
    ]
    played, step = list[DryRunRank](), DryRunRank.step

    def noted(self: DryRunRank) -> DryRunStep:
        played.append(self)
        return step(self)

    monkeypatch.setattr(DryRunRank, "step", noted)
    request, example = request_of(model), batch_of(ROWS, 0)
    together = list(PlanDryRun(model=model, plan=plan, request=request, example=example).forecasts())
    assert together == alone
    likeness = RankLikeness(model, plan)
    kinds = len({likeness.of(pp) for pp in range(way.pp)})
    assert len(played) == kinds
    assert kinds < way.pp or way.schedule == "zb-v"  # whose eight stages are cut unevenly here


def test_ranks_that_recompute_other_blocks_are_not_alike() -> None:
    way = Way(pp=4, microbatches=4, recompute={"mode": "selective", "every": 2})
    model = deep(12)  # ranks of three blocks, of which one or two run again
    plan = planned(model, way)
    likeness = RankLikeness(model, plan)
    assert len({likeness.of(pp) for pp in range(way.pp)}) == way.pp


def test_more_microbatches_hold_no_more_where_each_reduces_its_gradients() -> None:
    def peak(microbatches: int) -> LivePeak:
        way = Way(dp=2, pp=2, stage=2, reduce="microbatch", schedule="zb-h1", microbatches=microbatches)
        model = deep(2)
        return forecast_rank(model, planned(model, way), 2, request_of(model), batch_of(ROWS, 0)).peak

    assert peak(6).bytes == peak(12).bytes


@pytest.mark.parametrize("name", [wide(name) for name in ALONE])
def test_a_long_model_is_counted_by_short_ones(name: str) -> None:
    whole, short = by_both(deep(10 if name == "one rank" else 12), ALONE[name])
    assert short == whole


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ALONE if "tp2" not in name])
def test_blocks_by_turns_are_continued_by_pairs(name: str) -> None:
    whole, short = by_both(sliding(20), ALONE[name])
    assert short == whole


def by_both(model: nn.Module, way: Way) -> tuple[DryRunStep, DryRunStep | None]:
    """The step of the whole model, and that continued from short ones, all of which are dry."""

    def run_dry(one: nn.Module, its: Plan) -> DryRunStep:
        sizes.append(len(list(one.parameters())))
        return DryRunRank(one, its, 0, request_of(one), batch_of(ROWS, 0)).step()

    alone = 1  # each parameter in a bucket of its own: buckets repeat as blocks do
    sizes, plan = list[int](), planned(model, way, alone)
    short = shortened_step(model, plan, run_dry, lambda one: planned(one, way, alone))
    assert len(sizes) == len(PERIODS) and sizes == sorted(set(sizes)) and sizes[-1] < len(list(model.parameters()))
    return run_dry(model, plan), short


def steps(*left_and_rise: tuple[int, int]) -> list[DryRunStep]:
    return [
        DryRunStep(actions={(Op.FORWARD, 0, FIRST): ActionMemory(left=left, rise=rise)}, base=7, end_rise=1)
        for left, rise in left_and_rise
    ]


def test_only_lines_are_continued() -> None:
    found = continued(steps((20, 25), (30, 35), (40, 45)), 10)
    assert found is not None and found.actions[Op.FORWARD, 0, FIRST] == ActionMemory(left=100, rise=105)
    freed = continued(steps((-20, 5), (-30, 5), (-40, 5)), 10)
    assert freed is not None and freed.actions[Op.FORWARD, 0, FIRST] == ActionMemory(left=-100, rise=5)
    assert continued(steps((20, 25), (30, 35), (41, 46)), 10) is None  # no line
    assert continued(steps((20, 99), (30, 99), (40, 99)), 10) is None  # what grows will pass the level of the start
    assert continued(steps((20, 25), (30, 35), (40, 46)), 10) is None
    two = steps((20, 25), (30, 35), (40, 45))
    assert continued([*two[:2], replace(two[2], end_rise=2)], 10) is None
    grows = [replace(step, end_rise=end) for step, end in zip(two, (5, 7, 9), strict=True)]
    assert (longer := continued(grows, 10)) is not None and longer.end_rise == 21
    assert continued([*two[:2], replace(two[2], base=8)], 10) is None


def test_a_model_with_few_or_uneven_blocks_runs_dry_whole() -> None:
    def never(one: nn.Module, its: Plan) -> DryRunStep:
        raise AssertionError("run dry")

    few = deep(sum(PERIODS))
    assert shortened_step(few, planned(few, Way()), never, never) is None  # type: ignore[arg-type]
    straddling = Way(dp=2, stage=1)  # buckets of 20,000 elements beside blocks of 12,672
    assert shortened_step(deep(12), planned(deep(12), straddling), never, lambda one: planned(one, straddling)) is None
    many, every = deep(12), Way(recompute={"mode": "selective", "every": 2})
    assert shortened_step(many, planned(many, every), never, never) is None  # type: ignore[arg-type]
