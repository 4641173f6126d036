"""Which tensors of a batch are rows: named ones and those of the example that have other sizes are whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.errors import EngineError
from engine.program.batch_rows import BatchRows
from engine.verify import Parity, verify
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def test_named_tensors_are_not_cut() -> None:
    batch = {"x": torch.arange(8).view(4, 2), "weights": torch.ones(4), "more": {"positions": torch.arange(3)[None]}}
    parts = BatchRows(whole=frozenset(("weights", "positions"))).take_microbatches(batch, 2, 2)
    assert [part["x"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(part["weights"] is batch["weights"] and part["more"]["positions"].shape == (1, 3) for part in parts)
    parts = BatchRows(whole=frozenset((1,))).take_microbatches((torch.ones(4, 2), torch.ones(4)), 2, 2)
    assert [part[1].shape for part in parts] == [(4,), (4,)]


def test_tensors_of_the_example_without_its_rows_are_whole() -> None:
    example = {"x": torch.ones(2, 5), "positions": torch.ones(1, 5), "lengths": torch.ones(7)}
    rows = BatchRows.of((), example, 2)
    assert rows.notes == ("batch: every microbatch gets the whole of batch['lengths'], batch['positions']",)
    parts = rows.take_microbatches(
        {"x": torch.ones(4, 5), "positions": torch.ones(1, 5), "lengths": torch.ones(4)}, 2, 2
    )
    assert [tuple(part["lengths"].shape) for part in parts] == [(4,), (4,)], "not by accident of size"
    assert BatchRows.of((), {"x": torch.ones(1, 5)}, 2) == BatchRows(), "an example of another size tells nothing"


def test_iterators_too() -> None:
    items = iter([{"x": torch.ones(2, 3), "p": torch.ones(1, 3)}] * 2)
    assert len(BatchRows(whole=frozenset(("p",))).take_microbatches(items, 2, 2)) == 2


def test_a_named_tensor_may_be_missing_from_a_batch() -> None:
    """Rows without pictures have no patches; a name that is nearly one of the batch's is a slip."""
    rows = BatchRows(whole=frozenset(("pixel_values", "image_grid_thw")))
    assert len(rows.take_microbatches({"ids": torch.ones(4, 2)}, 2, 2)) == 2
    assert rows.count({"pixel_values": torch.ones(7, 3), "ids": torch.ones(4, 2)}) == 4
    assert rows.whole_names({"pixel_values": torch.ones(4, 3), "ids": torch.ones(4, 2)}) == ["batch['pixel_values']"]
    with pytest.raises(EngineError, match=r"whole has 'pixel_values', .* mean whole=\['pixel_values_videos'\]\?"):
        rows.take_microbatches({"ids": torch.ones(4, 2), "pixel_values_videos": torch.ones(4, 3)}, 2, 2)


def test_names_and_sizes_that_do_not_fit() -> None:
    batch = {"x": torch.ones(4, 2), "positions": torch.ones(1, 2)}
    with pytest.raises(EngineError, match=r"whole has 'position', but the batch .* mean whole=\['positions'\]\?"):
        BatchRows(whole=frozenset(("position",))).take_microbatches(batch, 2, 2)
    with pytest.raises(EngineError, match=r"batch\['positions'\] has leading dim 1, .* pass whole=\['positions'\] to"):
        BatchRows().take_microbatches(batch, 2, 2)
    with pytest.raises(EngineError, match="has no tensor with a leading dim"):
        BatchRows(whole=frozenset(("x", "positions"))).take_microbatches(batch, 2, 2)


# ------------------------------------------------------------------------------------------------ on grids

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    "gradient_clipping": 0.1,
}
WIDTH, CLASSES = 16, 8  # as many classes as rows of a step, so that weights of classes could pass as rows


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.down(F.gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """Adds the embedding of one row of positions to every row, and weighs classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.places = nn.Embedding(31, WIDTH), nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, position_ids: Tensor, labels: Tensor, class_weights: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x.mean(1)), labels, class_weights)}


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(CLASSES, generator=generator) + 0.5
    return [
        {
            "ids": torch.randint(0, 31, (8, 24), generator=generator),
            "position_ids": torch.arange(24)[None],
            "labels": torch.randint(0, CLASSES, (8,), generator=generator),
            "class_weights": weights,
        }
        for _ in range(3)
    ]


def trained(grid: dict[str, int]) -> Parity | None:
    """Body of a rank."""
    return verify(Classifier, CONFIG | {"parallel": grid}, batches(), whole=("position_ids", "class_weights"))


@pytest.mark.parametrize("grid", [{"data": 2}, {"pipeline": 2}, wide({"tensor": 2})], ids=str)
def test_whole_tensors_on_every_axis(run_ranks: RunRanks, grid: dict[str, int]) -> None:
    parity = run_ranks(trained, 2, grid)[0]
    assert parity.holds(), str(parity)


def test_the_example_tells_as_much() -> None:
    first, *_ = batches()
    example = {"ids": first["ids"][:2], "labels": first["labels"][:2]} | {
        k: first[k] for k in ("position_ids", "class_weights")
    }
    losses = []
    for options in ({"example_batch": example}, {"whole": ["position_ids", "class_weights"]}):
        with engine.initialize(Classifier(), CONFIG, **options) as eng:
            losses.append([eng.train_batch(batch).loss for batch in batches()])
    assert losses[0] == losses[1]
