"""The next layout: the fastest that fits by what was counted of others of its recomputation."""

from dataclasses import replace
from functools import cache

import pytest

from engine.planning.cost_model.estimate import SLACK, LayoutEstimate, StepModel
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.search import LayoutChoice, Wish, search_layouts
from engine.planning.cost_model.workload import DecoderShape

GPU = load_gpu("h100")
WORK = DecoderShape(layers=32, width=4096, heads=32, vocabulary=32000, context=4096).workload()
LIMIT = 70 * 2**30


@cache
def ranked() -> tuple[LayoutEstimate, ...]:
    wish = Wish(world=8, rows=128, node=8, memory_bytes=LIMIT / 0.94)
    return search_layouts(WORK, StepModel(WORK, GPU, 8), wish).ranked


def test_the_fastest_in_turn() -> None:
    every = ranked()
    assert list(LayoutChoice(every, LIMIT)) == list(every)


def test_what_was_counted_decides_on_others() -> None:
    every = ranked()
    choice = LayoutChoice(every, LIMIT)
    first = next(choice)
    counted = replace(first.memory, activations=3 * first.memory.activations, buffers=3 * first.memory.buffers)
    before = choice.need(first)
    choice.learn(first, counted)
    assert choice.need(first) - before == pytest.approx(
        2 * (1 + SLACK) * (first.memory.activations + first.memory.buffers)
    )
    likely = choice.likely()
    assert next(choice) == likely[0] != first
    mode = first.layout.recomputation
    left_out = [one for one in every if one not in likely]
    assert len(left_out) > 1 and all(one.layout.recomputation == mode for one in left_out)
    assert all(choice.need(one) > LIMIT for one in left_out if one != first)


def test_what_was_planned_does_not_come_again() -> None:
    every = ranked()
    choice = LayoutChoice(every, LIMIT)
    choice.pass_over(every[0].layout)
    assert next(choice) == every[1]
    choice.pass_over(TrainingLayout())
    assert len(list(choice)) == len(every) - 2


def test_samples_take_the_place_of_closed_forms_and_are_taken_when_a_layout_comes_up() -> None:
    every, asked = ranked(), list[LayoutEstimate]()
    modes = {every[0].layout.recomputation}

    def working(one: LayoutEstimate, fresh: bool) -> float | None:
        if fresh and one not in asked:
            asked.append(one)
        known = any(one.layout.recomputation == other.layout.recomputation for other in asked)
        much = 100.0 if one.layout.recomputation in modes else 1.0
        return much * (one.memory.activations + one.memory.buffers) if known else None

    choice = LayoutChoice(every, LIMIT, working)
    assert choice.likely() == every and not asked
    first = next(choice)
    assert first.layout.recomputation not in modes and asked[-1] == first
    assert all(one.layout.recomputation in modes for one in asked[:-1])
    before = choice.need(first)
    counted = replace(first.memory, activations=2 * first.memory.activations, buffers=2 * first.memory.buffers)
    choice.learn(first, counted)
    assert choice.need(first) - before == pytest.approx((1 + SLACK) * (first.memory.activations + first.memory.buffers))
