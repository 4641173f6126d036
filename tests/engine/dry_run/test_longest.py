"""The longest row in a fixed memory, predicted from a dry run and measured on real context ranks."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import engine
from engine.build.request import Request
from engine.config import load_config
from engine.launch.planner.planned_model import PlannedModel
from engine.planning.cost_model.longest import bytes_at, longest_length
from tests.engine.dry_run.measured_peak import GROUPED, ROWS, Way, batch_of, forecast_rank, hugging_face, measured_peak

LIMIT = 24 << 20
STEP = 16
SAMPLED = (256, 768, 1536)
RATIOS = (0.85, 0.95, 1.05, 1.15)
"""Lengths at which memory is measured, relative to the predicted longest one."""


def llama() -> Any:
    return hugging_face("LlamaForCausalLM", **GROUPED)


def way_of(context: int) -> Way:
    return Way(cp=context, stage=1, microbatches=2)


def predicted_bytes(context: int, length: int) -> int:
    """State and activations of the first rank, from a dry run."""
    with torch.device("meta"):
        model = llama()
    example = batch_of(ROWS, 0, length)
    config = load_config(way_of(context).settings(), context)
    plan = PlannedModel(model=model, loss_fn=None, row=batch_of(1, 0, length), styles=None).plan(config)
    peak = forecast_rank(model, plan, 0, Request(None), example).peak.bytes
    return peak + sum(plan.state(plan.grid(0).coord()).device.values())


def _measured_bytes(context: int, lengths: list[int]) -> list[int]:
    """Body of a rank: the same of a real step, at each length."""
    found = []
    for length in lengths:
        way = way_of(context)
        with engine.initialize(llama(), way.settings(), example_batch=batch_of(ROWS, 0, length)) as eng:
            state = sum(eng.plan.state(eng.grid.coord()).device.values())
            found.append(measured_peak(eng, way, length) + state)
    return found


def crossing(lengths: list[int], sizes: list[int], limit: float) -> float:
    """The length at which the line through neighbouring measurements reaches ``limit``."""
    pairs = list(zip(lengths, sizes, strict=True))
    for (shorter, less), (longer, more) in pairwise(pairs):
        if more >= limit or longer == lengths[-1]:
            return shorter + (limit - less) * (longer - shorter) / (more - less)
    raise AssertionError("at least two lengths")


@pytest.mark.long
@pytest.mark.parametrize("context", [1, 2, 4])
def test_the_longest_row_in_a_limit_is_as_predicted(context: int, run_ranks: Callable[..., list[Any]]) -> None:
    counted = [predicted_bytes(context, length) for length in SAMPLED]
    predicted = longest_length(lambda length: bytes_at(length, SAMPLED, counted), LIMIT, STEP)
    lengths = [round(ratio * predicted / STEP) * STEP for ratio in RATIOS]
    ranks = run_ranks(_measured_bytes, context, context, lengths, seconds=280.0)
    measured = crossing(lengths, [max(each) for each in zip(*ranks, strict=True)], LIMIT)
    print(f"context {context}: predicted {predicted}, measured {measured:.0f}")
    assert abs(predicted / measured - 1) < 0.1
