"""The order of the axes says where a rank sits; what is trained, sent and saved is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.models.decoder import loss_sum
from engine.verify import verify
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.models import take_rows

RunRanks = Callable[..., list[Any]]
ORDERS = ("tp-dp-pp", "tp-pp-dp")


def train(sizes: dict[str, int], order: str, steps: range, folder: Path, resume: bool) -> list[Any]:
    """Loss, norm and traffic of each step; a checkpoint is left behind."""
    parallel = {**sizes, "order": order}
    config = engine.load_config(config_for(sizes["data"], 2, parallel=parallel), models_world(sizes))
    batches = models.batches_for("decoder", 16, steps.stop)
    rows = config.micro * config.accumulation
    with engine.initialize(
        lambda: models.decoder(layers=4, dropout=0.1), config, loss_sum, take_rows(batches[0], 0, config.micro)
    ) as eng:
        here = eng.grid.coord()
        outer = (here.pp, here.dp) if order == "tp-dp-pp" else (here.dp, here.pp)
        assert (
            eng.grid.rank
            == (outer[0] * (eng.grid.dp if order == "tp-dp-pp" else eng.grid.pp) + outer[1]) * (eng.grid.tp) + here.tp
        )
        if resume:
            eng.load_checkpoint(folder)
        found = []
        for step in steps:
            report = eng.train_batch(take_rows(batches[step], here.dp * rows, rows))
            found.append((report.loss, report.grad_norm))
        eng.save_checkpoint(folder).wait()
        assert eng.sent.rows()
        return found


def models_world(sizes: dict[str, int]) -> int:
    """Ranks of a grid."""
    world = 1
    for size in sizes.values():
        world *= size
    return world


def both(sizes: dict[str, int], folder: Path) -> None:
    """Body of a rank."""
    near, far = ORDERS
    whole = train(sizes, near, range(3), folder / "whole", resume=False)
    other = train(sizes, far, range(3), folder / "other", resume=False)
    # the ranks of the world add their shares of the norm in another order
    assert other[0][0] == whole[0][0] and other == [pytest.approx(step, rel=1e-6) for step in whole]
    for first, second, expected in ((far, near, whole), (near, far, other)):
        begun = train(sizes, first, range(2), folder / first, resume=False)
        ended = train(sizes, second, range(2, 3), folder / first, resume=True)
        assert begun + ended == [pytest.approx(step, rel=1e-6) for step in expected]


def test_the_stages_of_a_replica_side_by_side_train_as_one_process() -> None:
    config = engine.load_config(config_for(2, 2, parallel={"data": 2, "pipeline": 2, "order": "tp-pp-dp"}), 4)
    found = verify(lambda: models.decoder(layers=2), config, models.batches_for("decoder", 16, 2), loss_sum, threads=4)
    assert found is not None and found.holds(), str(found)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 2}, {"data": 2, "tensor": 2, "pipeline": 2}], ids=str)
def test_both_orders_train_alike_and_load_each_other(
    run_ranks: RunRanks, sizes: dict[str, int], tmp_path: Path
) -> None:
    run_ranks(both, models_world(sizes), sizes, tmp_path)
