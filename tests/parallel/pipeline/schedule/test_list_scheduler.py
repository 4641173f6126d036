"""The clock that fills rows: caps are kept, and the same sizes give the same rows everywhere."""

import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.pipeline.schedule.actions import Placement, loop, v_shape
from engine.parallel.pipeline.schedule.zero_bubble import INPUT, Policy, list_schedule

ROOT = Path(__file__).parents[4]
PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 6), st.integers(1, 3)),
    st.builds(v_shape, st.integers(1, 6)),
    st.permutations(range(6)).map(lambda order: (tuple(sorted(order[:2])), tuple(sorted(order[2:])))),
)


@settings(deadline=None, max_examples=150)
@given(st.data(), PLACEMENTS, st.integers(1, 9), st.booleans(), st.booleans())
def test_any_cap_that_holds_one_microbatch_is_kept_and_finishes(
    data: st.DataObject, placement: Placement, microbatches: int, forward_first: bool, deep: bool
) -> None:
    ranks, held = len(placement), max(map(len, placement))
    live = data.draw(st.integers(held, 4 * held), "live")
    backlog = tuple(data.draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks), "backlog"))
    rows = list_schedule(placement, microbatches, Policy(live, (live,) * ranks, backlog, forward_first, deep))
    starts: dict[tuple[int, int, int], int] = {}
    for row, stages in zip(rows, placement, strict=True):
        ticks = [tick for tick, *_ in row]
        assert ticks == sorted(set(ticks)) and len(row) == 3 * microbatches * len(stages)
        assert max(accumulate((1, 0, -1)[kind] for _, kind, *_ in row)) <= live
        starts |= {(kind, stage, microbatch): tick for tick, kind, stage, microbatch in row}
    last = sum(map(len, placement)) - 1
    for (kind, stage, microbatch), tick in starts.items():
        needs = [(kind - 1, stage, microbatch)] if kind else []
        if kind == 0 and stage:
            needs = [(0, stage - 1, microbatch)]
        if kind == INPUT and stage < last:
            needs.append((INPUT, stage + 1, microbatch))
        assert all(starts[need] < tick for need in needs)


def test_fewer_places_than_stages_can_never_finish() -> None:
    with pytest.raises(AssertionError, match="allows too little"):
        list_schedule(loop(2, 2), 1, Policy(1, (9, 9), (0, 0)))


def test_rows_do_not_depend_on_the_seed_of_hashes() -> None:
    code = """
import hashlib
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.simulate import Cost
text = "".join(
    make_schedule(kind.name, 4, 11, kind.virtual_stages, cost).text()
    for kind in SCHEDULE_KINDS.values() for cost in (None, Cost(transfer=0.3))
)
print(hashlib.sha256(text.encode()).hexdigest())
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(digests) == 1 and digests != {b""}
