"""The pipeline as it ran; how long it took is for ``benchmarks/training/sleeping_blocks.py``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import engine
from benchmarks.training.sleeping_blocks import Sleepers, run_asleep
from engine.errors import EngineError
from engine.parallel.pipeline.schedule.kinds import make_schedule

RunRanks = Callable[..., list[Any]]
SECONDS = 0.1
"""Asleep, so it costs nothing; a busy machine reads its clocks some milliseconds late."""


@pytest.mark.parametrize(
    ("kind", "virtual_stages"), [pytest.param("interleaved", 2, marks=pytest.mark.long), ("zb-v", 2)]
)
def test_all_ranks_get_the_spans_of_all_on_one_axis(run_ranks: RunRanks, kind: str, virtual_stages: int) -> None:
    first, *others = run_ranks(run_asleep, 4, kind, virtual_stages, SECONDS)
    assert all(other.spans == first.spans for other in others)
    assert first.schedule == make_schedule(kind, 4, 8, virtual_stages)
    assert tuple(tuple(span.action for span in row) for row in first.spans) == first.schedule.per_rank
    starts = {span.action: span.start for row in first.spans for span in row}
    assert min(starts.values()) == 0.0
    for action, start in starts.items():
        for need in first.schedule.needs(action):
            assert starts[need] + SECONDS / 2 <= start + SECONDS / 4, "what a block sleeps; the clocks of ranks agree"


def test_before_a_step_and_after_an_evaluation_there_is_nothing_to_show() -> None:
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    with engine.initialize(Sleepers(0.0, 0.0), config) as eng:
        with pytest.raises(EngineError, match=r"call eng\.train_batch first"):
            eng.timeline()
        eng.train_batch(torch.ones(2, 4))
        assert [str(span.action) for span in eng.timeline().spans[0]] == ["0F0", "0B0", "0F1", "0B1"]
        eng.eval_batch(torch.ones(2, 4))
        with pytest.raises(EngineError, match=r"call eng\.train_batch first"):
            eng.timeline()
