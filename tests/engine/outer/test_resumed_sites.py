"""Sites of period 1 that are killed, and continue from a checkpoint in a new process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.build import step_parts
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.outer.thread_sites import ROWS, apart, config_of, make_store


def start(config: Mapping[str, Any]) -> engine.Engine:
    return engine.initialize(models.decoder(), dict(config), loss_fn=_loss)


def _loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total, weight = loss_sum(output, batch)
    return total * (torch.inf if batch.get("bad") is not None else 1.0), weight


def weights(eng: engine.Engine) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in eng.module.parameters()]


def test_a_site_of_a_server_takes_over_what_another_one_has_pushed_since_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = (config_of({"rule": "async", "sites": 2, "site": site}) for site in range(2))
    store, batches = make_store(first), models.batches_for("decoder", ROWS, 3)
    monkeypatch.setattr(step_parts, "open_link", lambda outer, fragments: store)
    other, site = start(second), start(first)
    site.train_batch(batches[0])
    site.save_checkpoint(tmp_path).wait()
    other.train_batch(batches[1])
    again = start(first)
    again.load_checkpoint(tmp_path)
    assert apart(weights(again), weights(other)) == 0
    again.train_batch(batches[2])
    assert again.outer is not None
    assert again.outer.versions == (3,)
    again.close()
    other.close()


@pytest.mark.parametrize("bad", [(), (1,), (0, 1)], ids=["no skipped step", "one skipped step", "skipped steps alone"])
def test_a_site_of_summed_gradients_continues_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: Sequence[int]
) -> None:
    """The store has merged the gradients of a skipped step, too."""
    config, batches = config_of({"rule": "average", "period": 1}), models.batches_for("decoder", ROWS, 4)
    batches = [{**batch, "bad": torch.ones(ROWS)} if step in bad else batch for step, batch in enumerate(batches)]
    store = make_store(config)
    monkeypatch.setattr(step_parts, "open_link", lambda outer, fragments: store)
    eng = start(config)
    for batch in batches[:2]:
        eng.train_batch(batch)
    assert eng.skipped_steps == len(bad)
    eng.save_checkpoint(tmp_path).wait()
    again = start(config)
    again.load_checkpoint(tmp_path)
    assert again.outer is not None
    assert again.outer.rows == 2 * ROWS
    losses = [again.train_batch(batch).loss for batch in batches[2:]]
    again.close()
    alone = start(config_of(None))
    assert losses == pytest.approx([alone.train_batch(batch).loss for batch in batches][2:], rel=1e-6)
    assert apart(weights(again), weights(alone)) < 1e-6
    alone.close()
