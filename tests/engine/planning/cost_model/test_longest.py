"""The longest row of a number of GPUs: bisection, bytes within the limit, samples at any length."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.planning.cost_model.estimate import BlockSample
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.longest import long_layouts, longest_length, longest_runs
from engine.planning.cost_model.search import USABLE
from engine.planning.cost_model.workload import DecoderShape
from tests.selection import wide

LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "vocabulary": 128256, "context": 8192, "gated": True}
SHAPES = {
    "8B": DecoderShape(layers=32, width=4096, hidden=14336, **LLAMA),
    "70B": DecoderShape(layers=80, width=8192, hidden=28672, **LLAMA | {"heads": 64}),
}


@pytest.mark.parametrize("limit", [0, 123, 124, 125, 12345])
def test_bisection_finds_the_largest_multiple(limit: int) -> None:
    found = longest_length(lambda length: 100 + 3 * length, limit, 8)
    expected = max((length for length in range(0, 8192, 8) if 100 + 3 * length <= limit), default=0)
    assert found == expected


@pytest.mark.parametrize("gpu", ["h100", wide("h200"), wide("b200")])
@pytest.mark.parametrize("size", SHAPES)
def test_one_step_longer_than_the_longest_does_not_fit(size: str, gpu: str) -> None:
    work, memory = SHAPES[size].workload(), load_gpu(gpu).memory_bytes
    runs = longest_runs(work, long_layouts(work, 64, 8), memory)
    assert runs[0].length > 1 << 18 and runs[0].length == max(one.length for one in runs)
    for one in runs[:4]:
        assert one.memory.total <= USABLE * memory
        more = longest_runs(work, iter([one.layout]), memory * 1.01)[0]
        assert more.length > one.length and more.memory.total > one.memory.total


def test_more_memory_and_more_context_ranks_take_longer_rows() -> None:
    work = SHAPES["8B"].workload()
    lengths = {
        gpu: longest_runs(work, long_layouts(work, 8, 8), load_gpu(gpu).memory_bytes)[0].length
        for gpu in ("h100", "h200", "b200")
    }
    assert lengths["h100"] < lengths["h200"] < lengths["b200"]
    full = TrainingLayout(dp=8, stage=3, reduction="microbatch", recomputation="full", inputs="host")
    grown = [
        longest_runs(work, iter([replace(full, dp=8 // cp, cp=cp)]), load_gpu("h100").memory_bytes)[0].length
        for cp in (1, 2, 4, 8)
    ]
    assert all(after > 1.5 * before for before, after in pairwise(grown)), grown


def test_counted_blocks_replace_closed_forms_at_any_length() -> None:
    work, gpu = SHAPES["8B"].workload(), load_gpu("h100")
    asked = list[tuple[TrainingLayout, int]]()

    def sample(layout: TrainingLayout, length: int) -> BlockSample:
        asked.append((layout, length))
        return BlockSample(kept=7.0 * length, around=1e-3 * length**2 + 11 * length)

    layout = TrainingLayout(cp=8, stage=2, reduction="microbatch", recomputation="full")
    run = longest_runs(work, iter([layout]), gpu.memory_bytes, sample)[0]
    assert run.counted and len(asked) <= 11
    assert run.memory.activations == pytest.approx(7 * run.length * 32)
    assert run.memory.buffers == pytest.approx(1e-3 * run.length**2 + 11 * run.length, rel=0.05)
    assert run.memory.total <= USABLE * gpu.memory_bytes < run.memory.total + 2**28


def test_logits_exist_in_full_where_parameters_are_gathered() -> None:
    work, memory = SHAPES["8B"].workload(), load_gpu("h100").memory_bytes

    def sample(layout: TrainingLayout, length: int) -> BlockSample:
        return BlockSample(kept=7.0 * length, around=11.0 * length)

    layouts = (TrainingLayout(cp=8, stage=stage, reduction="microbatch", recomputation="full") for stage in (2, 3))
    chunks, whole = (longest_runs(work, iter([layout]), memory, sample)[0] for layout in layouts)
    assert whole.memory.buffers == pytest.approx(12 * 128256 * whole.length / 8, rel=0.05)
    assert chunks.memory.buffers < whole.memory.buffers and chunks.length > whole.length


def test_bytes_that_grow_only_from_some_length_on_are_counted_there() -> None:
    work, gpu = SHAPES["8B"].workload(), load_gpu("h100")

    def sample(layout: TrainingLayout, length: int) -> BlockSample:
        return BlockSample(kept=0.0, around=max(2e8, 7e4 * length, 3e5 * length - 3e9))

    run = longest_runs(work, iter([TrainingLayout(tp=8, recomputation="full")]), gpu.memory_bytes, sample)[0]
    assert run.memory.buffers == pytest.approx(3e5 * run.length - 3e9, rel=0.05)
    assert run.memory.total == pytest.approx(USABLE * gpu.memory_bytes, rel=0.01)


def test_a_model_that_does_not_run_on_shapes_keeps_closed_forms() -> None:
    work, memory = SHAPES["8B"].workload(), load_gpu("h100").memory_bytes
    closed = longest_runs(work, long_layouts(work, 8, 8), memory)
    assert longest_runs(work, long_layouts(work, 8, 8), memory, lambda *_: None) == closed
    assert not any(one.counted for one in closed)
