"""What a block keeps, by a model of two periods: what a longer model holds for each further block."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.build.request import Request
from engine.config import Config, load_config
from engine.dry_run.dry_run_rank import FIRST, DryRunRank
from engine.dry_run.rank_forecast import forecast_of
from engine.dry_run.shortened_models import shorten
from engine.launch.planner import planned_model
from engine.launch.planner.plan_command import settings_of
from engine.launch.planner.planned_model import KNOWN_STYLES, PlannedModel, SampledBlocks, kernels_of, working_of
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.grid import Coord
from engine.parallel.pipeline.schedule.actions import Op
from engine.planning import flat_layouts
from engine.planning.analysis import PlanRequest, search_styles
from engine.planning.cost_model.estimate import StepModel
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.workload import DecoderShape
from engine.planning.found_styles import FoundStyles
from engine.program.batch import map_tensors
from engine.zero.layout import FlatLayout, build_layout
from tests.selection import wide

GPU, STYLES = load_gpu("h100"), KNOWN_STYLES["decoder"]
SHAPE = DecoderShape(layers=8, width=32, heads=4, vocabulary=64, context=16)
LAYOUTS = {
    "one rank": TrainingLayout(),
    "full": TrainingLayout(recomputation="full"),
    "tp2": TrainingLayout(tp=2),
    "tp2, selective": TrainingLayout(tp=2, recomputation="selective"),
}


def decoder(layers: int = SHAPE.layers) -> PlannedModel:
    sizes = DecoderConfig(vocabulary=64, layers=layers, width=32, heads=4, context=16)
    with torch.device("meta"):
        return of_model(Decoder(sizes))


def of_model(model: nn.Module) -> PlannedModel:
    ids = torch.empty((1, 16), dtype=torch.int64, device="meta")
    return PlannedModel(model=model, loss_fn=loss_sum, row={"input_ids": ids, "labels": ids}, styles=STYLES)


def config_of(layout: TrainingLayout) -> Config:
    return load_config(settings_of(layout), layout.world)


@pytest.mark.parametrize("name", [wide(name) for name in LAYOUTS])
def test_a_sample_is_what_each_block_of_a_longer_model_keeps(name: str) -> None:
    layout, planned = LAYOUTS[name], decoder()
    sample = SampledBlocks(planned, config_of, GPU).of(layout)
    assert sample is not None and sample.kept > 0 and sample.around > 0

    def whole(layers: int) -> tuple[int, int]:
        one, config = decoder(layers), config_of(layout)
        example = map_tensors(one.row, lambda row: row.new_empty((1, *row.shape[1:])))
        rank = DryRunRank(one.model, one.plan(config), 0, Request(loss_sum), example, kernels_of(config, GPU))
        step = rank.step()
        return step.actions[Op.FORWARD, 0, FIRST].left, forecast_of(rank.plan, 0, step).peak.bytes

    (left, _), (more, peak) = whole(4), whole(5)
    assert more - left == sample.kept and peak == sample.around + 5 * sample.kept


def test_models_that_hold_less_with_more_blocks_have_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DryRunRank, "watch", lambda rank, modules: [2, 1])
    assert SampledBlocks(decoder(), config_of, GPU).of(TrainingLayout()) is None


def test_layouts_with_equal_blocks_share_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[str]()
    step: Callable[[DryRunRank], Any] = DryRunRank.step

    def noted(self: DryRunRank) -> Any:
        played.append("step")
        return step(self)

    monkeypatch.setattr(DryRunRank, "step", noted)
    samples = SampledBlocks(decoder(), config_of, GPU)
    layout = TrainingLayout(dp=2, stage=3, micro=4, recomputation="full")
    assert samples.of(layout, fresh=False) is None and not played
    first = samples.of(layout)
    assert samples.of(replace(layout, pp=4, schedule="zb-v", virtual=2, microbatches=8), fresh=False) == first
    assert first is not None and len(played) == 1
    assert samples.of(replace(layout, recomputation="none"), fresh=False) is None


def test_experts_on_several_ranks_take_the_sample_of_one() -> None:
    samples = SampledBlocks(decoder(), config_of, GPU)
    shared = samples.of(TrainingLayout(dp=4, ep=2))
    assert shared is not None and shared == samples.of(TrainingLayout(dp=4))


def test_the_closed_form_takes_the_scale_of_the_sample() -> None:
    samples, work = SampledBlocks(decoder(), config_of, GPU), SHAPE.workload()
    estimate = StepModel(work, GPU, 8).estimate(TrainingLayout(dp=2, micro=2, microbatches=4))
    working = working_of(samples, work)
    assert working(estimate, False) is None
    found, sample = working(estimate, True), samples.of(estimate.layout)
    assert sample is not None and found is not None and found == working(estimate, False)
    assert found == pytest.approx(8 * 2 * sample.kept + max(estimate.memory.buffers, 2 * sample.around))


def test_models_without_alike_blocks_or_that_raise_have_none() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no rows")

    with torch.device("meta"):
        assert SampledBlocks(of_model(nn.Linear(4, 4)), config_of, GPU).of(TrainingLayout()) is None
        assert SampledBlocks(of_model(Raises()), config_of, GPU).of(TrainingLayout()) is None


def test_alternating_blocks_are_averaged() -> None:
    """A period of two kinds: the sample is half of what a period adds."""
    one: Any = decoder(8).model
    wide = [block for number, block in enumerate(one.blocks) if number % 2]
    for block in wide:
        block.eval()  # another kind, that does the same here
    whole, mixed = (SampledBlocks(of_model(model), config_of, GPU) for model in (decoder(8).model, one))
    assert mixed._run is not None and mixed._run.period == 2
    assert mixed.of(TrainingLayout()) == whole.of(TrainingLayout())
    short: Any = shorten(one, mixed._run, 2)
    assert len(short.blocks) == 4


class Towers(nn.Module):
    """A decoder beside a longer list of blocks that rows of text do not call."""

    def __init__(self, text: nn.Module, blocks: int) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(blocks))
        self.text = text

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.text(input_ids)


@pytest.mark.long
def test_a_longer_list_that_rows_do_not_call_is_not_sampled() -> None:
    text: Any = decoder()
    with torch.device("meta"):
        both = of_model(Towers(text.model, 20))
    samples = SampledBlocks(both, config_of, GPU)
    assert samples.of(TrainingLayout()) == SampledBlocks(text, config_of, GPU).of(TrainingLayout())
    short: Any = samples._short(2)
    assert (len(short.tower), len(short.text.blocks)) == (1, 2)


@pytest.mark.long
def test_deeper_models_search_once_and_play_as_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and whole plans of so many tensor ranks share a search, and lay out the positions they are asked for."""
    counts = dict[int, list[tuple[str, int]]]()

    def spied(layers: int) -> list[tuple[str, int]]:
        noted = list[tuple[str, int]]()
        run_dry = DryRunRank.__init__

        def searches(config: Config, request: PlanRequest) -> FoundStyles:
            noted.append(("search", config.tp))
            return search_styles(config, request)

        def lays_out(*given: Any) -> FlatLayout:
            noted.append(("layout", 1))
            return build_layout(*given)

        def runs_dry(self: DryRunRank, model: Any, *given: Any) -> None:
            noted.append(("blocks", len(model.blocks)))
            run_dry(self, model, *given)

        with monkeypatch.context() as patch:
            patch.setattr(planned_model, "search_styles", searches)
            patch.setattr(flat_layouts, "build_layout", lays_out)
            patch.setattr(DryRunRank, "__init__", runs_dry)
            planned = replace(decoder(layers), styles=None)
            layout = TrainingLayout(tp=2, dp=2, pp=2, micro=2, microbatches=2)
            samples = SampledBlocks(planned, config_of, GPU)
            sample = samples.of(layout)
            samples.of(replace(layout, recomputation="full"))
            plan = planned.plan(config_of(layout))
            assert sample is not None and plan.tensor is not None
            plan.layout(Coord(pp=1))
        return noted

    for layers in (4, 6):
        counts[layers] = spied(layers)
    assert counts[4] == counts[6]
    assert counts[6].count(("search", 2)) == 1 == sum(kind == "search" for kind, _ in counts[6])
    assert [count for kind, count in counts[6] if kind == "blocks"] == [2, 2]
    assert counts[6][-1] == ("layout", 1) and sum(kind == "layout" for kind, _ in counts[6]) == 3
