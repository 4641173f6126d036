"""Datasets of Hugging Face and loaders of torchdata: their places are those of the loader, on every grid."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset, load_dataset
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

import engine
from engine.data import Packing, StepLoader, loader
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.data.histories import Kind, check
from tests.engine.data.loaders import Texts, loaders, made_for, step_of
from tests.selection import wide

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
RunRanks = Callable[..., list[Any]]
AT_ONCE = 100


def columns(size: int) -> dict[str, list[Any]]:
    return {"number": list(range(size)), "labels": [[index] for index in range(size)]}


def table(size: int, form: str | None = "torch") -> Dataset:
    """A dataset in memory; a format makes its samples tensors or arrays."""
    return Dataset.from_dict(columns(size)).with_format(form)


def stream(size: int, shards: int = 3) -> IterableDataset:
    """The same as a stream of several shards."""
    return table(size, None).to_iterable_dataset(num_shards=min(shards, size))


def formatted(size: int) -> IterableDataset:
    return stream(size).with_format("torch")


def shuffled(size: int) -> IterableDataset:
    """A stream that shuffles itself, in another order in each epoch."""
    return stream(size).shuffle(seed=3, buffer_size=4)


def generated(size: int) -> IterableDataset:
    def rows() -> Iterator[dict[str, Any]]:
        yield from ({"number": index, "labels": [index]} for index in range(size))

    return IterableDataset.from_generator(rows)


def texts(lengths: list[int], form: str | None = "torch") -> Dataset:
    documents = Texts(lengths)
    rows = [documents[index]["input_ids"] for index in range(len(lengths))]
    return Dataset.from_dict({"input_ids": rows}).with_format(form)


def text_stream(lengths: list[int]) -> IterableDataset:
    return texts(lengths, None).to_iterable_dataset(num_shards=min(2, len(lengths))).with_format("torch")


MAPPED = tuple(Kind(make=partial(table, form=form), mapped=True) for form in ("torch", "numpy", None))
STREAMS = tuple(Kind(make=make, ordered=True) for make in (stream, formatted, shuffled, generated))
PACKED = (
    Kind(make=texts, texts=True, mapped=True, ordered=True),
    Kind(make=partial(texts, form=None), texts=True, mapped=True, ordered=True),
    Kind(make=text_stream, texts=True, ordered=True),
)
HISTORIES = {"mapped": MAPPED, "streams": STREAMS, "packed": PACKED}


@pytest.mark.parametrize("kinds", HISTORIES)
@pytest.mark.parametrize("first", [0, *(wide(first) for first in range(AT_ONCE, 4 * AT_ONCE, AT_ONCE))])
def test_no_sample_is_repeated_or_skipped(kinds: str, first: int) -> None:
    replayed, grids, epochs = check(range(first, first + (4 if first == 0 else AT_ONCE)), kinds=HISTORIES[kinds])
    assert replayed > 0 and grids >= 3 and epochs > 3, "histories without kills, regridding or epochs show nothing"


@pytest.mark.long
@pytest.mark.parametrize("kinds", HISTORIES)
def test_worker_processes_change_nothing(kinds: str) -> None:
    check(range(AT_ONCE // 2), processes=True, kinds=HISTORIES[kinds])


@pytest.mark.parametrize("make", [table, stream])
def test_a_worker_goes_on_where_this_process_has_stopped(make: Callable[[int], Any]) -> None:
    """Two ranks without workers, then three with one each."""
    ranks = loaders(make(24), 2, 2, 1, {"epochs": 1})
    seen = numbers(step_of(ranks, 1)) + numbers(step_of(ranks, 1))
    saved = json.dumps(ranks[0].state_dict())
    ranks = loaders(make(24), 3, 2, 1, {"epochs": 1, "workers": 1, "at_end": "joined"})
    for rank in ranks:
        rank.load_state_dict(json.loads(saved))
    seen += numbers(step_of(ranks, 1)) + numbers(step_of(ranks, 1))
    assert seen == list(range(20)) and not ranks[0].ended


def numbers(microbatches: list[Any]) -> list[int]:
    return [number for microbatch in microbatches for number in microbatch["number"].tolist()]


def test_files_are_streamed(tmp_path: Path) -> None:
    for part in range(3):
        rows = [{"number": 4 * part + index, "labels": [index]} for index in range(4)]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(tmp_path / f"{part}.jsonl") for part in range(3)]
    made = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "cache"))
    ranks = loaders(made.with_format("torch"), 2, 3, 1, {"epochs": 1})
    assert numbers(step_of(ranks, 1)) + numbers(step_of(ranks, 1)) == list(range(12))
    assert ranks[0].ended and ranks[1].ended


def test_samples_of_every_form_are_equal_batches() -> None:
    batches = [step_of(loaders(table(6, form), 1, 3, 1, {}), 1)[0] for form in ("torch", "numpy", None)]
    batches += [step_of(loaders(make(6), 1, 3, 1, {}), 1)[0] for make in (stream, formatted, generated)]
    for batch in batches:
        assert all(isinstance(value, Tensor) for value in batch.values())
        assert batch["labels"].tolist() == [[0], [1], [2]] and batch["number"].dtype == torch.int64


def stateful(dataset: Any, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(dataset, batch_size=2, **options)


def test_a_stateful_dataloader_is_taken_apart() -> None:
    (eng,) = made_for(1, micro=2, accumulation=1)
    plain, mixed = loader(stateful(table(6)), eng), loader(stateful(table(6), shuffle=True), eng)
    assert numbers([next(plain) for _ in range(3)]) == list(range(6))
    assert sorted(numbers([next(mixed) for _ in range(3)])) == list(range(6)) and mixed.state_dict()["shuffle"] == 1
    streamed = loader(stateful(formatted(6), num_workers=1, drop_last=True), eng, epochs=1)
    assert numbers(list(streamed)) == list(range(6))


@pytest.mark.parametrize("make", [table, formatted])
def test_its_own_state_is_not_the_place(make: Callable[[int], Any]) -> None:
    """Where torchdata would go on counts nothing; samples behind a state that it was given would be skipped twice."""
    (eng,) = made_for(1, micro=2, accumulation=1)
    begun = stateful(make(12))
    iterator = iter(begun)
    next(iterator), next(iterator)
    rank = loader(begun, eng)
    assert numbers([next(rank), next(rank)]) == [0, 1, 2, 3]
    again = loader(stateful(make(12)), eng)
    again.load_state_dict(rank.state_dict())
    assert numbers([next(again)]) == [4, 5]
    loaded = stateful(make(12))
    loaded.load_state_dict(begun.state_dict())
    with pytest.raises(EngineError, match="the StatefulDataLoader was loaded with load_state_dict") as caught:
        loader(loaded, eng)
    assert "\n" not in str(caught.value)


def test_a_stream_with_a_state_of_its_own_is_refused() -> None:
    made = stream(12)
    for _, _ in zip(made, range(3), strict=False):
        state = made.state_dict()
    made.load_state_dict(state)
    with pytest.raises(EngineError, match="the IterableDataset was loaded with load_state_dict") as caught:
        loaders(made, 1, 2, 1, {})
    assert "\n" not in str(caught.value)


def within_vocabulary(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"input_ids": [token % models.VOCABULARY for token in row["input_ids"]]}


def data_of(eng: engine.Engine) -> StepLoader:
    lengths = [9, 30, 2, 14, 1, 25, 40, 3, 17, 8, 33, 12, 21]
    made = texts(lengths, None).map(
        lambda row: {"input_ids": [token % models.VOCABULARY for token in row["input_ids"]]}
    )
    packing = Packing(length=12, labels="shifted")
    return loader(made.to_iterable_dataset(2).with_format("torch"), eng, pack=packing, workers=1)


def train_on(config: dict[str, Any], folder: Path, steps: int) -> list[float]:
    """Body of a rank: go on from the folder for some steps, and save."""
    with engine.initialize(models.decoder(), config, loss_sum) as eng:
        data = data_of(eng)
        eng.register_for_checkpointing(data=data)
        eng.load_checkpoint(folder, missing_ok=True)
        losses = [eng.train_batch(data).loss for _ in range(steps)]
        eng.save_checkpoint(folder).wait()
        return losses


@pytest.mark.long
def test_a_run_over_a_stream_goes_on_on_another_grid(run_ranks: RunRanks, tmp_path: Path) -> None:
    def config_for(dp: int, tp: int) -> dict[str, Any]:
        return {
            "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "parallel": {"data": dp, "tensor": tp},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        }  # fmt: skip

    expected = train_on(config_for(1, 1), tmp_path / "alone", 6)
    got: list[float] = []
    for dp, tp in ((2, 1), (1, 2), (4, 1)):
        losses = run_ranks(train_on, dp * tp, config_for(dp, tp), tmp_path / "run", 2)
        assert losses == [losses[0]] * (dp * tp)
        got += losses[0]
    assert got == pytest.approx(expected, rel=1e-5)
