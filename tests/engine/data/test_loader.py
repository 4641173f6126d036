"""Microbatches of a loader: whose rows, the end of the data, padding, and what cannot be."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from engine.data import Packing, Padding, StepLoader, loader
from engine.data.settings import AtEnd, LoaderOptions
from engine.errors import EngineError
from tests.engine.data.loaders import MeasuredTexts, Numbers, Stream, Texts, TextStream, loaders, made_for, step_of


def numbers(microbatches: list[Any]) -> list[list[int]]:
    return [microbatch["number"].tolist() for microbatch in microbatches]


def test_each_rank_reads_its_rows_of_the_global_batch() -> None:
    datasets = [Numbers(20), Numbers(20)]
    engines = made_for(2, micro=2, accumulation=2)
    ranks = [loader(dataset, eng) for dataset, eng in zip(datasets, engines, strict=True)]
    assert numbers(step_of(ranks, 2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert numbers(step_of(ranks, 2)) == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert [dataset.read for dataset in datasets] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert numbers(step_of(ranks, 2)) == [[16, 17], [18, 19], [0, 1], [2, 3]], "a batch may span epochs"


def test_the_place_moves_with_whole_steps() -> None:
    (rank,) = loaders(Numbers(20), 1, 2, 3, {})
    next(rank)
    assert rank.position == 0
    next(rank)
    assert numbers([next(rank)]) == [[4, 5]]
    assert rank.position == 6 == rank.state_dict()["position"]


@pytest.mark.parametrize("dataset", [Numbers(10), Stream(10)], ids=["mapped", "stream"])
@pytest.mark.parametrize("at_end", ["joined", "dropped"])
def test_a_last_step_that_is_not_whole(dataset: Any, at_end: AtEnd) -> None:
    """2 ranks, 2 microbatches of 2 rows: 10 samples are one step and a quarter of the next."""
    ranks = loaders(dataset, 2, 2, 2, {"epochs": 1, "at_end": at_end})
    step_of(ranks, 2)
    if at_end == "dropped":
        assert [rank.ended for rank in ranks] == [True, True] and ranks[0].position == 8
        return
    assert not ranks[1].ended
    labels = [microbatch["labels"].flatten().tolist() for microbatch in step_of(ranks, 2)]
    assert labels == [[8, 9], [-100, -100], [-100, -100], [-100, -100]], "the rank without rows takes part"
    assert [rank.ended for rank in ranks] == [True, True]
    assert {rank.position for rank in ranks} == {10}
    (again,) = loaders(dataset, 1, 1, 1, {"epochs": 1, "at_end": at_end})
    again.load_state_dict(ranks[1].state_dict())
    assert again.ended and list(again) == []


def test_a_last_step_is_refused_before_anything_is_read_where_lengths_are_known() -> None:
    dataset = Numbers(10)
    with pytest.raises(EngineError, match="the data end with 2 of the 8 rows of a step"):
        loaders(dataset, 2, 2, 2, {"epochs": 1})
    assert not dataset.read
    (good,) = loaders(dataset, 1, 5, 1, {"epochs": 1})
    next(good)
    (other,) = loaders(dataset, 1, 2, 1, {"epochs": 1})
    with pytest.raises(EngineError, match="the data end with 1 of the 2 rows"):
        other.load_state_dict(good.state_dict())
    ranks = loaders(Stream(10), 2, 2, 2, {"epochs": 1})
    step_of(ranks, 2)
    for rank in ranks:
        with pytest.raises(EngineError, match="the data end with 2 of the 8 rows of a step"):
            next(rank)
    assert [len(list(rank)) for rank in loaders(Stream(16), 2, 2, 2, {"epochs": 1})] == [4, 4]


def test_steps_left() -> None:
    options: LoaderOptions = {"epochs": 2, "at_end": "joined"}
    endless: LoaderOptions = {}
    (rank,) = loaders(Numbers(5), 1, 2, 2, options)
    assert rank.steps_left == 3
    next(rank), next(rank)
    assert rank.steps_left == 2
    (dropped,) = loaders(Numbers(5), 1, 2, 2, {"epochs": 2, "at_end": "dropped"})
    assert dropped.steps_left == 2
    for dataset, more, why in (
        (Stream(5), options, "the dataset has no length"),
        (Numbers(5), endless, "the loader is endless"),
    ):
        (unknown,) = loaders(dataset, 1, 2, 2, more)
        with pytest.raises(EngineError, match=f"steps_left of this loader is unknown: {why}"):
            _ = unknown.steps_left


def test_rows_are_padded_to_a_multiple() -> None:
    data = [{"input_ids": list(range(1, n + 1)), "labels": list(range(n)), "id": n} for n in (3, 5, 1, 2)]
    (rank,) = loaders(data, 1, 2, 1, {"pad": Padding(multiple=4, token=9)})
    first, second = next(rank), next(rank)
    assert first["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 9, 9, 9]]
    assert first["labels"].tolist() == [[0, 1, 2, *[-100] * 5], [0, 1, 2, 3, 4, *[-100] * 3]]
    assert second["input_ids"].tolist() == [[1, 9, 9, 9], [1, 2, 9, 9]] and second["id"].tolist() == [1, 2]


def test_lists_of_numbers_are_tensors() -> None:
    box = [[1.0, 2.0], [3.0, 4.0]]
    data = [{"input_ids": [], "box": box, "text": "a"}, {"input_ids": [5], "box": box, "text": "b"}]
    (rank,) = loaders(data, 1, 2, 1, {"pad": Padding(token=9)})
    batch = next(rank)
    assert batch["input_ids"].tolist() == [[9], [5]] and batch["box"].shape == (2, 2, 2) and batch["text"] == ["a", "b"]


def test_numbers_of_numpy_are_numbers() -> None:
    data = [{"input_ids": list(np.arange(3)), "kind": np.uint16(7)}] * 2
    batch = next(loaders(data, 1, 2, 1, {})[0])
    assert batch["input_ids"].tolist() == [[0, 1, 2]] * 2 and torch.equal(batch["kind"], torch.tensor([7, 7]))


class Pair(NamedTuple):
    """Microbatch."""

    ids: Tensor
    labels: Tensor


def test_a_named_tuple_is_filled_up() -> None:
    options: LoaderOptions = {"epochs": 1, "at_end": "joined", "collate": lambda rows: Pair(*[torch.tensor(rows)] * 2)}
    (batch,) = loaders([torch.tensor(4)], 1, 2, 1, options)[0]
    assert isinstance(batch, Pair) and (batch.ids.tolist(), batch.labels.tolist()) == ([4, 4], [4, -100])


def in_one_row(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Samples one after another, as a padding-free collator makes them."""
    return {"labels": torch.cat([*rows]).long()[None]}


