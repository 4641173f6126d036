"""Which way a product takes, by the table of what was measured."""

import torch

from engine.kernels.overlap import (
    OverlapChoice,
    OverlapChoices,
    ProductSizes,
    overlap_choices,
    read_overlap,
    shipped_overlap,
)

BF16 = torch.bfloat16
TEXT = """{"winners": [
  {"operation": "gather_product", "device": "NVIDIA H100*", "dtype": "bfloat16", "ranks": 8, "rows": 4096,
   "columns": 1792, "depth": 4096, "way": "fused", "speedup": 1.3, "tile": [128, 256, 64, 8, 3]},
  {"operation": "gather_product", "device": "NVIDIA H100*", "dtype": "bfloat16", "ranks": 8, "rows": 16384,
   "columns": 1792, "depth": 4096, "way": "chunks", "speedup": 0.9}
]}"""
ROWS = read_overlap(TEXT)


def way_of(choices: OverlapChoices, sizes: ProductSizes, dtype: torch.dtype = BF16) -> str | None:
    row = choices.find("gather_product", sizes, dtype)
    return None if row is None else row.way


def test_a_row_applies_to_its_product_up_to_the_rows_of_the_next() -> None:
    choices = OverlapChoices(ROWS)
    assert way_of(choices, ProductSizes(4096, 1792, 4096)) == "fused"
    assert way_of(choices, ProductSizes(16383, 1792, 4096)) == "fused"
    assert way_of(choices, ProductSizes(16384, 1792, 4096)) == "chunks"
    for other in (ProductSizes(4095, 1792, 4096), ProductSizes(4096, 1793, 4096), ProductSizes(4096, 1792, 4097)):
        assert way_of(choices, other) is None
    assert way_of(choices, ProductSizes(4096, 1792, 4096), torch.float16) is None
    assert choices.find("product_scatter", ProductSizes(4096, 1792, 4096), BF16) is None


def test_a_product_of_which_one_size_is_known_may_fuse() -> None:
    choices = OverlapChoices(ROWS)
    assert choices.may_fuse("gather_product", 4096, BF16, depth=4096)
    assert choices.may_fuse("gather_product", 4096, BF16, columns=1792)
    assert not choices.may_fuse("gather_product", 16384, BF16, depth=4096), "chunks were faster there"
    assert not choices.may_fuse("gather_product", 4096, BF16, depth=1792)
    assert not choices.may_fuse("product_scatter", 4096, BF16, depth=4096)


def test_rows_are_of_a_gpu_and_a_number_of_ranks() -> None:
    assert ROWS[0].tile == (128, 256, 64, 8, 3) and ROWS[1].tile is None
    assert all(isinstance(row, OverlapChoice) for row in shipped_overlap())
    assert overlap_choices("a GPU that nobody has measured", 8).rows == ()
