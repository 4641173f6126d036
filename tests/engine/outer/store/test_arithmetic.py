"""Arithmetic of merges: independent of arrivals and of layouts, and equal to one process."""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config.optim_sections import AdamWParams, LionParams, OptimizerConfig, SgdParams
from engine.config.reader import stored
from engine.optim.built_in import built_in_optimizer
from engine.outer.messages import RankLayout
from engine.outer.store.store import Store
from engine.zero.optim.master_weights import clip_factor
from tests.engine.outer.store.sites import (
    TENSORS,
    SiteOfTests,
    Values,
    data_parallel_layout,
    expert_layout,
    fused_layout,
    pipeline_layout,
    settings_of,
    tensor_parallel_layout,
    values_of,
    whole_layout,
)

CUTS: dict[str, Callable[[], tuple[RankLayout, ...]]] = {
    "tp-columns": lambda: tensor_parallel_layout(1),
    "tp-rows": lambda: tensor_parallel_layout(0),
    "fused-tp2-dp2": fused_layout,
    "ep2-tp2": expert_layout,
    "pp2": pipeline_layout,
    "dp2": data_parallel_layout,
}
ADAMW = OptimizerConfig(type="AdamW", params=stored(AdamWParams(lr=1e-2, eps=1e-5, weight_decay=0.1)))
SGD = OptimizerConfig(type="SGD", params=stored(SgdParams(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)))
LION = OptimizerConfig(type="Lion", params=stored(LionParams(lr=1e-2, weight_decay=0.1)))


def same(found: Values, expected: Values) -> bool:
    """Returns True if all bits are equal."""
    return all(torch.equal(found[name], expected[name]) for name in expected)


def taken(site: SiteOfTests) -> dict[str, Tensor]:
    """Returns the newest version of a site that may take it over."""
    found = site.take()
    assert found is not None
    return found[1]


def sites_of(settings: dict[str, Any], count: int, cut: Sequence[RankLayout] | None = None) -> list[SiteOfTests]:
    """Returns sites at a new store with initial weights; ``cut``: layout of site 1."""
    store = Store(settings)
    made = [SiteOfTests(store, settings, site, cut if site == 1 else None) for site in range(count)]
    made[0].seed(values_of(99))
    for site in made:
        assert same(taken(site), values_of(99))
    return made


@pytest.mark.parametrize("wire", ["fp32", "fp64"])
def test_the_sum_of_two_sites_is_their_sum_to_the_bit(wire: str) -> None:
    first, second = sites_of(settings_of(rule="average", period=1, sites=2, wire=wire), 2)
    second.push(values_of(2), weight=3.0, loss=7.0)
    first.push(values_of(1), weight=2.0, loss=5.0)
    found = first.take()
    assert found is not None
    assert same(found[1], {name: values_of(1)[name] + values_of(2)[name] for name, _ in TENSORS})
    assert (found[0].version, found[0].weight, found[0].loss, found[0].members) == (1, 5.0, 12.0, 2)


@pytest.mark.parametrize(
    ("rule", "period", "optimizer"),
    [("average", 1, None), ("bsp", 1, ADAMW), ("diloco", 10, None), ("diloco", 10, ADAMW), ("average", 10, None)],
)
def test_no_order_of_arrival_changes_a_bit(rule: Any, period: int, optimizer: OptimizerConfig | None) -> None:
    settings = settings_of(
        rule=rule, period=period, sites=4, training=ADAMW, clipping=0.5, optimizer=optimizer if period > 1 else None
    )
    found = []
    for order in permutations(range(4)):
        sites = sites_of(settings, 4)
        for meeting in range(2):
            for number in order:
                sites[number].push(values_of(10 * meeting + number), tokens=float(number + 1))
            weights = [taken(site) for site in sites]
        found.append(weights[0])
        assert all(same(own, weights[0]) for own in weights)
    assert all(same(own, found[0]) for own in found)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("rule", "period"), [("average", 1), ("bsp", 1), ("diloco", 10)])
def test_sites_on_different_grids_meet_as_whole_ones_do(rule: Any, period: int, cut: str) -> None:
    settings = settings_of(rule=rule, period=period, sites=2, training=ADAMW, clipping=0.5)
    cut_sites, whole_sites = sites_of(settings, 2, CUTS[cut]()), sites_of(settings, 2, whole_layout())
    for meeting in range(3):
        for pair in (cut_sites, whole_sites):
            for number in (0, 1):
                pair[number].push(values_of(10 * meeting + number))
        expected = taken(whole_sites[0])
        assert same(taken(whole_sites[1]), expected)
        assert same(taken(cut_sites[0]), expected)
        assert same(taken(cut_sites[1]), expected)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD, LION], ids=lambda each: each.type)
