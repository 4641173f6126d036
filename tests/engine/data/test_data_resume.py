"""The place in the data over random histories: runs that are killed, lose what no checkpoint has, and go on otherwise.

    grid, batch        dp 2, 8 rows        dp 3, 6 rows           dp 1, 5 rows
    steps              . . C . . killed    . . . . C . killed     . . . end
    count              ^^^^^               ^^^^^^^^^              ^^^^^

What counts is what the final weights have seen: up to each checkpoint that was resumed from, and all after the last.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.data import Sampler
from tests.selection import wide

HISTORIES = 500
AT_ONCE = 50
LIVES = 6
"""Most starts of a run."""


@dataclass
class Run:
    """A run as its checkpoints know it."""

    windows: int
    seed: int
    saved: str = ""
    """The newest checkpoint, as the JSON that a manifest has."""
    counted: list[int] = field(default_factory=list)
    """Samples in the order of the global batches, up to that checkpoint."""
    since: list[int] = field(default_factory=list)
    replayed: int = 0
    grids: set[tuple[int, int]] = field(default_factory=set)

    def start(self, dp: int, batch: int) -> list[Sampler]:
        """One sampler a data rank, where the newest checkpoint was."""
        self.replayed += len(self.since)
        self.since = []
        self.grids.add((dp, batch))
        samplers = [Sampler(self.windows, batch, self.seed, rank, dp) for rank in range(dp)]
        for sampler in samplers if self.saved else ():
            sampler.load_state_dict(json.loads(self.saved))
        return samplers

    def step(self, samplers: list[Sampler]) -> None:
        """A global batch: all ranks' rows, in the order of the ranks."""
        for sampler in samplers:
            self.since += next(sampler).tolist()

    def save(self, samplers: list[Sampler]) -> None:
        """A checkpoint; every rank has the same to save."""
        states = {json.dumps(sampler.state_dict()) for sampler in samplers}
        assert len(states) == 1, f"ranks disagree on the place: {states}"
        (self.saved,) = states
        self.counted, self.since = self.counted + self.since, []


def live(rng: np.random.Generator) -> Run:
    """A random history, to its end."""
    run = Run(windows=int(rng.integers(1, 200)), seed=int(rng.integers(0, 2**64, dtype=np.uint64)))
    for _ in range(int(rng.integers(1, LIVES + 1))):
        dp = int(rng.integers(1, 9))
        samplers = run.start(dp, dp * int(rng.integers(1, 9)))
        every = int(rng.integers(1, 8))
        for step in range(int(rng.integers(0, 20))):  # the kill may come at once, at a checkpoint or after one
            run.step(samplers)
            if (step + 1) % every == 0:
                run.save(samplers)
    run.save(samplers)
    return run


def wrong(run: Run) -> dict[str, Any]:
    """What was repeated or skipped: epoch -> how often each window was seen where that is not once."""
    found = {}
    for first in range(0, len(run.counted), run.windows):
        seen = np.bincount(run.counted[first : first + run.windows], minlength=run.windows)
        whole = first + run.windows <= len(run.counted)
        if seen.max() > 1 or (whole and seen.min() < 1) or seen.size != run.windows:
            found[f"epoch {first // run.windows}"] = seen.tolist()
    return found


@pytest.mark.parametrize("part", [*range(3), *map(wide, range(3, HISTORIES // AT_ONCE))])
def test_no_sample_is_repeated_or_skipped_whatever_the_history(part: int) -> None:
    replayed = grids = epochs = 0
    for index in range(part * AT_ONCE, (part + 1) * AT_ONCE):
        run = live(np.random.default_rng(index))
        assert not wrong(run), f"history {index}: {wrong(run)}"
        # one rank, one row a step, never stopped: the order knows neither ranks, nor batches, nor kills
        alone = Sampler(run.windows, 1, run.seed)
        assert run.counted == [int(next(alone)[0]) for _ in run.counted], f"history {index} has another order"
        replayed, grids = replayed + run.replayed, max(grids, len(run.grids))
        epochs += len(run.counted) // run.windows
    print(f"{AT_ONCE} histories")
    assert replayed > 1000 and grids >= 5 and epochs > 100, "histories without kills, regridding or epochs show nothing"


def test_the_check_sees_a_repeated_and_a_skipped_sample() -> None:
    stream = [int(index) for index in Sampler(10, 1, 3).stream(0, 35)]
    assert not wrong(Run(10, 3, counted=stream))
    for broken in (stream[:4] + stream[3:], stream[:4] + stream[5:], stream[:12] + stream[11:]):
        assert wrong(Run(10, 3, counted=broken))
