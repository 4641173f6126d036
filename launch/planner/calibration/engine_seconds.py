"""What the engine and Python take of a processor beside operators: steps of a decoder of next to no width.

    step seconds of L blocks and m microbatches = S + m (M + L B)

B beyond the measured seconds of the operators of a block is shared among them. The same with pipeline ranks tells what
an action takes, and with sharded parameters what a group of parameters takes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from engine.api import initialize
from engine.config import load_config
from engine.engine import Engine
from engine.launch.planner.calibration.operator_samples import Measuring
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.world import World
from engine.planning.analysis import PlanRequest
from engine.planning.host_step.host_prediction import operator_seconds
from engine.planning.host_step.host_rates import EngineSeconds, HostRates
from engine.planning.host_step.operator_trace import OperatorCall, trace_operators
from engine.planning.plan import build_plan
from engine.precision.dtypes import make_precision
from engine.program.batch import Batch
from engine.program.program import Program

FEW, MANY = 2, 6
"""Blocks."""
WARM, STEPS = 2, 6
"""Steps of a sample that do not count, and those whose median does."""


class _Tiny(NamedTuple):
    """A step of next to no computation."""

    layers: int
    microbatches: int
    parallel: Mapping[str, int]
    stage: int = 0


_ALONE = (_Tiny(FEW, 1, {}), _Tiny(FEW, 4, {}), _Tiny(MANY, 4, {}))
_Engine = tuple[Engine, Batch]
"""And the rows of its steps."""


class EngineSamples:
    """Tiny engines of every rank alone and of all ranks together, ready to be sampled round by round."""

    def __init__(self, ranks: Measuring) -> None:
        self._ranks, self._engines = ranks, ExitStack()
        size = ranks.world.size
        self._alone = [self._open(one, ranks.alone) for one in _ALONE]
        self._pipeline: list[_Engine] = []
        self._data: list[_Engine] = []
        if size > 1:
            pipeline, data = {"pipeline": size}, {"data": size}
            self._pipeline = [self._open(_Tiny(size, count * size, pipeline), ranks.world) for count in (1, 3)]
            sizes = [_Tiny(layers, 4, data, stage) for stage in (0, 3) for layers in (FEW, MANY)]
            self._data = [self._open(one, ranks.world) for one in sizes]
        self._operators = [_operators(layers) for layers in (FEW, MANY)]

    def close(self) -> None:
        """End the engines."""
        self._engines.close()

    def sample(self, rates: HostRates) -> EngineSeconds:
        """Of a step, a microbatch, an operator; with several ranks of an action and of a group of parameters.

        A rank alone waits for nobody, so its steps are seconds of its processor, as those of operators are.

        Args:
            rates: of the operators, in the same round.
        """
        few, more, deep = self._steps(self._alone, time.process_time)
        block = max(0.0, (deep - more) / (4 * (MANY - FEW)))
        microbatch = max(0.0, (more - few) / 3)
        shallow, long = self._operators
        own = [operator_seconds(calls, rates) for calls in (shallow, long)]
        inside = (own[1] - own[0]) / (MANY - FEW)
        each = max(0.0, (block - inside) / ((len(long) - len(shallow)) / (MANY - FEW)))
        found = EngineSeconds(
            step=max(0.0, few - microbatch),
            microbatch=max(0.0, microbatch - own[0] - each * len(shallow)),
            operator=each,
        )
        if self._ranks.world.size == 1:
            return found
        return replace(found, handover=self._handover(block, found), gather=self._gather())

    def _handover(self, block: float, alone: EngineSeconds) -> float:
        """Of an action, in a pipeline of a block a rank: the longer step has more of them, and waits for none."""
        short, long = self._steps(self._pipeline, time.perf_counter)
        one = (long - short) / (2 * self._ranks.world.size)
        return max(0.0, (one - block - alone.microbatch) / 2)

    def _gather(self) -> float:
        """Of a group and pass of ZeRO 3, which has a group for every block."""
        plain, plain_deep, sharded, sharded_deep = self._steps(self._data, time.perf_counter)
        more = (sharded_deep - sharded) - (plain_deep - plain)
        return max(0.0, more / (4 * 2 * (MANY - FEW)))

    def _open(self, tiny: _Tiny, world: World) -> _Engine:
        """An engine of these sizes on the ranks of ``world``."""
        opened = self._engines.enter_context(tiny_engine(tiny, None if world.size > 1 else world))
        return opened, _row(tiny.microbatches)

    def _steps(self, engines: Sequence[_Engine], clock: Callable[[], float]) -> tuple[float, ...]:
        """Seconds of a step of each; the mean over the ranks."""
        found = []
        for opened, batch in engines:
            self._ranks.ready()
            seconds = [_timed(opened, batch, clock) for _ in range(WARM + STEPS)]
            found.append(median(seconds[WARM:]))
        return self._ranks.mean(found)


def _sizes(layers: int) -> DecoderConfig:
    return DecoderConfig(vocabulary=16, layers=layers, width=16, heads=2, context=4)


def _settings(tiny: _Tiny) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": tiny.microbatches,
        "parallel": {**tiny.parallel},
        "zero_optimization": {"stage": tiny.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
    }


def _row(rows: int, device: str = "cpu") -> Batch:
    ids = torch.zeros((rows, 4), dtype=torch.int64, device=device)
    return {"input_ids": ids, "labels": ids}


def tiny_engine(tiny: _Tiny, world: World | None) -> AbstractContextManager[Engine]:
    """An engine of these sizes on the ranks of ``world``; None: those that the launcher tells."""
    return initialize(lambda: Decoder(_sizes(tiny.layers)), _settings(tiny), loss_sum, _row(1), world=world)


def first_engine() -> AbstractContextManager[Engine]:
    """An engine that opens the job."""
    return tiny_engine(_Tiny(1, 1, {}), None)


def _timed(opened: Engine, batch: Batch, clock: Callable[[], float]) -> float:
    began = clock()
    opened.train_batch(batch)
    return clock() - began


def _operators(layers: int) -> tuple[OperatorCall, ...]:
    config = load_config(_settings(_Tiny(layers, 1, {})), 1)
    with torch.device("meta"):
        model = Decoder(_sizes(layers))
    program, row = Program(model, loss_sum, make_precision(config, model), torch.device("cpu")), _row(1, "meta")
    return trace_operators(program, build_plan(config, PlanRequest(program, row)), row)
