"""Corpus, sampler and batches: no window lost or doubled on any grid, and an exact resume."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data import Batches, Sampler, evaluation_batches, window_count
from engine.data.corpus import Corpus, Split, builtin_corpus, text_corpus
from engine.errors import EngineError

windows_st = st.integers(1, 60)
sizes_st = st.integers(1, 5)
seeds_st = st.integers(0, 2**64 - 1)
CONTEXT = 3


def counting_corpus(windows: int, spare: int = 0) -> Corpus:
    """Token i is i, so that a batch tells which windows it holds."""
    tokens = np.arange(windows * CONTEXT + 1 + spare, dtype=np.uint16)
    return Corpus("counting", tokens, files=1, digest="0" * 16, vocabulary=tokens.size)


def global_steps(samplers: list[Sampler], steps: int) -> list[int]:
    """What all ranks together consume, in stream order."""
    return [int(i) for _ in range(steps) for sampler in samplers for i in next(sampler)]


def ranks(windows: int, batch: int, seed: int, data_size: int) -> list[Sampler]:
    return [Sampler(windows, batch, seed, rank, data_size) for rank in range(data_size)]


# corpus


@pytest.fixture(scope="module")
def train() -> Corpus:
    return builtin_corpus("train")


def test_builtin_corpus_is_deterministic_bytes(train: Corpus) -> None:
    again = builtin_corpus("train")
    assert again.digest == train.digest and len(train.digest) == 16
    assert np.array_equal(again.tokens, train.tokens)
    assert train.tokens.dtype == np.uint8 and train.vocabulary == 256
    assert train.tokens.size > 2_000_000 and train.files > 200


def test_builtin_validation_is_about_a_tenth_and_other_files(train: Corpus) -> None:
    validation = builtin_corpus("validation")
    assert validation.digest != train.digest
    assert 0.05 < validation.files / (validation.files + train.files) < 0.2
    start = validation.tokens[:200].tobytes()
    assert start not in train.tokens.tobytes()


def test_builtin_corpus_has_prose_and_no_tests(train: Corpus) -> None:
    text = train.tokens.tobytes() + builtin_corpus("validation").tokens.tobytes()
    assert text.count(b'The "assert" statement\n********') == 1 or sys.version_info >= (3, 14)
    assert b"class TestCase(object):" in text  # unittest itself is library, not test
    assert b"class RegressionTests(" not in text


def write(folder: Path, **texts: str) -> list[Path]:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return [folder / f"{name}.txt" for name in texts]


@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=12), salt=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_text_files_split_into_two_disjoint_full_sides(
    sizes: list[int], salt: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    paths = write(folder, **{f"{salt}-{i}": chr(65 + i) * size for i, size in enumerate(sizes)})
    train, validation = text_corpus(paths, "train"), text_corpus(paths[::-1], "validation")
    assert train.files >= 1 and validation.files >= 1
    assert train.files + validation.files == len(sizes)
    assert not set(train.tokens.tolist()) & set(validation.tokens.tolist())
    assert train.tokens.size + validation.tokens.size == sum(sizes)


def test_text_digest_survives_moving_the_folder_but_no_edit(tmp_path: Path) -> None:
    digests = []
    for folder, text in (("a", "red"), ("b", "red"), ("c", "rot")):
        (tmp_path / folder).mkdir()
        paths = write(tmp_path / folder, first="x" * 50, second=text)
        digests.append([text_corpus(paths, split).digest for split in ("train", "validation")])
    assert digests[0] == digests[1] != digests[2]


def test_single_text_file_keeps_its_last_tenth_for_validation(tmp_path: Path) -> None:
    [path] = write(tmp_path, book="a" * 90 + "b" * 10)
    assert text_corpus([path], "train").tokens.tobytes() == b"a" * 90
    assert text_corpus([str(path)], "validation").tokens.tobytes() == b"b" * 10
    assert isinstance(text_corpus([path], "train").tokens, np.memmap)


def test_text_corpus_errors_say_what_rule_and_remedy(tmp_path: Path) -> None:
    empty, short, long = write(tmp_path, empty="", short="x" * 19, long="x" * 20)
    cases: list[tuple[list[Path], str]] = [
        ([], "list of data files is empty, .* at least one.*Give --data FILE"),
        ([tmp_path / "nope.txt"], r"nope.txt is missing or is not a file; .* existing files. Check"),
        ([tmp_path], "is missing or is not a file; .* existing files. Check"),
        ([long, empty], "empty.txt is empty; .* at least 1 byte. Leave this file out"),
        ([short], "19 bytes; .* at least 20.* Give a longer file"),
        ([long, long], "given 2 times; a file counts once. Give this file once"),
    ]
    for paths, message in cases:
        with pytest.raises(EngineError, match=message):
            text_corpus(paths, "train")
    assert text_corpus([long], "validation").tokens.size == 2


def test_unknown_split_is_refused() -> None:
    wrong: Split = "test"  # type: ignore[assignment]
    with pytest.raises(EngineError, match=r"'test' is not a split .* Choose 'train' or 'validation'"):
        builtin_corpus(wrong)


# sampler


@given(windows_st, sizes_st, sizes_st, seeds_st, st.integers(0, 2))
@settings(deadline=None)
def test_every_epoch_holds_each_window_once(windows: int, rows: int, data_size: int, seed: int, epoch: int) -> None:
    batch = rows * data_size
    steps = -(-windows * (epoch + 1) // batch)
    stream = global_steps(ranks(windows, batch, seed, data_size), steps)
    assert len(stream) == steps * batch
    assert sorted(stream[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@given(windows_st, sizes_st, sizes_st, seeds_st)
@settings(deadline=None)
def test_order_does_not_depend_on_data_size(windows: int, rows: int, data_size: int, seed: int) -> None:
    batch = rows * data_size
    alone = global_steps(ranks(windows, batch, seed, 1), 7)
    assert global_steps(ranks(windows, batch, seed, data_size), 7) == alone


@given(windows_st, st.tuples(sizes_st, sizes_st), st.tuples(sizes_st, sizes_st), seeds_st, st.integers(0, 9))
@settings(deadline=None)
def test_resume_continues_on_another_grid_and_batch(
    windows: int, before: tuple[int, int], after: tuple[int, int], seed: int, steps: int
) -> None:
    first = ranks(windows, before[0] * before[1], seed, before[1])
    head = global_steps(first, steps)
    state = first[-1].state_dict()
    assert all(sampler.state_dict() == state for sampler in first)
    second = ranks(windows, after[0] * after[1], seed, after[1])
    for sampler in second:
        sampler.load_state_dict(state)
    tail = global_steps(second, 6)
    assert head + tail == Sampler(windows, 1, seed).stream(0, len(head) + len(tail)).tolist()


def test_epochs_and_seeds_give_different_orders() -> None:
    stream = Sampler(100, 1, seed=5).stream(0, 200).tolist()
    assert stream[:100] != stream[100:]
    assert stream[:100] != Sampler(100, 1, seed=6).stream(0, 100).tolist()


def test_order_is_the_same_for_ever() -> None:
    """A golden value: old checkpoints must continue under later versions of this code and of NumPy."""
    assert Sampler(8, 1, seed=1234).stream(0, 16).tolist() == [
        *(7, 3, 0, 1, 4, 2, 5, 6),
        *(0, 5, 6, 4, 2, 1, 7, 3),
    ]


def test_sampler_errors_say_what_rule_and_remedy() -> None:
    cases: list[tuple[tuple[int, ...], str]] = [
        ((0, 4), "windows = 0 is too small; .* Choose 1 or more"),
        ((9, 0), "global_batch = 0 is too small"),
        ((9, 10, 0, 0, 4), "global_batch = 10 is not divisible by data_size = 4.* such as 12"),
        ((9, 4, 0, 2, 2), "data_rank = 2 is not among data_size = 2 .* Choose 0 to 1"),
        ((9, 4, 0, 0, 0), "data_size = 0 is too small"),
        ((9, 4, -1), "seed = -1 is out of range.* Choose 0 to"),
    ]
    for arguments, message in cases:
        with pytest.raises(EngineError, match=message):
            Sampler(*arguments)


def test_state_of_another_stream_is_refused_and_changes_nothing() -> None:
    sampler = Sampler(9, 3, seed=1)
    next(sampler)
    good = sampler.state_dict()
    cases: list[tuple[dict[str, object], str]] = [
        ({**good, "seed": 2}, "seed = 2, this run has seed = 1; .* Set seed = 2, or start"),
        ({**good, "windows": 8}, "8 windows, this corpus has 9; .* Restore both"),
        ({**good, "position": -1}, "position = -1; .* integer from 0. Pass"),
        ({"seed": 1, "windows": 9}, "position = None"),
    ]
    for state, message in cases:
        with pytest.raises(EngineError, match=message):
            sampler.load_state_dict(state)
    assert sampler.state_dict() == good == {"position": 3, "seed": 1, "windows": 9}


# batches


def test_labels_are_the_next_tokens_and_each_target_comes_once() -> None:
    corpus = counting_corpus(windows=5, spare=2)
    assert window_count(corpus.tokens.size, CONTEXT) == 5
    batch = next(Batches(corpus, CONTEXT, Sampler(5, 5)))
    assert batch["input_ids"].shape == batch["labels"].shape == (5, CONTEXT)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert sorted(batch["labels"].flatten().tolist()) == list(range(1, 16))


def test_batches_of_all_ranks_are_the_rows_of_the_global_batch() -> None:
    corpus = counting_corpus(windows=7)
    whole = next(Batches(corpus, CONTEXT, Sampler(7, 6, seed=3)))["input_ids"]
    parts = [next(Batches(corpus, CONTEXT, sampler))["input_ids"] for sampler in ranks(7, 6, 3, 3)]
    assert torch.equal(torch.cat(parts), whole)


def test_inputs_and_labels_share_no_memory() -> None:
    """torch's contiguous() hands back a view of a single row, so masking a label would change an input."""
    batch = next(Batches(counting_corpus(windows=1), CONTEXT, Sampler(1, 1)))
    batch["labels"].fill_(-100)
    assert batch["input_ids"].tolist() == [[0, 1, 2]]


