"""Calls that every rank makes, made on one rank after another one has closed its engine: one sentence at once."""

from collections.abc import Callable
from typing import Any

import engine
from engine.parallel.comm import rendezvous
from tests import models
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import ROWS, data, settings


def opened(context: Any) -> None:
    with context:
        pass


CALLS: dict[str, Callable[[engine.Engine, str], object]] = {
    "save_checkpoint": lambda eng, folder: eng.save_checkpoint(folder),
    "load_checkpoint": lambda eng, folder: eng.load_checkpoint(folder),
    "eval_batch": lambda eng, folder: eng.eval_batch(data(1)[0]),
    "predict": lambda eng, folder: eng.predict(data(1)[0]),
    "train_batch": lambda eng, folder: eng.train_batch(data(1)[0]),
    "full_state_dict": lambda eng, folder: eng.full_state_dict(),
    "gradient_norms": lambda eng, folder: eng.gradient_norms(),
    "gradients": lambda eng, folder: opened(eng.gradients()),
    "masters": lambda eng, folder: opened(eng.masters()),
}


def said(folder: str) -> dict[str, str]:
    """Body of a rank: what each call says on rank 0, where rank 1 has closed its engine."""
    rendezvous._REPORT_SECONDS = 0.1  # a rank that has closed its engine records no failure
    found = {}
    for name, call in CALLS.items():
        example = data(1)[0][: ROWS // 2]
        eng = engine.initialize(models.decoder(), settings({"data": 2}, 1), loss_of, example_batch=example)
        eng.train_batch(data(2)[0].chunk(2)[eng.grid.rank])
        if eng.grid.rank == 0:
            try:
                call(eng, folder)
                found[name] = ""
            except engine.EngineError as error:
                found[name] = str(error)
        eng.close()
    return found


def test_no_rank_waits_for_one_that_has_closed_its_engine(run_ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    found, _ = run_ranks(said, 2, str(tmp_path / "run"))
    for name in ("save_checkpoint", "load_checkpoint", "eval_batch", "predict"):
        waits = f"{name} was called on rank 0, but not on rank 1, where the engine is closed or the script has ended; "
        assert found[name].startswith(waits), f"{name}: {found[name]}"
    assert found["train_batch"] and found.keys() == CALLS.keys()  # the others end too; some send nothing at ZeRO 1
