"""Training with a loader: equal losses on every grid and number of workers, one reader a replica, resume elsewhere."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from torch import Tensor
from torch.utils.data import IterableDataset

import engine
from engine.data import Packing, StepLoader, loader
from engine.data.settings import AtEnd, LoaderOptions
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.data.loaders import MeasuredTexts, Texts
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

LENGTHS = [9, 30, 2, 14, 1, 25, 40, 3, 17, 8, 33, 12, 21]
"""215 tokens: 18 rows of 12, two steps of 8 rows and a quarter of the third."""
EXACT = 1e-5


class SmallTexts(MeasuredTexts):
    """Tokens of the vocabulary of the tests' models."""

    def tokens(self, index: int) -> Any:
        return super().tokens(index) % models.VOCABULARY


class OrderedTexts(Texts):
    """The same documents without their lengths."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [token % models.VOCABULARY for token in super().__getitem__(index)["input_ids"]]}


def config_for(dp: int, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1 if dp == 4 else 2,
        "parallel": {"data": dp, "tensor": tp, "pipeline": pp},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    }


def data_of(eng: engine.Engine, options: LoaderOptions, lengths: bool = True) -> StepLoader:
    made: Any = SmallTexts if lengths else OrderedTexts
    packing = Packing(length=12, labels="shifted")
    given: LoaderOptions = {"pack": packing, "epochs": 1, "at_end": "joined", **options}
    return loader(made(LENGTHS), eng, **given)


def train(config: dict[str, Any], options: LoaderOptions, lengths: bool = True) -> list[tuple[float, float]]:
    """Body of a rank: loss and weight of each step."""
    with engine.initialize(models.decoder(), config, loss_sum) as eng:
        data, reports = data_of(eng, options, lengths), []
        while not data.ended:
            reports.append(eng.train_batch(data))
        return [(report.loss, report.weight) for report in reports]


def same_losses(given: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert [weight for _, weight in given] == [weight for _, weight in expected]
    assert [loss for loss, _ in given] == pytest.approx([loss for loss, _ in expected], rel=EXACT)


@pytest.mark.parametrize(
    ("grid", "options", "lengths"),
    [
        ((2, 1, 1), {"shuffle": True, "workers": 2}, True),
        wide((2, 1, 1), {"shuffle": True}, True),
        wide((4, 1, 1), {"shuffle": True}, True),
        wide((4, 1, 1), {"shuffle": True, "workers": 1}, True),
        wide((2, 1, 1), {"workers": 1}, False),
        wide((1, 2, 1), {"batches": "rank0"}, False),
        wide((1, 1, 2), {"batches": "rank0", "shuffle": True}, True),
        wide((2, 2, 1), {"batches": "rank0", "shuffle": True, "workers": 2}, True),
    ],
)
def test_every_grid_gives_the_losses_of_one_rank(
    run_ranks: RunRanks, grid: tuple[int, int, int], options: LoaderOptions, lengths: bool
) -> None:
    alone: LoaderOptions = {"shuffle": True} if "shuffle" in options else {}
    expected = train(config_for(1), alone, lengths)
    assert len(expected) == 3 and expected[-1][1] < 24 < expected[0][1], "the last step has two rows"
    dp, tp, pp = grid
    for losses in run_ranks(train, dp * tp * pp, config_for(dp, tp, pp), options, lengths):
        same_losses(losses, expected)


def train_on(config: dict[str, Any], folder: Path, steps: int) -> tuple[list[tuple[float, float]], int]:
    """Body of a rank: go on from the folder for some steps, and save."""
    with engine.initialize(models.decoder(), config, loss_sum) as eng:
        data = data_of(eng, {"shuffle": True, "epochs": None})
        eng.register_for_checkpointing(data=data)
        eng.load_checkpoint(folder, missing_ok=True)
        reports = [eng.train_batch(data) for _ in range(steps)]
        eng.save_checkpoint(folder).wait()
        return [(report.loss, report.weight) for report in reports], data.position


@pytest.mark.long
def test_a_run_goes_on_on_other_grids(run_ranks: RunRanks, tmp_path: Path) -> None:
    expected, _ = train_on(config_for(1), tmp_path / "alone", 6)
    got: list[tuple[float, float]] = []
    for dp, tp in ((2, 1), (1, 1), (2, 2)):
        losses, position = run_ranks(train_on, dp * tp, config_for(dp, tp), tmp_path / "run", 2)[0]
        got += losses
        assert position == 8 * len(got)
    same_losses(got, expected)


class Rows(IterableDataset[dict[str, Tensor]]):
    """A stream of ``count`` rows."""

    def __init__(self, count: int) -> None:
        (self.batch,) = models.batches_for("decoder", count, 1)
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({key: value[row] for key, value in self.batch.items()} for row in range(self.count))


def ends(config: dict[str, Any]) -> dict[str, int | str]:
    """Body of a rank: steps over 18 rows, 8 in each step, or why there are none; then a stream that is shorter here."""
    found: dict[str, int | str] = {}
    with engine.initialize(models.decoder(), config, loss_sum) as eng:
        for at_end in get_args(AtEnd):
            try:
                data = data_of(eng, {"at_end": at_end})
                while not data.ended:
                    found[at_end] = eng.train_batch(data).step
            except EngineError as error:
                found[at_end] = str(error)
        short = loader(Rows(8 if eng.grid.rank else 16), eng, epochs=1, at_end="dropped")
        found["short"] = eng.train_batch(short).step
        with pytest.raises(EngineError) as caught:
            eng.train_batch(short)
    return found | {"short": str(caught.value)}


def test_data_that_end_early_are_joined_dropped_or_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(ends, 2, config_for(2))
    for found in (first, second):
        assert found["joined"] == 3 and found["dropped"] == 5
        assert str(found["refused"]).startswith("the data end with 2 of the 8 rows of a step")
    assert str(second["short"]).startswith("the iterator ended after 0 of 2 microbatches")
    assert str(first["short"]).endswith(f"see the error of the rank that failed: EngineError: {second['short']}")


def count_readers(config: dict[str, Any]) -> tuple[int, int, str]:
    """Body of a rank: samples read here, bytes of batches sent, and what is said when the reader fails."""
    with engine.initialize(models.decoder(), config, loss_sum) as eng:
        read: list[int] = []

        class Read(list[Any]):
            def __getitem__(self, index: Any) -> Any:
                read.append(index)
                if index == 8:
                    raise OSError("disk")
                return super().__getitem__(index)

        (tokens,) = models.token_batches(10, 1)
        rows = Read([{"input_ids": row[:-1], "labels": row[1:]} for row in tokens])
        data = loader(rows, eng, batches="rank0")
        eng.train_batch(data)
        sent = sum(row.calls for row in eng.sent.rows() if row.label == "batch")
        try:
            eng.train_batch(data)
        except (OSError, EngineError) as error:
            return len(read), int(sent), f"{type(error).__name__}: {error}"
        return len(read), int(sent), ""


def test_one_rank_of_a_replica_reads_and_says_why_it_cannot(run_ranks: RunRanks) -> None:
    first, second = run_ranks(count_readers, 2, config_for(1, tp=2))
    assert first == (9, 2, "OSError: disk")
    assert second == (0, 2, "EngineError: rank 0 reads the batches of this replica and has failed: disk")
