"""Bytes and calls of a step are those of DESIGN section 7, written down here once more."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from engine.engine import Engine
from tests.selection import wide
from tests.zero.small import batch, start

RunRanks = Callable[..., list[Any]]

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ALONE = {"enabled": True, "bf16_master_weights_and_grads": True}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
OTHERS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "bf16 alone": {"bf16": ALONE},
    "bf16 alone with an island": {"bf16": ALONE, "keep_fp32": ["up", "down"]},
}
Mode = tuple[int, str, str]
"""ZeRO stage, reduce, gather."""
MODES: tuple[Mode, ...] = (
    (0, "step", "microbatch"),
    (1, "step", "microbatch"),
    (2, "step", "microbatch"),
    (2, "microbatch", "microbatch"),
    (3, "step", "microbatch"),
    (3, "microbatch", "microbatch"),
    (3, "step", "step"),
)
MICROBATCHES = 2
Case = tuple[Mode, str, str | None, int]
"""Mode, precision, communication_data_type, reduce_bucket_size."""
CASES: list[Case] = [
    *product(MODES, PRECISIONS, (None, "bf16", "fp32"), (900,)),
    *product(MODES, PRECISIONS, (None,), (1, 10**9)),
    *product(MODES, OTHERS, (None, "fp16"), (900,)),
]
# what more data ranks change, they change in every dtype and size alike
CORE: list[Case] = [
    *product(MODES, PRECISIONS, (None,), (1, 10**9)),
    *product(MODES, ("bf16 alone with an island",), ("fp16",), (900,)),
]

FEW: list[Case] = [
    *product(MODES, ("bf16",), (None,), (1,)),
    *product(MODES[1::4], PRECISIONS, (None,), (10**9,)),
    *product(MODES[::3], ("bf16 alone with an island",), ("fp16",), (900,)),
]


def expected(eng: Engine, wire: str | None) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, label) -> calls and bytes: 2 Psi (N-1)/N in the dtype of each traffic, one call a bucket; where
    each microbatch is reduced (m + 1) Psi (N-1)/N. Stage 3: see ``gathered``."""
    N, stage = eng.grid.dp, eng.config.zero_optimization.stage
    rounds = MICROBATCHES if eng.config.zero_optimization.reduce == "microbatch" else 1
    gradients = parameters = calls = 0
    for bucket in eng.plan.layout(eng.grid.coord()).buckets:
        calls += 1
        width = WIDTHS[bucket.dtype]
        summed = width if eng.config.bf16.bf16_master_weights_and_grads else max(4, width)
        sent = {"bf16": 2, "fp16": 2, "fp32": 4}[wire] if wire else summed
        gradients += rounds * (2 if stage == 0 else 1) * bucket.elements * sent * (N - 1) // N
        parameters += bucket.elements * width * (N - 1) // N
    rows = {("dp", "gradients"): (rounds * calls, gradients), ("world", "control"): (1, 2 * 8 * 9 * (N - 1) // N)}
    if stage == 3:
        layout = eng.plan.layout(eng.grid.coord())
        said = (9 + math.ceil(len((*layout.buckets, *layout.frozen)) / 8)) * (N - 1)  # flags, digest, a bit a bucket
        rows |= {("dp", "batch check"): (1, N - 1), ("dp", "gather round"): (MICROBATCHES, MICROBATCHES * said)}
        return rows | {("dp", "parameters"): gathered(eng)}
    return rows | ({("dp", "parameters"): (calls, parameters)} if stage else {})


def gathered(eng: Engine) -> tuple[int, int]:
    """Calls and bytes of stage 3 for ``Small``, whose modules embed, up, down and head are a gather group each.

    The microbatches go forward, backward, forward, backward. What is tied (embed, head) or read outside modules is
    whole through each pass and stays so in between; head stays from a forward to its backward.
    """
    N, layout = eng.grid.dp, eng.plan.layout(eng.grid.coord())
    times = dict.fromkeys(("up.weight", "up.bias", "down.weight"), 2 * MICROBATCHES) | {"head.bias": MICROBATCHES}
    if eng.config.zero_optimization.gather == "step":
        times = {}
    total = sum(
        times.get(bucket.slots[0].name, 1) * bucket.elements * WIDTHS[bucket.dtype] * (N - 1) // N
        for bucket in (*layout.buckets, *layout.frozen)
    )
    # embed with all that is tied or outside, up, down, head; back to down, up; then up, down, head; down, up
    return (11 if times else 4), total


def measure(mode: Mode, precision: str, wire: str | None, size: int) -> tuple[int, list[str]]:
    """Number of buckets, and what deviates in two steps."""
    zero = {"stage": mode[0], "reduce": mode[1], "gather": mode[2], "reduce_bucket_size": size}
    eng = start({"zero_optimization": zero, "communication_data_type": wire} | (PRECISIONS | OTHERS)[precision])
    wrong = []
    for step in range(2):
        before = eng.sent
        report = eng.train_batch(batch(eng, step))
        rows = eng.sent.since(before).rows()
        found: dict[tuple[str, str], tuple[int, int]] = {(row.axis, row.label): (row.calls, row.bytes) for row in rows}
        told = found.pop(("world", "used"), None) is not None
        if told != (step == 0):  # the first step finds the parameter that nobody uses, and the next one expects it
            wrong.append(f"step {step}: unused parameters were {'looked for' * told or 'not looked for'}")
        planned = {(row.axis, row.label): (row.calls, row.bytes) for row in eng.plan.rank(eng.grid.rank).traffic}
        if not found == planned == expected(eng, wire):
            wrong.append(f"step {step}: found {found}, planned {planned}, formula {expected(eng, wire)}")
        if report.bytes_sent != sum(row.bytes for row in rows):
            wrong.append(f"step {step}: reported {report.bytes_sent}")
    buckets = len(eng.plan.layout(eng.grid.coord()).buckets)
    eng.close()
    return buckets, wrong


def measure_all(cases: list[Case]) -> tuple[set[int], list[str]]:
    """Body of a rank: numbers of buckets met, and one line for each case that deviates."""
    counts, lines = set(), []
    for case in cases:
        buckets, wrong = measure(*case)
        counts.add(buckets)
        lines += [f"{case}: {line}" for line in wrong]
    return counts, lines


@pytest.mark.parametrize(
    ("dp", "cases"),
    [
        wide(2, CORE),
        (4, FEW),
        pytest.param(2, CASES, marks=pytest.mark.long),
        pytest.param(4, CASES, marks=pytest.mark.long),
    ],
    ids=["2 core", "4 core", "2 all", "4 all"],
)
def test_bytes_and_calls_of_a_step_meet_the_formula(run_ranks: RunRanks, dp: int, cases: list[Case]) -> None:
    for rank, (counts, wrong) in enumerate(run_ranks(measure_all, dp, cases)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)
        assert counts >= {1, 2, 9}, "one bucket a dtype, one a parameter, and something between"


def alone() -> tuple[int, int]:
    """Body of a rank without peers."""
    eng = start({"zero_optimization": {"stage": 1}})
    report = eng.train_batch(batch(eng, 0))
    eng.close()
    return report.bytes_sent, len(eng.plan.rank(0).traffic)


def test_one_rank_sends_nothing(run_ranks: RunRanks) -> None:
    assert run_ranks(alone, 1) == [(0, 0)]
