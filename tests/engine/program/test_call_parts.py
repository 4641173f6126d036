"""Arguments of a call are cut by rows, however they are passed; outputs of the parts are joined again."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.program.batch_rows import BatchRows
from engine.step.pipeline_call import cut_arguments, joined_parts

X, Y = torch.arange(10).view(5, 2), torch.arange(5)


def rows_of(tree: Any) -> list[int]:
    return [tensor.shape[0] for tensor in torch.utils._pytree.tree_leaves(tree) if isinstance(tensor, Tensor)]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X,), {}), ((X, Y), {}), ((), {"x": X, "flag": True}), ((X,), {"y": Y}), (({"x": X, "y": Y},), {})],
)
def test_arguments_are_cut_by_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parts = cut_arguments(args, kwargs, BatchRows(), 2)
    assert [set(rows_of(part)) for part in parts] == [{2}, {2}, {1}]
    for part_args, part_kwargs in parts:
        assert len(part_args) == len(args) and part_kwargs.keys() == kwargs.keys()
        assert part_kwargs.get("flag") == kwargs.get("flag")
    assert joined_parts([part[0][0] if args else part[1]["x"] for part in parts]) is not None
    ((whole_args, whole_kwargs),) = cut_arguments(args, kwargs, BatchRows(), None)
    assert rows_of((whole_args, whole_kwargs)) == rows_of((args, kwargs))


class Found(NamedTuple):
    logits: Tensor
    name: str


def test_outputs_are_joined_along_their_rows_with_gradients() -> None:
    weight = torch.ones((), requires_grad=True)
    parts = [Found(weight * rows, "same") for rows in (X[:2].float(), X[2:].float())]
    joined = joined_parts(parts)
    assert isinstance(joined, Found) and joined.name == "same" and torch.equal(joined.logits, X.float())
    joined.logits.sum().backward()  # type: ignore[no-untyped-call]
    assert float(weight.grad) == float(X.sum())  # type: ignore[arg-type]
    assert joined_parts(parts[:1]) is parts[0]
