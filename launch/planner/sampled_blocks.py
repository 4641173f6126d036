"""What one more block keeps for its backward, counted on models of a few blocks without a pipeline; takes a second.

    blocks     | first | A A A         forwards of the first blocks, and of one more: the difference is a block;
               | first | A A           the longest plays a whole step, which gives the peak as well
    kinds      | first | A A A B A     one difference for each kind of a period, where it has a kind twice
               | first | A A A B
               | first | A A A
    layouts    with the same tensor ranks, sequence parallelism and recomputation share a sample

So a layout whose whole plan takes long to count has an estimate that rests on the code of the model, and the first
layout that is counted whole is most often the one that fits.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from torch import nn

from engine.build.request import Request
from engine.config import Config
from engine.launch.planner.counted_memory import kernels_of
from engine.launch.planner.planned_model import PlannedModel
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.pipeline.schedule.actions import Op
from engine.planning.cost_model.estimate import LayoutEstimate
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.memory import BlockSample, working_bytes
from engine.planning.cost_model.search import Working
from engine.planning.cost_model.workload import Workload
from engine.planning.plan import Plan
from engine.program.batch import map_tensors
from engine.rehearsal.block_kinds import AlikeRun, is_called, longest_run, outer_runs
from engine.rehearsal.rank_forecast import forecast_of
from engine.rehearsal.rehearsed_rank import FIRST, RehearsedRank
from engine.rehearsal.shortened_models import shorten

LEAST_PERIODS = 3
"""Of a run that is sampled."""


class _Added(NamedTuple):
    """The first ``longer`` blocks of a list beside the first ``shorter``, whose difference is counted."""

    shorter: int
    longer: int
    in_period: int
    """Times that a period consists of what is added."""
    in_longest: int
    """Times that the part of the run in the longest short model does."""


def _differences(run: AlikeRun) -> list[_Added]:
    """The short models of a run; the longest ends with the kind of block that the whole model ends with."""
    start, period, kinds = run.start, run.period, Counter(run.kinds)
    if period == 1:
        return [_Added(start + 2, start + 3, 1, 3)]
    if len(kinds) == period:  # each block has neighbours of its own
        return [_Added(start + period, start + 2 * period, 1, 2)]
    row, end = run.kinds * 2, 2
    while row[end - 1] != row[-1] or set(row[1:end]) != set(kinds):
        end += 1
    found = list[_Added]()
    for kind, times in kinds.items():
        last = start + max(at for at in range(end) if row[at] == kind)
        found.append(_Added(last, last + 1, times, row[:end].count(kind)))
    return found


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
        """The sample of ``layout``; None if the model has no run of alike blocks, or does not run on shapes.

        ``fresh``: make it if there is none yet.
        """
        key = layout.tp, layout.sequence, layout.recomputation
        if key not in self._samples and fresh:
            self._samples[key] = self._sample(layout)
        return self._samples.get(key)

    def _sample(self, layout: TrainingLayout) -> BlockSample | None:
        if self._run is None or self._run.periods < LEAST_PERIODS:
            return None
        alone = replace(
            layout, dp=1, pp=1, stage=0, reduction="step", micro=1, microbatches=1, schedule="1f1b", virtual=1
        )
        try:
            config = self._config_of(alone)
            (longest, model), *others = self._shorts.items()
            left, peak = self._stepped(model, config)
            lefts = {longest: left} | {length: self._left(short, config) for length, short in others}
        except Exception as error:  # the model's own code may raise anything on shapes; its estimate stays
            if is_own_mistake(error):
                raise
            return None
        added = [(one, lefts[one.longer] - lefts[one.shorter]) for one in _differences(self._run)]
        period = sum(one.in_period * left for one, left in added)
        around = peak - sum(one.in_longest * left for one, left in added)
        return BlockSample(kept=period / self._run.period, around=max(0.0, around))

    @cached_property
    def _shorts(self) -> Mapping[int, nn.Module]:
        """The short models by number of blocks, the longest first; plans and rehearsals leave them as they are."""
        assert self._run is not None
        model = self._planned.model
        for run in self._idle:
            model = shorten(model, run.blocks, run.start + run.period)
        lengths = {length for one in _differences(self._run) for length in (one.shorter, one.longer)}
        return {length: shorten(model, self._run.blocks, length) for length in sorted(lengths, reverse=True)}

    def _stepped(self, model: nn.Module, config: Config) -> tuple[int, int]:
        """Bytes that the forward of a short model leaves, and the peak of its step."""
        plan, rank = self._rank(model, config)
        step = rank.step()
        return step.actions[Op.FORWARD, 0, FIRST].left, forecast_of(plan, 0, step).peak.bytes

    def _left(self, model: nn.Module, config: Config) -> int:
        """Bytes that the forward of a short model leaves."""
        return self._rank(model, config)[1].left_by_forward()

    def _rank(self, model: nn.Module, config: Config) -> tuple[Plan, RehearsedRank]:
        """The plan of a short model, and the rank that plays it."""
        short = self._planned.shortened(model, config)
        plan = short.plan(config)
        example = map_tensors(short.row, lambda row: row.new_empty((1, *row.shape[1:])))
        request = Request(short.loss_fn)
        return plan, RehearsedRank(short.model, plan, 0, request, example, kernels_of(config, self._gpu))


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