def test_batches_resume_where_they_were() -> None:
    corpus = counting_corpus(windows=7)
    first = Batches(corpus, CONTEXT, Sampler(7, 2))
    list(islice(first, 5))
    second = Batches(corpus, CONTEXT, Sampler(7, 2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(next(first)["input_ids"], next(second)["input_ids"])


def test_batches_refuse_a_short_corpus_and_a_foreign_sampler() -> None:
    with pytest.raises(EngineError, match=r"3 tokens; .* = 4. Give more text, or choose a smaller context"):
        window_count(3, CONTEXT)
    with pytest.raises(EngineError, match="context = 0 is too small"):
        window_count(3, 0)
    with pytest.raises(EngineError, match=r"draws from 4 windows; corpus counting has 5 .* Make it with"):
        Batches(counting_corpus(5), CONTEXT, Sampler(4, 2))


@given(windows_st, sizes_st, sizes_st)
@settings(deadline=None)
def test_evaluation_covers_each_target_once(windows: int, rows: int, data_size: int) -> None:
    corpus = counting_corpus(windows)
    per_rank = [list(evaluation_batches(corpus, CONTEXT, rows, r, data_size)) for r in range(data_size)]
    assert {len(batches) for batches in per_rank} == {-(-windows // (rows * data_size))}
    batches = [batch for step in zip(*per_rank, strict=True) for batch in step]
    assert all(tensor.shape == (rows, CONTEXT) for batch in batches for tensor in batch.values())
    labels = torch.cat([batch["labels"] for batch in batches]).flatten()
    inputs = torch.cat([batch["input_ids"] for batch in batches]).flatten()
    real = labels != -100
    assert labels[real].tolist() == list(range(1, windows * CONTEXT + 1))
    assert torch.equal(inputs[real], labels[real] - 1) and not inputs[~real].any()


def test_evaluation_stops_at_the_limit_on_every_rank() -> None:
    corpus = counting_corpus(windows=9)
    for rank, first in ((0, 0), (1, 2 * CONTEXT)):
        [batch] = evaluation_batches(corpus, CONTEXT, 2, rank, 2, limit=1)
        assert batch["input_ids"][0, 0] == first


def test_evaluation_errors_come_at_the_call() -> None:
    corpus = counting_corpus(windows=2)
    with pytest.raises(EngineError, match="rows = 0 is too small"):
        evaluation_batches(corpus, CONTEXT, 0)
    with pytest.raises(EngineError, match="limit = 0 is too small"):
        evaluation_batches(corpus, CONTEXT, 1, limit=0)
    with pytest.raises(EngineError, match="data_rank = 3 is not among data_size = 2"):
        evaluation_batches(corpus, CONTEXT, 1, 3, 2)
    with pytest.raises(EngineError, match="Give more text"):
        evaluation_batches(corpus, 100, 1)


def test_corpus_and_sampler_need_no_torch() -> None:
    program = (
        "import sys; from engine.data.corpus import builtin_corpus; from engine.data import Sampler\n"
        "next(Sampler(9, 3)); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=root, check=False).returncode == 0
