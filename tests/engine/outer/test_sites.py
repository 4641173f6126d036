"""Sites of an outer loop against synchronous training, training alone, and the formulas of each rule."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.build import step_parts
from engine.launch import watch_command
from engine.launch.cli import main
from engine.models.decoder import loss_sum
from engine.outer.messages import Offer
from engine.outer.store.store import Store
from tests import models
from tests.engine.outer.thread_sites import (
    ADAMW,
    ROWS,
    SGD,
    SiteRun,
    ThreadSites,
    apart,
    config_of,
    make_store,
    share,
    train_alone,
)
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> ThreadSites:
    return ThreadSites(monkeypatch)


@pytest.mark.parametrize(
    ("steps", "optimizer"), [(5, ADAMW), *(pytest.param(50, each, marks=pytest.mark.long) for each in (ADAMW, SGD))]
)
def test_two_sites_at_period_one_are_two_data_ranks_bit_for_bit(
    run_ranks: RunRanks, sites: ThreadSites, steps: int, optimizer: dict[str, Any]
) -> None:
    ranks: list[SiteRun] = run_ranks(partial(train_alone, optimizer=optimizer), 2, steps, 2)
    for form in ({"rule": "average", "period": 1}, {"rule": "bsp"}):
        runs = sites.run(form, 2, steps, optimizer=optimizer)
        for run in runs:
            assert all(torch.equal(a, b) for a, b in zip(run.weights, ranks[0].weights, strict=True)), form
        if form["rule"] == "average":
            assert runs[0].losses == ranks[0].losses, "the report has the loss of all sites"
        else:
            assert not any(run.moments for run in runs), "the store has the optimizer's state"


@pytest.mark.parametrize(("period", "fragments", "delay"), [(4, 1, 0), (4, 2, 1), (6, 3, 1)])
def test_one_site_gets_its_own_weights_back(sites: ThreadSites, period: int, fragments: int, delay: int) -> None:
    form = {"rule": "average", "period": period, "fragments": fragments, "delay": delay, "wire": "fp64"}
    (run,) = sites.run(form, 1, 13)
    alone = train_alone(13)
    assert all(torch.equal(a, b) for a, b in zip(run.weights, alone.weights, strict=True))
    assert run.losses == alone.losses


@pytest.mark.parametrize(
    "form",
    [
        wide({"rule": "diloco", "period": 3}),
        wide({"rule": "average", "period": 2}),
        {"rule": "diloco", "period": 4, "fragments": 2, "delay": 1, "mixing": 0.5},
        wide({"rule": "diloco", "period": 4, "delay": 2}),
        {
            "rule": "bsp",
            "period": 3,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.001}},
            "weights": "equal",
        },
    ],
    ids=lambda form: " ".join(f"{key} {value}" for key, value in form.items() if key != "optimizer"),
)
def test_differences_follow_the_formula(sites: ThreadSites, form: dict[str, Any]) -> None:
    runs = sites.run(form, 3, 9)
    expected = outer_loop(form, sites=3, steps=9)
    for run, weights in zip(runs, expected, strict=True):
        assert apart(run.weights, weights) < 2e-6
    assert apart(runs[0].weights, train_alone(9).weights) > 1e-3, "the sites have met"


def test_mixing_takes_that_fraction_of_the_own_weights(sites: ThreadSites) -> None:
    runs = [
        sites.run({"rule": "diloco", "period": 3, "mixing": mixing}, 1, 3)[0].weights for mixing in (0.0, 0.25, 1.0)
    ]
    assert apart(runs[1], [0.75 * a + 0.25 * b for a, b in zip(runs[0], runs[2], strict=True)]) < 1e-6
    assert apart(runs[2], train_alone(3).weights) == 0


def outer_loop(form: dict[str, Any], sites: int, steps: int) -> list[list[Tensor]]:
    """Returns the weights of each site by the formulas of DiLoCo, with plain torch and one engine a site."""
    period, delay, mixing = form["period"], form.get("delay", 0), form.get("mixing")
    engines = [engine.initialize(models.decoder(), config_of(None), loss_fn=loss_sum) for _ in range(sites)]
    names = [name for name, _ in engines[0].module.named_parameters()]
    parts = _fragments(names, engines[0], form.get("fragments", 1))
    shared = {name: p.detach().clone() for name, p in engines[0].module.named_parameters()}
    chosen = form.get("optimizer", {"type": "SGD", "params": {}})
    outer_of = {
        index: _outer_optimizer(form["rule"], chosen, [shared[name] for name in part])
        for index, part in enumerate(parts)
    }
    anchors = [{name: value.clone() for name, value in shared.items()} for _ in range(sites)]
    waiting: list[tuple[int, int, list[dict[str, Tensor]]]] = []
    batches = models.batches_for("decoder", ROWS * sites, steps)
    for step in range(1, steps + 1):
        for site, eng in enumerate(engines):
            eng.train_batch(share(batches[step - 1], site))
        live = [dict(eng.module.named_parameters()) for eng in engines]
        for index, part in enumerate(parts):
            if (step - index * period // len(parts)) % period == 0:
                sent = [{name: live[site][name].detach().clone() for name in part} for site in range(sites)]
                deltas = [[anchors[site][name] - sent[site][name] for name in part] for site in range(sites)]
                for name, values in zip(part, zip(*deltas, strict=True), strict=True):
                    shared[name].grad = torch.stack(values).mean(0)
                outer_of[index].step()
                waiting.append((step + delay, index, sent))
        for due, index, sent in [each for each in waiting if each[0] == step]:
            waiting.remove((due, index, sent))
            with torch.no_grad():
                for site in range(sites):
                    for name in parts[index]:
                        own = live[site][name]
                        if mixing is None:
                            own.copy_(shared[name] + (own - sent[site][name]))
                        else:
                            own.copy_(mixing * own + (1 - mixing) * shared[name])
                        anchors[site][name] = shared[name].detach().clone()
    found = [[p.detach().clone() for p in eng.module.parameters()] for eng in engines]
    for eng in engines:
        eng.close()
    return found


def _outer_optimizer(rule: str, chosen: dict[str, Any], tensors: list[Tensor]) -> torch.optim.Optimizer:
    if chosen["type"] == "AdamW":
        return torch.optim.AdamW(tensors, **chosen["params"])
    if rule == "average":
        return torch.optim.SGD(tensors, lr=1.0)
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def _fragments(names: list[str], eng: engine.Engine, count: int) -> list[list[str]]:
    from engine.outer.fragments import divide

    shapes = {name: tuple(p.shape) for name, p in eng.module.named_parameters()}
    made = divide([(name, shapes[name]) for name in names], count)
    return [list(each.names) for each in made]


def test_a_slow_site_of_ssp_holds_the_others_back(sites: ThreadSites) -> None:
    """The fast site trains at most three pushes more than the slow one has had merged."""
    clocks, gate = {0: 0, 1: 0}, Event()
    seen: list[int] = []

    def before(site: int, step: int) -> None:
        clocks[site] = step
        if site == 1 and step == 1:
            gate.wait(30)
        if site == 0:
            seen.append(step - clocks[1])
            if step == 4:
                gate.set()

    runs = sites.run({"rule": "ssp", "staleness": 3}, 2, 8, before=before)
    assert max(seen) >= 3, "the fast site does not wait for each step of the slow one"
    assert all(run.outer is not None and run.outer.clock == 8 for run in runs)


def test_watch_shows_the_state_of_each_site(
    sites: ThreadSites, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Site 0 waits before its step 5 for site 1, whose pushes it has merged twice."""
    monkeypatch.setattr("engine.watchdog.watchdog.flight_folder", lambda: tmp_path)
    monkeypatch.setattr(watch_command, "flight_folder", lambda: tmp_path)
    shown, barrier = list[str](), Barrier(2)

    def before(site: int, step: int) -> None:
        if step == 4:
            barrier.wait(30)
            if site == 0:
                assert main(["watch"]) == 0
                shown.extend(capsys.readouterr().out.splitlines())
            barrier.wait(30)

    runs = sites.run({"rule": "average", "period": 2}, 2, 5, before=before)
    for site, run in enumerate(runs):
        (line,) = [line for line in shown if line.startswith(f"outer loop of site {site}: ")]
        assert run.outer is not None and "clock 2, version 2, staleness 0, 2 members, 32 rows, " in line
        assert f"{run.outer.pushed_bytes / 1e6:.1f} MB pushed, " in line and line.endswith(" s (rank 0)")
    assert not list(tmp_path.iterdir()), "a site that ends removes its flight file"


