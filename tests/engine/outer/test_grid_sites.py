"""Sites of several ranks on different grids meet in a store over HTTP."""

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

import engine
from engine.models.decoder import loss_sum
from engine.outer.http import service
from engine.outer.site import OuterLoop
from engine.outer.store.store import Store
from engine.web.sockets import address_of, listen
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
)  # fmt: skip

RunRanks = Callable[..., list[Any]]
TP2: dict[str, Any] = {"parallel": {"tensor": 2}}
PP2: dict[str, Any] = {"parallel": {"pipeline": 2}}
ZERO3: dict[str, Any] = {
    "parallel": {"data": 2},
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 2,
}
ZERO2: dict[str, Any] = {
    "parallel": {"data": 2},
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": 2,
}
DP2: dict[str, Any] = {"parallel": {"data": 2}, "train_micro_batch_size_per_gpu": 2}
BF16: dict[str, Any] = {**ZERO2, "bf16": {"enabled": True}}
CP2: dict[str, Any] = {"parallel": {"context": 2}}


@contextmanager
def served(store: Store) -> Iterator[str]:
    """Serves a store on a free port of this host; yields its address."""
    with listen("127.0.0.1", 0, service.SERVER) as listening, service.serving(store, "", listening):
        yield address_of(listening)


DRAWS = Lock()
"""Lock of torch's generator, which sites in threads of one process seed and draw from."""


def train_site(
    site: int, sites: int, steps: int, outer: Mapping[str, Any], changes: Mapping[str, Any], first: int = 0,
    folder: str = "",
) -> SiteRun:  # fmt: skip
    """Body of a rank: trains one site, and returns the full weights on its rank 0.

    With ``folder``, the site begins with the checkpoint there, if ``first`` steps were trained before, and ends like a
    process that is killed after its save.
    """
    with DRAWS:
        model, batches = models.decoder(), [*models.batches_for("decoder", ROWS * sites, first + steps)]
    run, config = SiteRun(), config_of({**outer, "sites": sites, "site": site}, **changes)
    eng = engine.initialize(model, config, loss_fn=loss_sum)
    if first:
        eng.load_checkpoint(folder)
    for batch in batches[first:]:
        run.losses.append(eng.train_batch(share(batch, site, eng.grid.dp, eng.grid.coord().dp)).loss)
    full = eng.full_state_dict()
    run.outer, run.weights = eng.outer, [values.clone() for values in full.values()]
    if folder:
        eng.save_checkpoint(folder).wait()
        part = eng._parts.runtime.parts.find(OuterLoop)
        assert part is not None
        part._leave(leave=False)
    else:
        eng.close()
    return run


def run_grids(
    run_ranks: RunRanks, outer: Mapping[str, Any], grids: list[dict[str, Any]], steps: int
) -> tuple[list[SiteRun], Store]:
    """Trains a site on each grid at once; returns the results of their first ranks, and the store."""
    store = make_store(config_of({**outer, "sites": len(grids)}))
    with served(store) as url, ThreadPoolExecutor() as pool:

        def start(site: int, changes: dict[str, Any]) -> SiteRun:
            sizes, form = changes.get("parallel", {}).values(), {**outer, "url": url}
            ranks = int(torch.tensor([1, *sizes]).prod())
            body = partial(train_site, outer=form, changes=changes)
            found: SiteRun = run_ranks(body, ranks, site, len(grids), steps)[0]
            return found

        return [each.result() for each in [pool.submit(start, *pair) for pair in enumerate(grids)]], store


@pytest.mark.parametrize("zero", [ZERO2, pytest.param(ZERO3, marks=pytest.mark.long)], ids=["ZeRO 2", "ZeRO 3"])
def test_sites_on_different_grids_are_sites_of_one_rank(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, zero: dict[str, Any]
) -> None:
    form = {"rule": "diloco", "period": 2, "fragments": 2}
    alone = ThreadSites(monkeypatch).run(form, 3, 5)
    monkeypatch.undo()
    mixed, _ = run_grids(run_ranks, form, [TP2, PP2, zero], 5)
    for one, other in zip(alone, mixed, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-6)
        assert apart(one.weights, other.weights) < 1e-5
    elements = sum(each.numel() for each in alone[0].weights)
    assert all(run.outer is not None and run.outer.pushed_bytes < 3 * 4 * elements for run in mixed), (
        "each rank its share"
    )


