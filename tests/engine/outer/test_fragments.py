"""Fragments contain each tensor once, blocks in strides, and are pushed at even distances."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.outer.fragments import Fragment, Rows, divide, due


def llama(layers: int, width: int = 8, vocabulary: int = 100) -> Rows:
    inner = [("attention.weight", (width, width)), ("mlp.up.weight", (4 * width, width)), ("norm.weight", (width,))]
    blocks = [(f"model.layers.{index}.{name}", shape) for index in range(layers) for name, shape in inner]
    return [
        ("model.embed.weight", (vocabulary, width)), *blocks, ("model.norm.weight", (width,)),
        ("head.weight", (vocabulary, width)),
    ]  # fmt: skip


def fragments_of(found: tuple[Fragment, ...]) -> dict[str, int]:
    return {name: fragment.index for fragment in found for name in fragment.names}


def test_blocks_are_strided_and_the_rest_joins_the_lightest() -> None:
    found = fragments_of(divide(llama(5), 2))
    assert [found[f"model.layers.{index}.norm.weight"] for index in range(5)] == [0, 1, 0, 1, 0]
    assert found["model.embed.weight"] == 1, "two blocks are less than three"
    assert found["head.weight"] == 0
    assert all(found[f"model.layers.3.{name}.weight"] == 1 for name in ("attention", "mlp.up", "norm"))


def test_blocks_of_two_lists_are_counted_in_one_order() -> None:
    rows = [(f"{side}.block.{index}.weight", (4,)) for side in ("encoder", "decoder") for index in range(3)]
    assert list(fragments_of(divide(rows, 3)).values()) == [0, 0, 1, 1, 2, 2]
    assert fragments_of(divide(rows, 4))["decoder.block.1.weight"] == 0


@pytest.mark.parametrize(
    "prefix",
    ["layers.{}.", "1.layers.{}.", "stages.0.{}."],
)
def test_a_chain_has_elements_of_equal_shapes(prefix: str) -> None:
    """A list of parts that differ (an embedding, a body, a head) is no chain; the lists inside it are."""
    chain = [(f"{prefix.format(index)}experts.{expert}.weight", (4, 4)) for index in range(4) for expert in range(2)]
    rows = [("0.weight", (9, 4)), *chain, ("2.weight", (4, 9))]
    found = fragments_of(divide(rows, 4))
    assert [found[f"{prefix.format(index)}experts.1.weight"] for index in range(4)] == [0, 1, 2, 3]
    assert [found[f"{prefix.format(index)}experts.0.weight"] for index in range(4)] == [0, 1, 2, 3]


def test_a_list_of_parameters_is_no_chain() -> None:
    rows = [*((f"scales.{index}", (4,)) for index in range(4)), ("weight", (16,))]
    first, second = divide(rows, 2)
    assert {first.names, second.names} == {("weight",), tuple(f"scales.{index}" for index in range(4))}


def test_more_fragments_than_blocks_divide_tensors() -> None:
    rows = llama(2)
    found = divide(rows, len(rows))
    assert [len(fragment.names) for fragment in found] == [1] * len(rows)
    with pytest.raises(ValueError, match=r"has 9 fragments, and the model has 8 trained tensors; .* from 1 to 8"):
        divide(rows[:8], 9)


def test_stores_share_each_fragment_by_size() -> None:
    found = divide(llama(8), 2, stores=2)
    assert [(part.index, part.store) for part in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for index in range(2):
        first, second = (part.elements for part in found if part.index == index)
        assert abs(first - second) <= 4 * 8 * 8


def test_stores_with_nothing_of_a_fragment_are_left_out() -> None:
    found = divide([("a", (4,)), ("b", (2,)), ("c", (2,))], 3, stores=2)
    assert [(part.index, part.store, part.names) for part in found] == [
        (0, 0, ("a",)), (1, 1, ("b",)), (2, 1, ("c",)),
    ]  # fmt: skip


@given(layers=st.integers(0, 9), fragments=st.integers(1, 6), stores=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_tensor_is_in_one_fragment_in_the_order_of_the_model(layers: int, fragments: int, stores: int) -> None:
    rows = llama(layers)
    if fragments > len(rows):
        return
    found, order = divide(rows, fragments, stores), [name for name, _ in rows]
    assert sorted(name for part in found for name in part.names) == sorted(order)
    assert all(part.names and list(part.names) == sorted(part.names, key=order.index) for part in found)
    assert {part.index for part in found} == set(range(fragments))
    assert sum(part.elements for part in found) == 100 * 8 * 2 + 8 + layers * (64 + 256 + 8)
    assert found == divide(list(rows), fragments, stores)


@pytest.mark.parametrize(
    ("rows", "stores", "sentence"),
    [([("a", (1,)), ("a", (1,))], 1, "the tensor 'a' occurs more than once"), ([("a", (1,))], 0, "has 0 stores")],
)
def test_bad_rows_and_stores_are_refused(rows: Rows, stores: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        divide(rows, 1, stores)


@given(fragments=st.integers(1, 12), more=st.integers(0, 40), start=st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_a_period_pushes_each_fragment_once_at_even_distances(fragments: int, more: int, start: int) -> None:
    period = fragments + more
    pushes = [
        (step, index)
        for step in range(start, start + 2 * period)
        for index in range(fragments)
        if due(step, period, fragments, index)
    ]
    assert sorted(index for step, index in pushes if step < start + period) == list(range(fragments))
    gaps = {later - step for (step, _), (later, _) in pairwise(pushes)}
    assert max(gaps) - min(gaps) <= 1, "and so one push a step"


def test_the_first_push_has_a_step_before_it() -> None:
    assert [step for step in range(65) if due(step, 32, 1, 0)] == [32, 64]
    first = [next(step for step in range(99) if due(step, 32, 4, index)) for index in range(4)]
    assert first == [32, 8, 16, 24]


@pytest.mark.parametrize(
    ("period", "index", "sentence"), [(3, 0, "a period of 3 steps has 4 fragments"), (8, 4, "no fragment 4 among 4")]
)
def test_periods_shorter_than_the_fragments_are_refused(period: int, index: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        due(8, period, 4, index)