def test_an_optimizer_on_the_store_is_that_of_one_process_to_the_bit(optimizer: OptimizerConfig) -> None:
    settings = settings_of(rule="bsp", sites=2, training=optimizer, clipping=0.5)
    groups, group_of = ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 2e-2, "weight_decay": 0.0}), (0, 1, 1)
    store = Store(settings)
    sites = [SiteOfTests(store, settings, site, groups=groups, group_of=group_of) for site in range(2)]
    sites[0].seed(values_of(99))
    start, order = values_of(99), [name for name, _ in TENSORS]
    flats = [start["wide"].flatten().clone(), torch.cat([start[name].flatten() for name in order[1:]])]
    inner = built_in_optimizer(optimizer)(
        [{"params": [own], **group} for own, group in zip(flats, groups, strict=True)]
    )
    for step in range(4):
        rates = (1e-2 / (step + 1), 2e-2 / (step + 1))
        for site in sites:
            taken(site)
            site.push(values_of(10 * step + site.site), weight=3.0 + site.site, rates=rates)
        total = {name: values_of(10 * step)[name] + values_of(10 * step + 1)[name] for name in order}
        grads = [total["wide"].flatten(), torch.cat([total[name].flatten() for name in order[1:]])]
        norm = float(torch.cat(grads).double().square().sum().sqrt()) / 7.0
        assert norm > 0.5
        for own, grad, group, rate in zip(flats, grads, inner.param_groups, rates, strict=True):
            own.grad, group["lr"] = grad.mul_(clip_factor(norm, 0.5) / 7.0), rate
        inner.step()
    found = taken(sites[0])
    assert torch.equal(found["wide"].flatten(), flats[0])
    assert torch.equal(torch.cat([found["bias"], found["scale"].view(1)]), flats[1])


def test_one_site_gets_its_own_weights_back_to_the_bit() -> None:
    (site,) = sites_of(settings_of(rule="average", period=10, wire="fp64"), 1)
    current = values_of(99)
    for meeting in range(5):
        own = values_of(meeting)
        site.push({name: current[name].double() - own[name].double() for name in own}, steps=7, tokens=100.0)
        current = taken(site)
        assert same(current, own)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_sites_get_their_own_weights_back_to_the_bit(count: int) -> None:
    sites = sites_of(settings_of(rule="average", period=10, wire="fp64", sites=count), count)
    current, own = values_of(99), values_of(3)
    for site in sites:
        site.push({name: current[name].double() - own[name].double() for name in own}, tokens=3.0)
    assert same(taken(sites[0]), own)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_outer_optimizer_is_sgd_of_torch(momentum: float, nesterov: bool) -> None:
    params = SgdParams(lr=0.7, momentum=momentum, nesterov=nesterov, weight_decay=0.01)
    outer = OptimizerConfig(type="SGD", params=stored(params))
    sites = sites_of(settings_of(rule="diloco", period=10, sites=2, optimizer=outer, weights="tokens"), 2)
    theirs = {name: values.double().requires_grad_() for name, values in values_of(99).items()}
    torch_sgd = torch.optim.SGD(theirs.values(), 0.7, momentum, weight_decay=0.01, nesterov=nesterov)
    for meeting in range(4):
        for site in sites:
            site.push(values_of(10 * meeting + site.site), tokens=1.0 + 2 * site.site)
        for name, own in theirs.items():
            own.grad = 0.25 * values_of(10 * meeting)[name].double() + 0.75 * values_of(10 * meeting + 1)[name].double()
        torch_sgd.step()
        weights = taken(sites[0])
        for name, own in theirs.items():
            assert torch.allclose(weights[name].double(), own, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("kind", "shares"), [("tokens", (0.2, 0.8)), ("steps", (0.75, 0.25)), ("equal", (0.5, 0.5))])
def test_differences_are_weighted_as_configured(kind: Any, shares: tuple[float, float]) -> None:
    sites = sites_of(settings_of(rule="average", period=10, sites=2, weights=kind), 2)
    for site, tokens, steps in zip(sites, (2.0, 8.0), (3, 1), strict=True):
        site.push(values_of(site.site), tokens=tokens, steps=steps)
    for name, found in taken(sites[0]).items():
        expected = values_of(99)[name] - shares[0] * values_of(0)[name] - shares[1] * values_of(1)[name]
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("rule", "period"), [("bsp", 1), ("average", 10)])
def test_a_push_with_a_number_that_is_not_finite_has_no_effect(rule: Any, period: int) -> None:
    settings = settings_of(rule=rule, period=period, sites=2, training=SGD)
    hurt, clean = sites_of(settings, 2), sites_of(settings_of(rule=rule, period=period, training=SGD), 1)
    events: list[Any] = []
    hurt[0].store.listeners.append(events.append)  # type: ignore[attr-defined]
    broken = values_of(5)
    broken["bias"][3] = torch.inf
    hurt[0].push(broken, weight=100.0)
    hurt[1].push(values_of(1), weight=2.0)
    clean[0].push(values_of(1), weight=2.0)
    found = hurt[0].take()
    assert found is not None
    assert same(found[1], taken(clean[0]))
    assert (found[0].weight, found[0].members, found[0].merged) == (2.0, 1, 0)
    assert [event["not_finite"] for event in events if event["kind"] == "merge"] == [[True, False]]


def test_a_version_of_nothing_finite_has_the_weights_before_it() -> None:
    (site,) = sites_of(settings_of(rule="bsp", training=ADAMW), 1)
    site.push({name: values * torch.nan for name, values in values_of(1).items()})
    assert same(taken(site), values_of(99))


def test_sums_that_are_not_finite_reach_all_sites_which_skip_together() -> None:
    first, second = sites_of(settings_of(rule="average", period=1, sites=2), 2)
    first.push({name: values * torch.nan for name, values in values_of(1).items()})
    second.push(values_of(2))
    assert all(values.isnan().all() for values in taken(second).values())