class Endless(Sampler[int]):
    """Order without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class Backwards(SequentialSampler):
    """Order of its own, in a subclass of torch's sampler."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self)))


def test_a_dataloader_is_taken_apart() -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    (eng,) = made_for(1, micro=2, accumulation=1)
    plain, shuffled = loader(DataLoader(data, 2), eng), loader(DataLoader(data, 2, shuffle=True), eng)
    inputs, labels = next(plain)
    assert labels.tolist() == [0, 1] and inputs.tolist() == [[0, 1], [2, 3]]
    assert sorted(int(label) for _ in range(3) for label in next(shuffled)[1]) == list(range(6))
    assert plain.state_dict()["shuffle"] == 0 and shuffled.state_dict()["shuffle"] == 1
    own: DataLoader[Any] = DataLoader(data, 2, collate_fn=len, num_workers=2, drop_last=True)
    assert next(loader(own, eng, workers=0)) == 2
    with pytest.raises(EngineError, match="batch_size 3, but train_micro_batch_size_per_gpu is 2"):
        loader(DataLoader(data, 3), eng)
    part = SubsetRandomSampler([1, 2])
    drawn = RandomSampler(data, replacement=True)
    for sampler in (part, drawn, Endless(), Backwards(data)):
        with pytest.raises(EngineError, match=rf"has a {type(sampler).__name__}, whose order"):
            loader(DataLoader(data, 2, sampler=sampler), eng)


