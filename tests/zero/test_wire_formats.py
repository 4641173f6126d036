"""Which buckets travel in fewer bits, who exchanges with whom, and what a bucket costs."""

from dataclasses import replace

import pytest

from engine.kernels.codecs.block_codec import BlockFormat
from engine.zero.layout import Bucket, Item, build_layout
from engine.zero.wire_formats import WireFormats

INT8 = BlockFormat(8, 256)
BOTH = WireFormats(ranks=4, within=4, weights=INT8, gradients=INT8)


def bucket(dtype: str = "float32", exact: bool = False) -> Bucket:
    (found,) = build_layout([Item("w", (3000,), dtype, exact=exact)], 4, 1, BOTH.alignment).buckets
    return found


@pytest.mark.parametrize(
    ("dtype", "exact", "encoded"),
    [
        ("float32", False, True), ("bfloat16", False, True), ("float16", False, True), ("float64", False, False),
        ("int8", False, False), ("float32", True, False),
    ],
)  # fmt: skip
def test_what_is_encoded(dtype: str, exact: bool, encoded: bool) -> None:
    one = bucket(dtype, exact)
    assert (BOTH.of_gradients(one) is not None) == (BOTH.of_weights(one) is not None) == encoded
    assert BOTH.gathered_bytes(one, 2) == (4 * INT8.message_bytes(768) if encoded else 2 * one.elements)


def test_nothing_is_encoded_unless_asked_and_weights_without_a_master_are_not() -> None:
    assert WireFormats(ranks=4, within=4).of_gradients(bucket()) is None
    masters = replace(BOTH, weight_dtypes=frozenset({"bfloat16"}))
    assert masters.of_weights(bucket()) is None and masters.of_weights(bucket("bfloat16")) == INT8


def test_slots_start_at_blocks_so_that_a_block_has_one_parameter() -> None:
    items = [Item(f"p{number}", (100 * number + 1,), "float32") for number in range(9)]
    for ranks in (1, 2, 3):
        for one in build_layout(items, ranks, 10**9, BOTH.alignment).buckets:
            assert all(slot.start % 256 == 0 for slot in one.slots) and one.elements % (256 * ranks) == 0


def test_parameters_with_own_and_shared_rows_have_buckets_of_their_own() -> None:
    items = [Item(name, (10,), "float32", exact=name == "qkv") for name in ("a", "qkv", "b")]
    found = build_layout(items, 2, 10**9).buckets
    assert [[slot.name for slot in one.slots] for one in found if one.exact] == [["qkv"]]
    assert sorted(slot.name for one in found if not one.exact for slot in one.slots) == ["a", "b"]


@pytest.mark.parametrize(
    ("within", "first", "second"),
    [
        (6, [(0, 1, 2, 3, 4, 5)], []),
        (1, [(0, 1, 2, 3, 4, 5)], []),
        (3, [(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_each_hop_has_its_groups(within: int, first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> None:
    given = replace(BOTH, ranks=6, within=within)
    groups = [sorted({given.members(hop, index) for index in range(6)}) for hop in range(len(given.hops))]
    assert groups == [first, *([second] if second else [])]
    assert all(index in given.members(hop, index) for hop in range(len(given.hops)) for index in range(6))


def test_error_feedback_takes_four_bytes_for_what_each_hop_encodes() -> None:
    one = bucket()
    assert BOTH.residual_elements(one) == 0
    assert replace(BOTH, feedback=True).residual_elements(one) == one.elements
    assert replace(BOTH, feedback=True, within=2).residual_elements(one) == one.elements + one.elements // 2
