"""The rates of this host, measured by all ranks at once, for ``trine plan --calibrate``.

    torchrun -m engine.launch.planner.calibration.rank_measurements FILE

operators     each rank runs them by itself, all ranks at the same time
collectives   ``Comm`` over the backend of training: data, tensor and pipeline ranks, by size
overlap       products beside an all-reduce: what of the collective costs nothing
engine        steps of a decoder of next to no width, less what its operators take

All of it once is a round of a few seconds, and the median of several rounds counts: what passes by on a shared machine
meets every rate alike, and few rounds.
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.launch.planner.calibration.collective_samples import LABEL, CollectiveSamples, connect
from engine.launch.planner.calibration.engine_seconds import EngineSamples, first_engine
from engine.launch.planner.calibration.operator_samples import OperatorSamples
from engine.launch.planner.calibration.operator_seconds import measured_operators
from engine.parallel.comm.world import World, open_world, read_world
from engine.parallel.grid import Grid
from engine.planning.host_step.host_rates import EngineSeconds, HostRates, typical_rates

ROUNDS = 5
_NOTHING = EngineSeconds(step=0.0, microbatch=0.0, operator=0.0)


class MeasuringRanks:
    """The ranks of this job; every rank makes the same calls."""

    def __init__(self) -> None:
        with first_engine() as eng:  # opens the job
            self.world: World = replace(read_world(), rank=eng.grid.rank, size=eng.grid.world_size)
        self.alone = replace(self.world, rank=0, size=1, place=None)
        open_world(self.alone)  # of a job of one rank, which the engine has not opened
        self._comm = connect(Grid(dp=self.world.size, rank=self.world.rank))
        self._operators = OperatorSamples(measured_operators(), self)
        self._collectives = CollectiveSamples(self) if self.world.size > 1 else None
        self._engine = EngineSamples(self)

    def close(self) -> None:
        """Leave the other ranks."""
        self._engine.close()
        if self._collectives is not None:
            self._collectives.close()
        self._comm.close()

    def sample(self) -> HostRates:
        """All rates, each measured once; the mean over the ranks. A few seconds."""
        sent = self._collectives
        bare = HostRates(
            ranks=self.world.size,
            operators=self._operators.sample(),
            collectives={} if sent is None else sent.sample(),
            overlap=1.0 if sent is None else sent.overlap(),
            engine=_NOTHING,
        )
        return replace(bare, engine=self._engine.sample(bare))

    def ready(self) -> None:
        """All ranks are here."""
        if self.world.size > 1:
            self._comm.all_reduce(torch.zeros(1), "world", LABEL).wait()

    def mean(self, values: Sequence[float]) -> tuple[float, ...]:
        """Over the ranks, of each."""
        told = torch.tensor(values, dtype=torch.float64)
        if self.world.size > 1:
            self._comm.all_reduce(told, "world", LABEL).wait()
        return tuple((told / self.world.size).tolist())


def write_rates(arguments: Sequence[str] | None = None) -> int:
    """Measure in rounds, and let rank 0 write the typical rates as JSON."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("trine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks = MeasuringRanks()
    try:
        rates = typical_rates([ranks.sample() for _ in range(ROUNDS)])
    finally:
        ranks.close()
    if ranks.world.rank == 0:
        Path(path).write_text(json.dumps(rates.as_json()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(write_rates())
