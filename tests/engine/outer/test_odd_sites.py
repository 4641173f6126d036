"""Sites that differ: parameters that only some of them use, and a store that some of them do not reach."""

import logging
import time
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError, GridError
from engine.models.decoder import loss_sum
from engine.outer.store.store import Store
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.web.sockets import address_of, listen
from tests import models
from tests.engine.outer.thread_sites import ADAMW, ROWS, ThreadSites, apart, config_of, share


@pytest.fixture(name="sites")
def _sites(monkeypatch: pytest.MonkeyPatch) -> ThreadSites:
    return ThreadSites(monkeypatch)


class _Branches(nn.Module):
    """Model that uses another branch in each batch, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Returns the loss."""
        hidden = self.trunk(x)
        loss: Tensor = (self.branches[int(branch[0])](hidden) if branch[0] >= 0 else hidden).square().mean()
        return loss


def _batch(site: int, step: int) -> dict[str, Tensor]:
    """Returns a batch of site 0 with branch 0 or none, or one of site 1 with branch 0 or 1; nobody uses branch 2."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + site))
    return {"x": x, "branch": torch.full((8,), (step % 2) - (site == 0))}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_another_site_uses_is_updated_as_in_one_process(sites: ThreadSites, stage: int) -> None:
    base, steps = _Branches(), 4
    expected = _Branches()
    expected.load_state_dict(base.state_dict())
    optimizer = torch.optim.AdamW(expected.parameters(), **ADAMW["params"])
    for step in range(steps):
        optimizer.zero_grad()
        for site in range(2):
            (expected(**_batch(site, step)) / 2).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.25)
        optimizer.step()
    form = {"rule": "average", "period": 1}
    runs = sites.run(form, 2, steps, base, batch=_batch, zero_optimization={"stage": stage}, scheduler=None)
    assert apart(runs[0].weights, runs[1].weights) == 0
    assert apart(runs[0].weights, [p.detach() for p in expected.parameters()]) < 1e-5


class _Silent:
    """Store that refuses no training, and whose renewals fail until ``answers``."""

    def __init__(self, store: Store) -> None:
        self._store, self.answers, self.renewed, self.left = store, Event(), Event(), False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def outage(self) -> str:
        """Sentence until the store answers."""
        return "" if self.answers.is_set() else "the store does not answer."

    def leave(self, life: int) -> None:
        """Stores that the site has asked to leave."""
        self.left = True

    def renew(self, life: int) -> None:
        """Fails until the store answers."""
        if not self.answers.is_set():
            raise GridError("the store does not answer.")
        self._store.renew(life)
        self.renewed.set()


def test_an_outage_is_one_warning_and_its_end_one_note(
    sites: ThreadSites, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.outer.exchange._SOON", 0.01)
    links = dict[int, _Silent]()

    def before(site: int, step: int) -> None:
        if step == 3:
            time.sleep(0.2)  # several renewals fail
            links[site].answers.set()
            assert links[site].renewed.wait(30)

    monkeypatch.setattr(logging.getLogger("trine"), "propagate", True)
    with caplog.at_level(logging.INFO, "trine"):
        sites.run(
            {"rule": "diloco", "period": 2, "lease": 0.03}, 1, 6, before=before,
            link=lambda site, store: links.setdefault(site, _Silent(store)),
        )  # fmt: skip
    said = [record.getMessage() for record in caplog.records if "answer" in record.getMessage()]
    assert said == ["the store does not answer. The site takes no merge over until the store answers.",
                    "the store answers again"]  # fmt: skip


@pytest.mark.parametrize("answers", [True, False])
def test_the_end_of_a_site_asks_only_a_store_that_answers(sites: ThreadSites, answers: bool) -> None:
    links = dict[int, _Silent]()

    def link(site: int, store: Store) -> Any:
        made = links.setdefault(site, _Silent(store))
        if answers:
            made.answers.set()
        return made

    sites.run({"rule": "diloco", "period": 2}, 1, 1, link=link)
    assert links[0].left == answers


def test_a_store_that_rank_0_cannot_serve_is_an_error_on_every_rank() -> None:
    batch, told = models.batches_for("decoder", ROWS, 1)[0], dict[int, str]()
    with listen("127.0.0.1", 0, "a server of somebody else") as taken:
        changes: dict[str, Any] = {"parallel": {"data": 2}, "train_micro_batch_size_per_gpu": 2}
        config = config_of({"rule": "average", "period": 1, "url": address_of(taken), "serve": True}, **changes)

        def body(world: World) -> None:
            try:
                eng = engine.initialize(models.decoder(), config, loss_fn=loss_sum, world=world)
                eng.train_batch(share(batch, 0, 2, eng.grid.coord().dp))
            except EngineError as error:
                told[world.rank] = str(error)

        run_thread_ranks(2, body)
    assert "the store cannot listen at 127.0.0.1" in told[0]
    assert "rank 0 could not prepare" in told[1]
