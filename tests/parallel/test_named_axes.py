"""An axis of the grid that nothing but its row in the table knows: its ranks repeat each other's work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import engine
from engine.launch.run_report.recorded_run import read_run
from engine.models.decoder import loss_sum
from engine.parallel import grid as grid_module
from engine.parallel.comm.flight.flight import FlightFile, ranks_of
from engine.parallel.grid import Coord, Grid, GridAxis, axis_groups
from engine.verify import verify
from tests import models
from tests.planned_traffic import traffic_differs
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "dp2-zero1": ({"data": 2}, 1),
    "tp2-pp2-zero0": ({"data": 1, "tensor": 2, "pipeline": 2}, 0),
    "dp2-tp2-pp2-zero3": ({"data": 2, "tensor": 2, "pipeline": 2}, 3),
}

SOME = (("dp2-zero1", 2),)
"""By default; ``-m long`` has all sizes."""


@contextmanager
def with_axis(size: int) -> Iterator[None]:
    """Add an axis of ``size`` ranks with equal rows and equal parameters, between the pipeline and the data axis."""
    first, *others = grid_module.AXES
    with patch.object(grid_module, "AXES", (first, GridAxis("twin", "twin", copies=True, size=size), *others)):
        yield


def config_of(parallel: dict[str, int], stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "parallel": parallel,
        "zero_optimization": {"stage": stage},
        **more,
    }


def test_sizes_coordinates_and_peers_go_by_name() -> None:
    with with_axis(2):
        grid = Grid(pp=2, dp=3, tp=2, twin=2, rank=13)
        assert list(grid.sizes) == ["pp", "twin", "dp", "cp", "tp"] and grid.world_size == 24
        assert grid.coord() == Coord(pp=1, twin=0, dp=0, tp=1) and grid.rank_at(**grid.coord()) == 13
        assert grid.peers("twin") == (13, 19) and grid.peers("twin+dp") == (13, 15, 17, 19, 21, 23)
        assert (grid.rows, grid.copies, grid.shard_copies) == ("dp", "twin+dp", "twin")
        assert grid.peers("replica") == (0, 1, 6, 7, 12, 13, 18, 19)
        assert set(axis_groups(grid)) == {"world", "pp", "twin", "dp", "tp", "replica", "twin+dp"}
        assert str(grid) == "24 ranks = 2 pipeline x 2 twin x 3 data x 2 tensor"
        for axis in axis_groups(grid):
            groups = list(grid.groups(axis))
            assert sorted(rank for group in groups for rank in group) == list(range(24)) and grid.peers(axis) in groups


@pytest.mark.parametrize(
    ("layout", "size"),
    [(name, size) if (name, size) in SOME else wide(name, size) for name in LAYOUTS for size in (1, 2)],
)
def test_an_axis_of_copies_changes_no_number(layout: str, size: int) -> None:
    parallel, stage = LAYOUTS[layout]
    threads = size
    for ranks in parallel.values():
        threads *= ranks
    with with_axis(size):
        config = config_of(parallel, stage, integrity={"every": 1})
        result = verify(models.decoder, config, models.batches_for("decoder", 8, 3), loss_sum, threads=threads)
    assert result is not None and result.holds(), str(result)


def _train(folder: str, parallel: dict[str, int], twin: int) -> dict[str, Any]:
    """Body of a rank: two steps, a checkpoint and one more step; then that step once more from the checkpoint."""
    more = {"checkpoint": {"folder": f"{folder}/saved"}, "monitor": {"report": f"{folder}/report"}}
    with with_axis(twin):
        config = config_of(parallel, 1, **more)
        batches = models.batches_for("decoder", 8, 3)
        losses = list[float]()
        with engine.initialize(models.decoder, config, loss_sum) as eng:
            rows = 8 // eng.grid.row_ranks
            own = [{name: x[eng.grid.row_rank * rows :][:rows] for name, x in batch.items()} for batch in batches]
            losses.append(eng.train_batch(own[0]).loss)
            differs = traffic_differs(eng, lambda _, step: own[step], [1])
            eng.save_checkpoint()
            losses.append(eng.train_batch(own[2]).loss)
            watched = eng.comm.recorder
            assert watched is not None
            flight = FlightFile(watched.path)
            seen = flight.read()
            flight.close()
        with engine.initialize(models.decoder, config, loss_sum) as eng:
            eng.load_checkpoint()
            again = eng.train_batch(own[2]).loss
            weights = eng.full_state_dict()
            place, axes = dict(eng.grid.coord()), {axis: ranks_of(runs) for axis, runs in seen.identity["axes"].items()}
    return {"losses": losses, "again": again, "differs": differs, "place": place, "axes": axes, "weights": weights}


@pytest.mark.long
def test_copies_are_saved_once_watched_and_reported(tmp_path: Path, run_ranks: RunRanks) -> None:
    plain = run_ranks(_train, 2, str(tmp_path / "plain"), {"data": 2}, 1)
    ranks = run_ranks(_train, 4, str(tmp_path / "twins"), {"data": 2}, 2)
    for number, rank in enumerate(ranks):
        assert rank["losses"] == plain[0]["losses"] and rank["again"] == rank["losses"][1]
        assert not rank["differs"], rank["differs"]
        assert rank["place"] == {"pp": 0, "twin": number // 2, "dp": number % 2, "cp": 0, "tp": 0}
        assert list(rank["axes"]["twin"]) == [number % 2, number % 2 + 2]
    for name, weight in plain[0]["weights"].items():
        assert torch.equal(weight, ranks[0]["weights"][name])
    plain_weights, twin_weights = (list(_saved(tmp_path / run / "saved")) for run in ("plain", "twins"))
    assert plain_weights and sorted(plain_weights) == sorted(twin_weights), "copies are written once"
    with with_axis(2):
        run = read_run(tmp_path / "twins" / "report")
    assert [rank.place["twin"] for rank in run.ranks] == [0, 0, 1, 1]


def _saved(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and elements of each tensor in the model files of a checkpoint."""
    for file in folder.rglob("model*.safetensors"):
        yield from ((name, tensor.numel()) for name, tensor in load_file(file).items())