class _Refusing:
    """Store that has no newer weights, until ``opened``."""

    def __init__(self, store: Store) -> None:
        self._store, self.opened = store, Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def offer(self, life: int, fragment: int) -> Offer | None:
        """Returns the offers of the start, and later ones once opened."""
        found = self._store.offer(life, fragment)
        return found if found is None or found.version == 0 or self.opened.is_set() else None


def test_a_quorum_site_trains_on_while_the_store_is_silent(sites: ThreadSites) -> None:
    links = dict[int, _Refusing]()

    def link(site: int, store: Store) -> Any:
        return links.setdefault(site, _Refusing(store))

    def before(site: int, step: int) -> None:
        if step >= 7:
            links[site].opened.set()
            time.sleep(0.02)  # threads of the site ask and pull

    form = {"rule": "quorum", "least": 1, "grace": 0.0, "period": 2}
    (run,) = sites.run(form, 1, 40, before=before, link=link)
    assert run.outer is not None
    assert run.outer.versions[0] >= 1
    assert run.outer.rows == 40 * ROWS
    assert run.outer.pushed_bytes <= 18 * 4 * sum(p.numel() for p in run.weights), "one push is under way at a time"


def test_a_checkpoint_older_than_the_last_push_counts_no_progress_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The site is killed after a push; its checkpoint is from before, so the store has later rows."""
    config = config_of({"rule": "average", "period": 2, "wire": "fp64", "sites": 1})
    store, batches = make_store(config), models.batches_for("decoder", ROWS, 6)
    monkeypatch.setattr(step_parts, "open_link", lambda outer, fragments: store)
    eng = engine.initialize(models.decoder(), config, loss_fn=loss_sum)
    for step, batch in enumerate(batches, start=1):
        eng.train_batch(batch)
        if step == 3:
            eng.save_checkpoint(tmp_path).wait()
    pushed = [p.detach().clone() for p in eng.module.parameters()]
    again = engine.initialize(models.decoder(), config, loss_fn=loss_sum, example_batch=batches[0])
    again.load_checkpoint(tmp_path)
    assert again.outer is not None
    assert again.outer.rows == 6 * ROWS
    assert apart([p.detach() for p in again.module.parameters()], pushed) == 0
    assert again.optimizer.state, "the moments are those of the checkpoint"
    again.close()
    eng.close()
