"""Packed rows: borders of documents in labels, positions and segments, and the same rows however they are found."""

from typing import Any

import pytest
import torch

from engine.data import Packing
from tests.engine.data.loaders import MeasuredTexts, Texts, TextStream, loaders

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
