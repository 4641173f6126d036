"""A trace of a stage reads shapes: it is no call of the model outside the engine, which all data ranks would make."""

from contextlib import AbstractContextManager, nullcontext

import pytest

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.zero.gather.outside_calls import OutsideCalls
from tests import models
from tests.engine.parity.test_parity import config_for


def test_a_trace_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[frozenset[int]]()

    def noted(self: OutsideCalls, indices: frozenset[int]) -> AbstractContextManager[None]:
        calls.append(indices)
        return nullcontext()

    monkeypatch.setattr(OutsideCalls, "call", noted)
    config = config_for(2, 3, parallel={"data": 2, "pipeline": 2})
    batch = models.batches_for("decoder", config["train_batch_size"], 1)[0]

    def body(world: World) -> None:
        example = models.take_rows(batch, 0, 2)
        with engine.initialize(models.decoder(), config, loss_sum, example, world=world) as eng:
            rows = eng.config.micro * eng.config.accumulation
            mine = models.take_rows(batch, eng.grid.coord().dp * rows, rows)
            eng.train_batch(mine)
            eng.eval_batch(mine)

    run_thread_ranks(4, body)
    assert not calls
