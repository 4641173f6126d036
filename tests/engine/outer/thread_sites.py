"""Sites of one process: an engine of one rank in each thread, and the store that they share."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import pytest
from torch import Tensor, nn

import engine
from engine.build import step_parts
from engine.config import load_config
from engine.config.outer_section import shared_settings
from engine.models.decoder import loss_sum
from engine.outer.messages import StoreLink
from engine.outer.site import OuterState
from engine.outer.store.store import Store
from tests import models

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
ROWS = 8
"""Rows of a site in one step."""


def config_of(outer: Mapping[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Returns the configuration of a site; clipping is active, and the rate changes."""
    base = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "optimizer": ADAMW,
        "gradient_clipping": 0.25,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
    }
    return base | ({"outer": {"url": "http://store:8140"} | dict(outer)} if outer is not None else {}) | changes


def make_store(config: Mapping[str, Any]) -> Store:
    """Returns a store in memory for sites of this configuration."""
    read = load_config(dict(config), 1)
    assert read.outer is not None
    return Store(shared_settings(read.outer, read.optimizer, read.gradient_clipping))


def share(batch: Any, site: int, parts: int = 1, part: int = 0) -> Any:
    """Returns the rows of one site, or of one of the ``parts`` of its data ranks."""
    rows = slice(ROWS * site + ROWS * part // parts, ROWS * site + ROWS * (part + 1) // parts)
    if isinstance(batch, dict):
        return {name: values[rows] for name, values in batch.items()}
    return tuple(values[rows] for values in batch)


@dataclass(slots=True)
class SiteRun:
    """Results of one site."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    outer: OuterState | None = None
    moments: int = 0
    """Elements of optimizer state."""
    error: BaseException | None = None


Step = Callable[[int, int], None]
"""Function of (site, step) that is called before a step."""
Batches = Callable[[int, int], Any]
"""Function of (site, step) that returns a batch of a model that returns its loss."""


@dataclass(slots=True)
class ThreadSites:
    """Runner of sites in threads; the patch of ``open_link`` ends with the test."""

    patch: pytest.MonkeyPatch

    def run(
        self, outer: Mapping[str, Any], sites: int, steps: int, model: nn.Module | None = None,
        before: Step = lambda site, step: None, link: Callable[[int, Store], StoreLink] = lambda site, store: store,
        batch: Batches | None = None, **changes: Any,
    ) -> list[SiteRun]:  # fmt: skip
        """Trains ``sites`` sites from equal weights; each reads its share of the batches, or ``batch``."""
        configs = [config_of({**outer, "sites": sites, "site": site}, **changes) for site in range(sites)]
        store, base = make_store(configs[0]), model if model is not None else models.decoder()
        self.patch.setattr(step_parts, "open_link", lambda config, fragments: link(config.site, store))
        runs = [SiteRun() for _ in range(sites)]

        def train(site: int) -> None:
            try:
                data = _batches(site, sites, steps) if batch is None else (batch(site, step) for step in range(steps))
                eng = engine.initialize(deepcopy(base), configs[site], loss_fn=loss_sum if batch is None else None)
                _train(eng, data, site, before, runs[site])
            except BaseException as error:
                runs[site].error = error

        threads = [Thread(target=train, args=(site,), daemon=True) for site in range(sites)]
        gc.collect()
        gc.disable()  # engines that other tests have left would end within a step of these threads
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
        finally:
            gc.enable()
        for run in runs:
            if run.error is not None:
                raise run.error
        assert not any(thread.is_alive() for thread in threads), "a site waits for ever"
        return runs


def _batches(site: int, sites: int, steps: int) -> Iterator[Any]:
    return (share(batch, site) for batch in models.batches_for("decoder", ROWS * sites, steps))


def _train(eng: engine.Engine, data: Iterator[Any], site: int, before: Step, run: SiteRun) -> None:
    for step, batch in enumerate(data):
        before(site, step)
        run.losses.append(eng.train_batch(batch).loss)
    run.weights, run.outer = [p.detach().clone() for p in eng.module.parameters()], eng.outer
    run.moments = sum(
        value.numel() for state in eng.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )
    eng.close()


def train_alone(steps: int, sites: int = 1, full: bool = False, **changes: Any) -> SiteRun:
    """Returns the results of one engine without an outer loop, on the batches of all sites together.

    On several data ranks, each reads the share of the site with its number. ``full``: weights are gathered.
    """
    model, run = models.decoder(), SiteRun()
    config = config_of(None, **changes) | {"train_batch_size": ROWS * sites}
    eng = engine.initialize(model, config, loss_fn=loss_sum)
    for batch in models.batches_for("decoder", ROWS * sites, steps):
        run.losses.append(eng.train_batch(share(batch, eng.grid.coord().dp)).loss)
    found = eng.full_state_dict() if full else dict(model.named_parameters())
    run.weights = [values.detach().clone() for values in found.values()]
    eng.close()
    return run


def apart(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Returns the largest difference of two lists of tensors; 0 only if every bit is equal."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(left, right, strict=True))
