"""Batches in every form that people pass them, and losses in every form that models return them."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.program.batch import count_tokens, join_outputs, named_tensors
from engine.program.batch_rows import BatchRows
from engine.program.loss import find_loss


class Pair(NamedTuple):
    """A batch as a namedtuple."""

    x: Tensor
    y: Tensor


class Encoding(UserDict[str, Any]):
    """As tokenizers return it: a mapping that is no dict."""


def test_every_form_is_cut_into_contiguous_rows() -> None:
    rows = torch.arange(12).view(6, 2)
    for batch in (rows, (rows, rows), [rows], {"a": rows, "b": {"c": rows}}, Pair(rows, rows), Encoding(a=rows)):
        found = [[tensor for _, tensor in named_tensors(part)] for part in BatchRows().take_microbatches(batch, 2, 3)]
        for parts in zip(*found, strict=True):
            assert torch.equal(torch.cat(parts), rows)
    assert isinstance(BatchRows().take_microbatches(Pair(rows, rows), 2, 3)[0], Pair)


def test_scalars_and_what_is_no_tensor_go_to_every_microbatch() -> None:
    parts = BatchRows().take_microbatches({"x": torch.ones(4, 1), "scale": torch.tensor(2.0), "name": "a"}, 2, 2)
    assert [part["name"] for part in parts] == ["a", "a"] and all(float(part["scale"]) == 2.0 for part in parts)


def test_an_iterator_gives_exactly_what_is_needed() -> None:
    items = iter([torch.ones(2, 1) * i for i in range(5)])
    assert len(BatchRows().take_microbatches(items, 2, 3)) == 3 and float(next(items)[0, 0]) == 3.0


def test_tokens_are_elements_of_input_ids_or_rows() -> None:
    assert count_tokens({"input_ids": torch.ones(2, 7), "labels": torch.ones(2, 7)}) == 14
    assert count_tokens((torch.ones(3, 7), torch.ones(3))) == 3


def test_outputs_are_joined_along_rows() -> None:
    joined = join_outputs([{"loss": torch.tensor(float(i)), "logits": torch.full((2, 3), i)} for i in range(2)])
    assert joined["loss"].tolist() == [0.0, 1.0] and joined["logits"][:, 0].tolist() == [0, 0, 1, 1]
    assert isinstance(join_outputs([Pair(torch.ones(1), torch.ones(1))] * 2), Pair)
    of_pictures = join_outputs([(torch.ones(1), torch.ones(1)), (torch.zeros(1),)])
    assert [float(each) for each in of_pictures] == [1.0, 1.0, 0.0], "an entry for each picture"
    assert join_outputs([{"loss": None, "name": "a"}] * 2) == {"loss": None, "name": ["a", "a"]}


class Output:
    """A model output with an attribute."""

    loss = torch.tensor(3.0)


@pytest.mark.parametrize(
    "output", [torch.tensor(3.0), {"loss": torch.tensor(3.0)}, Output(), (torch.ones(2, 2), torch.tensor(3.0))]
)
def test_loss_is_found_in_the_output(output: Any) -> None:
    found = find_loss(output, {}, None)
    assert float(found.sum) == 3.0 and found.weight == 1.0


def test_sum_and_weight() -> None:
    found = find_loss(None, {}, lambda output, batch: (torch.tensor(6.0), torch.tensor(4)))
    assert float(found.sum) == 6.0 and float(found.weight) == 4.0
    with pytest.raises(EngineError, match=r"the weight that loss_fn returned is a tensor of shape \(1,\)"):
        find_loss(None, {}, lambda output, batch: (torch.tensor(6.0), torch.ones(1)))
    with pytest.raises(EngineError, match=r"is a str; give a pair \(sum, weight\) with a number or a 0-dim tensor"):
        find_loss(None, {}, lambda output, batch: (torch.tensor(6.0), "four"))


def test_two_scalars_in_a_tuple_are_ambiguous() -> None:
    with pytest.raises(EngineError, match="the model returned a tuple without a loss"):
        find_loss((torch.tensor(1.0), torch.tensor(2.0)), {}, None)