def test_the_state_of_torchs_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    (rank,) = loaders(Numbers(9), 1, 1, 1, {"shuffle": True})
    next(rank)
    assert torch.equal(torch.get_rng_state(), before)


class Unsized(Dataset[Tensor]):
    """torch's map-style dataset, whose length is unknown."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


def one_pass() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize(
    ("dataset", "options", "match"),
    [
        (Unsized(), {}, "is a Unsized, which has neither __getitem__ with __len__ nor __iter__. Add __len__"),
        (Stream(4), {"shuffle": True}, "shuffle = True needs the length of the dataset, and Stream is read in order"),
        (Stream(4), {"workers": 2}, "workers = 2, but Stream is read in order, which one worker does"),
        (Texts([3]), {"workers": 2, "pack": Packing(length=4)}, "pack reads documents without lengths in order"),
        ([], {}, "the dataset is empty"),
        (MeasuredTexts([0, 0]), {"pack": Packing(length=4)}, "the documents have no tokens"),
        (Numbers(4), {"at_end": "padded"}, "at_end = 'padded' is unknown. Choose 'joined', 'dropped' or 'refused'"),
        (Numbers(4), {"batches": "rank1"}, "batches = 'rank1' is unknown. Choose 'all' or 'rank0'"),
        (Numbers(4), {"workers": -1}, "workers = -1 is too small; the smallest is 0"),
        (Numbers(4), {"epochs": 0}, "epochs = 0 is too small; the smallest is 1"),
        (Texts([3]), {"pack": Packing(length=4), "pad": Padding()}, "was given pack and pad"),
        (Texts([3]), {"pack": 4}, r"pack = 4 is a int, not a Packing. Pass Packing\(...\)"),
        (Numbers(4), {"shufle": True}, "the loader has no option 'shufle'; did you mean 'shuffle'?"),
    ],
)
def test_what_cannot_be_is_refused_at_once(dataset: Any, options: LoaderOptions, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        loaders(dataset, 1, 2, 1, options)


@pytest.mark.parametrize(
    ("dataset", "options", "match"),
    [
        ([{"x": [1]}, {"x": [1, 2]}], {}, r"have 'x' of shapes \(1,\) and \(2,\); a batch needs one"),
        ([(1, 2), (3, 4)], {"pad": Padding()}, "a sample is a tuple; only the keys of a dict tell"),
        ([torch.zeros(2)], {"epochs": 1, "at_end": "joined"}, "this batch has no integer labels"),
        (TextStream([0]), {"pack": Packing(length=4), "epochs": 1, "at_end": "joined"}, None),
        (TextStream([0]), {"pack": Packing(length=4)}, "the documents have no tokens, so there are no rows"),
        (
            [torch.ones(3)],
            {"epochs": 1, "at_end": "joined", "collate": in_one_row},
            r"labels of 2 samples have shape \[",
        ),
        ([[1.5, 2.5]], {"pack": Packing(length=4)}, "a document is a list with float64 in 1 dims"),
        ([{"text": "a"}], {"pack": Packing(length=4)}, "a document is a dict with no input_ids"),
        (one_pass(), {}, "the dataset returned no sample in epoch 1"),
    ],
)
def test_what_samples_lack_is_said(dataset: Any, options: LoaderOptions, match: str | None) -> None:
    (rank,) = loaders(dataset, 1, 2, 1, options)
    if match is None:
        assert rank.ended, "documents without tokens make no row"
        return
    with pytest.raises(EngineError, match=match):
        for _ in range(3):
            next(rank)


def test_a_state_of_something_else_is_refused() -> None:
    (rank,) = loaders(Numbers(9), 1, 1, 1, {"shuffle": True})
    state = rank.state_dict()
    for key, value, match in (
        ("position", "3", "position = '3'; it must be an integer from 0"),
        ("seed", 6, "seed = 6, this loader has 5"),
        ("samples", 8, "samples = 8, this loader has 9"),
        ("shuffle", 0, "shuffle = 0, this loader has 1"),
        ("row_length", 4, "row_length = 4, this loader has 0"),
    ):
        with pytest.raises(EngineError, match=match):
            rank.load_state_dict({**state, key: value})
    (short,) = loaders(Stream(4), 1, 1, 1, {})
    with pytest.raises(EngineError, match="continues after 6 samples of an epoch, but the dataset has 4"):
        short.load_state_dict({**short.state_dict(), "read": 6})
        next(short)


def test_a_reader_that_fails_fails_again() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise OSError("disk")

    (rank,) = loaders(Broken(4), 1, 1, 1, {})
    assert isinstance(rank, StepLoader)
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            next(rank)


class Divided(Stream):
    """A stream that is another one in a worker, as Hugging Face's shuffled ones are."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = list(super().__iter__())
        return iter(samples if get_worker_info() is None else samples[::-1])