@pytest.mark.long
@pytest.mark.parametrize("clipping", [0.25, 0.0])
def test_pipeline_and_zero_3_sites_are_sites_of_one_rank_bit_for_bit(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, clipping: float
) -> None:
    """Microbatches of one size and order; tensor ranks would add the products of row-parallel layers in parts."""
    form: dict[str, Any] = {"rule": "average", "period": 5}
    numbers: dict[str, Any] = {"gradient_clipping": clipping}
    alone = ThreadSites(monkeypatch).run(form, 2, 10, **numbers)
    monkeypatch.undo()
    zero = ZERO3 | {"train_micro_batch_size_per_gpu": ROWS // 2}
    mixed, _ = run_grids(run_ranks, form, [PP2 | numbers, zero | numbers], 10)
    for one, other in zip(alone, mixed, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_two_sites_of_tensor_ranks_are_two_data_ranks_bit_for_bit(
    run_ranks: RunRanks, optimizer: dict[str, Any]
) -> None:
    steps, form = 50, {"rule": "average", "period": 1}
    apart_run, _ = run_grids(run_ranks, form, [TP2 | {"optimizer": optimizer}] * 2, steps)
    grid: dict[str, Any] = {"parallel": {"data": 2, "tensor": 2}, "optimizer": optimizer, "full": True}
    together: SiteRun = run_ranks(partial(train_alone, **grid), 4, steps, 2)[0]
    for run in apart_run:
        assert run.losses == together.losses
        assert all(torch.equal(a, b) for a, b in zip(run.weights, together.weights, strict=True))


def test_site_0_serves_the_store_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"rule": "average", "period": 2}
    alone = ThreadSites(monkeypatch).run(form, 2, 5)
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    body = partial(train_site, outer={**form, "url": url, "serve": True}, changes={})
    with ThreadPoolExecutor() as pool:
        runs = [each.result() for each in [pool.submit(body, site, 2, 5) for site in range(2)]]
    for run, one in zip(runs, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(run.weights, one.weights, strict=True))


FORMS: dict[str, dict[str, Any]] = {
    "sums": {"rule": "average", "period": 1},
    "server": {"rule": "bsp"},
    "fragments, late": {"rule": "diloco", "period": 4, "fragments": 2, "delay": 1},
    "mixed": {"rule": "average", "period": 3, "delay": 1, "mixing": 0.25},
}
GRIDS = {"dp2": DP2, "ZeRO 2": ZERO2, "ZeRO 3": ZERO3, "tp2": TP2, "pp2": PP2, "cp2": CP2, "bf16, ZeRO 2": BF16}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_each_form_on_each_grid_is_that_of_one_rank(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], grid: dict[str, Any]
) -> None:
    numbers = {key: value for key, value in grid.items() if key == "bf16"}
    alone = ThreadSites(monkeypatch).run(form, 2, 6, **numbers)
    monkeypatch.undo()
    mixed, _ = run_grids(run_ranks, form, [grid, numbers], 6)
    for one, other in zip(alone, mixed, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-3 if numbers else 1e-6)
        assert apart(one.weights, other.weights) < (2e-2 if numbers else 1e-5)


@pytest.mark.parametrize(
    "form",
    [
        {"rule": "diloco", "period": 4, "delay": 2},
        pytest.param({"rule": "average", "period": 3, "fragments": 3, "delay": 0}, marks=pytest.mark.long),
        pytest.param({"rule": "bsp"}, marks=pytest.mark.long),
        pytest.param({"rule": "average", "period": 1}, marks=pytest.mark.long),
    ],
    ids=lambda form: " ".join(f"{key} {value}" for key, value in form.items()),
)
def test_a_site_continues_on_another_grid(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: dict[str, Any]
) -> None:
    """The site is killed after its save, with a push under way; the other site waits, and nothing is lost."""
    form, folder = {**form, "lease": 100.0}, str(tmp_path)
    alone = ThreadSites(monkeypatch).run(form, 2, 10)
    monkeypatch.undo()
    with served(make_store(config_of({**form, "sites": 2}))) as url, ThreadPoolExecutor() as pool:
        body = partial(train_site, outer={**form, "url": url})
        steady = pool.submit(run_ranks, partial(body, changes={}), 1, 1, 2, 10)
        before: SiteRun = run_ranks(partial(body, changes=TP2, folder=folder), 2, 0, 2, 5)[0]
        after: SiteRun = run_ranks(partial(body, changes=PP2, folder=folder, first=5), 2, 0, 2, 5)[0]
        other: SiteRun = steady.result()[0]
    assert [*before.losses, *after.losses] == pytest.approx(alone[0].losses, rel=1e-6)
    assert apart(after.weights, alone[0].weights) < 1e-5
    assert apart(other.weights, alone[1].weights) < 1e-5
    assert after.outer is not None
    assert after.outer.rows == 10 * ROWS
