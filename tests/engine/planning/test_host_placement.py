"""The part of the optimizer state that goes to the host by itself is the smallest that fits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import load_config
from engine.errors import ConfigError, EngineError
from engine.planning.host_state import possible_ratios, smallest_ratio, with_ratio
from engine.planning.plan import Plan
from engine.reporting.banner import banner_text
from engine.zero.layout import FlatLayout, Item, build_layout
from engine.zero.offload.host_copies import offloaded_buckets
from tests.zero.offload.test_offloaded_training import bits, unequal
from tests.zero.small import batch, start


def laid_out(sizes: Sequence[int], ranks: int = 2) -> FlatLayout:
    """One bucket a size."""
    items = [Item(f"p{number}", (size,), "float32") for number, size in enumerate(reversed(sizes))]
    return build_layout(items, ranks, 1)


LAYOUTS = [laid_out([128, 640, 384]), laid_out([256, 128, 128, 640, 128])]


def moved(layout: FlatLayout, ratio: float) -> int:
    return sum(layout.buckets[index].elements for index in offloaded_buckets(layout, ratio))


@pytest.mark.parametrize("layout", [*LAYOUTS, laid_out([128] * 49), laid_out([192 * n for n in range(1, 30)])])
def test_every_bucket_has_a_ratio_and_no_larger_one_has_as_few(layout: FlatLayout) -> None:
    ratios = possible_ratios([layout])
    assert [len(offloaded_buckets(layout, ratio)) for ratio in ratios] == list(range(len(layout.buckets) + 1))
    for ratio in ratios[:-1]:
        assert moved(layout, math.nextafter(ratio, 2.0)) > moved(layout, ratio)


@pytest.mark.parametrize("limit", [0, 1, 128, 500, 640, 1000, 1151, 1152, 5000])
def test_the_ratio_fits_and_the_next_smaller_one_does_not(limit: int) -> None:
    def left(ratio: float) -> int:
        return max(layout.elements - moved(layout, ratio) for layout in LAYOUTS)

    ratios, found = possible_ratios(LAYOUTS), smallest_ratio(LAYOUTS, lambda ratio: left(ratio) <= limit)
    assert found is not None and left(found) <= limit
    place = ratios.index(found)
    assert place == 0 or left(ratios[place - 1]) > limit
    assert place == 0 or left(math.nextafter(found, 0.0)) > limit or left(math.nextafter(found, 0.0)) == left(found)


def test_where_nothing_fits_there_is_no_ratio() -> None:
    assert smallest_ratio(LAYOUTS, lambda ratio: False) is None


def settings(limit: float | None, ratio: Any = "auto", **changes: Any) -> dict[str, Any]:
    offload = {"device": "cpu", "ratio": ratio} | ({} if limit is None else {"memory_limit": limit / 2**30})
    zero = {"stage": 1, "reduce_bucket_size": 700, "offload_optimizer": offload}
    return {"bf16": {"enabled": True}, "zero_optimization": zero} | changes


def test_a_run_takes_the_smallest_part_by_its_plan_and_trains_to_the_same_bits() -> None:
    with start(settings(None, 0.0)) as eng:
        eng.train_batch(batch(eng, 0))
        plan, expected = eng.plan, bits(eng)
    position = plan.grid(0).coord()
    whole, least = (sum(with_part(plan, ratio).state(position).device.values()) for ratio in (0.0, 1.0))
    limit = (whole + least) / 2
    with start(settings(limit)) as eng:
        eng.train_batch(batch(eng, 0))
        ratio, found, said = eng.plan.config.zero_optimization.offload_optimizer.ratio, bits(eng), eng.plan
    assert isinstance(ratio, float) and 0 < ratio < 1 and not unequal(expected, found)
    assert sum(said.state(position).device.values()) <= limit
    smaller = max(other for other in possible_ratios(plan.layouts.values()) if other < ratio)
    assert sum(with_part(plan, smaller).state(position).device.values()) > limit
    assert "no smaller part keeps a rank within" in banner_text(said, "cpu")


def with_part(plan: Plan, ratio: float) -> Plan:
    return replace(plan, config=with_ratio(plan.config, ratio))


def test_a_limit_that_nothing_meets_is_one_sentence() -> None:
    with pytest.raises(EngineError, match=r"rank 0 still has .* GiB on its device .parameters.*raise the limit"):
        start(settings(100))


def test_the_state_of_an_optimizer_in_code_is_not_known() -> None:
    with pytest.raises(EngineError, match='ratio "auto" with an optimizer passed in code'):
        start(settings(1e6), optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.1))


@pytest.mark.parametrize(
    ("offload", "told"),
    [
        ({"device": "cpu", "ratio": "auto"}, 'memory_limit: missing, and ratio is "auto": give the GiB'),
        ({"device": "cpu", "ratio": 0.5, "memory_limit": 4}, 'ratio: 0.5 with memory_limit, which is for "auto"'),
        ({"device": "none", "ratio": "auto", "memory_limit": 4}, 'ratio: "auto", and device is "none": set device to'),
        ({"device": "cpu", "ratio": "auto", "memory_limit": 0}, "memory_limit: 0 is not above 0"),
        ({"device": "cpu", "ratio": "all"}, 'give a number from 0 to 1, or "auto"'),
    ],
)
def test_half_a_wish_is_refused(offload: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({"zero_optimization": {"offload_optimizer": offload}})
    assert told in str(refused.value)