def test_a_stream_reads_in_one_order_in_a_worker_too() -> None:
    alone, behind = (loaders(Divided(6), 1, 2, 1, {"workers": workers})[0] for workers in (0, 1))
    assert numbers([next(alone) for _ in range(4)]) == numbers([next(behind) for _ in range(4)])


LENGTHS = [4, 2, 0, 5]
"""Tokens 0 to 3, 4 and 5, 6 to 10."""
IGNORED = -100


@pytest.mark.parametrize("made", [MeasuredTexts, Texts, TextStream])
def test_borders_of_documents(made: Any) -> None:
    packing = Packing(length=5, segments=True, pad_token=77)
    (rank,) = loaders(made(LENGTHS), 1, 3, 1, {"pack": packing})
    rows = {name: values.tolist() for name, values in next(rank).items()}
    assert rows == {
        "input_ids": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 77, 77, 77, 77]],
        "labels": [[IGNORED, 1, 2, 3, IGNORED], [IGNORED, IGNORED, 7, 8, 9], [IGNORED] * 5],
        "position_ids": [[0, 1, 2, 3, 0], [0, 0, 1, 2, 3], [0, 0, 1, 2, 3]],
        "segment_ids": [[1, 1, 1, 1, 2], [1, 2, 2, 2, 2], [1, 0, 0, 0, 0]],
    }


@pytest.mark.parametrize("made", [MeasuredTexts, Texts, TextStream])
def test_shifted_labels_lose_no_target_of_a_cut_document(made: Any) -> None:
    (rank,) = loaders(made(LENGTHS), 1, 3, 1, {"pack": Packing(length=5, labels="shifted")})
    batch = next(rank)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["labels"].tolist() == [[1, 2, 3, IGNORED, 5], [IGNORED, 7, 8, 9, 10], [IGNORED] * 5]
    assert all(values.dtype == torch.int64 for values in batch.values())


@pytest.mark.long
def test_a_packed_row_gives_the_logits_of_its_documents_alone() -> None:
    """Hugging Face's attention reads borders from position_ids, where no attention_mask is given."""
    from tests.models import llama

    model = llama().eval()
    (rank,) = loaders(MeasuredTexts([7, 9, 4]), 1, 1, 1, {"pack": Packing(length=20)})
    batch = next(rank)
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = [model(input_ids=part[None]).logits[0] for part in batch["input_ids"][0].split([7, 9, 4])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [MeasuredTexts, Texts])
def test_every_epoch_has_its_own_order(made: Any) -> None:
    """A document fills a row, so that rows tell the order of documents."""
    (rank,) = loaders(made([3] * 8), 1, 8, 1, {"pack": Packing(length=3), "shuffle": True})
    first, second = ([row[0] // 3 for row in next(rank)["input_ids"].tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second and list(range(8)) not in (first, second)
