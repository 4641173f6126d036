"""What one more block keeps for its backward, counted on a model of a few blocks without a pipeline; takes a second.

    blocks     | first | A A | last       plays a step, whose peak is counted; what lives more behind the last block
                                          of a period than behind that of the period before is what a period keeps
    layouts    with the same tensor ranks, sequence parallelism and recomputation share a sample

So a layout whose whole plan takes long to count has an estimate that rests on the code of the model, and the first
layout that is counted whole is most often the one that fits.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property

from torch import nn

from engine.build.request import Request
from engine.config import Config
from engine.launch.planner.counted_memory import kernels_of
from engine.launch.planner.planned_model import PlannedModel
from engine.parallel.model.user_code import is_own_mistake
from engine.planning.cost_model.estimate import LayoutEstimate
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.memory import BlockSample, working_bytes
from engine.planning.cost_model.search import Working
from engine.planning.cost_model.workload import Workload
from engine.program.batch import map_tensors
from engine.rehearsal.block_kinds import is_called, longest_run, outer_runs
from engine.rehearsal.rank_forecast import forecast_of
from engine.rehearsal.rehearsed_rank import RehearsedRank
from engine.rehearsal.shortened_models import shorten


class SampledBlocks:
    """Samples of a model, made when they are first asked for.

    Args:
        planned: the model.
        config_of: the configuration of a layout.
        gpu: decides which operators have kernels.
    """

    def __init__(self, planned: PlannedModel, config_of: Callable[[TrainingLayout], Config], gpu: GpuSpec) -> None:
        self._planned, self._config_of, self._gpu = planned, config_of, gpu
        outer = outer_runs(planned.model)
        called = planned.called() if len(outer) > 1 else None
        idle = [] if called is None else [run for run in outer if not is_called(planned.model, run.blocks, called)]
        self._idle = idle
        """Runs of lists that a forward does not call, such as a vision tower on rows of text."""
        self._run = longest_run(planned.model, called)
        self._samples: dict[Hashable, BlockSample | None] = {}

    def of(self, layout: TrainingLayout, fresh: bool = True) -> BlockSample | None:
        """The sample of ``layout``.

        None if the model has no run of alike blocks, does not run on shapes, or holds less with more blocks.

        ``fresh``: make it if there is none yet.
        """
        key = layout.tp, layout.sequence, layout.recomputation
        if key not in self._samples and fresh:
            self._samples[key] = self._sample(layout)
        return self._samples.get(key)

    def _sample(self, layout: TrainingLayout) -> BlockSample | None:
        if self._run is None or self._short is None:
            return None
        run, periods = self._run, self._periods
        alone = replace(
            layout, dp=1, pp=1, stage=0, reduction="step", micro=1, microbatches=1, schedule="1f1b", virtual=1
        )
        try:
            config = self._config_of(alone)
            rank = self._rank(self._short, config)
            last = run.start + periods * run.period - 1
            levels = rank.watch([f"{run.blocks}.{index}" for index in (last - run.period, last)])
            peak = forecast_of(rank.plan, 0, rank.step()).peak.bytes
            period = levels[-1] - levels[-2]
        except Exception as error:  # the model's own code may raise anything on shapes; its estimate stays
            if is_own_mistake(error):
                raise
            return None
        if period < 0:  # code whose forwards depend on those before them; the estimate stays
            return None
        return BlockSample(kept=period / run.period, around=max(0.0, peak - periods * period))

    @property
    def _periods(self) -> int:
        """Periods of the short model: one is enough where other blocks are in front of it."""
        return 1 if self._run is not None and self._run.start else 2

    @cached_property
    def _short(self) -> nn.Module | None:
        """The short model, which plans and rehearsals leave as it is; None if no run is longer."""
        if self._run is None or self._run.periods <= self._periods:
            return None
        model = self._planned.model
        for run in self._idle:
            model = shorten(model, run, 1)
        return shorten(model, self._run, self._periods)

    def _rank(self, model: nn.Module, config: Config) -> RehearsedRank:
        """The only rank of a short model."""
        short = self._planned.shortened(model, config)
        plan = short.plan(config)
        example = map_tensors(short.row, lambda row: row.new_empty((1, *row.shape[1:])))
        request = Request(short.loss_fn)
        return RehearsedRank(short.model, plan, 0, request, example, kernels_of(config, self._gpu))


def working_of(samples: SampledBlocks, work: Workload) -> Working:
    """Bytes of activations and buffers of a layout: its closed form, at the scale of the sample."""

    def working(one: LayoutEstimate, fresh: bool) -> float | None:
        layout, closed = one.layout, working_bytes(work, one.layout)[0]
        sample = samples.of(layout, fresh)
        if sample is None or not closed:
            return None
        activations = one.memory.activations * sample.kept * layout.micro / closed
        return activations + max(one.memory.buffers, sample.around * layout.micro)

    return working
