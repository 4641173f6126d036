"""Forms of call of modules that stack experts: read as rows and experts, written for some rows, found by trial."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.parallel.experts.calls import CountedCall, ExpertCall, MajorCall, RoutedCall, Rows
from engine.parallel.experts.forms import ExpertPacking, RoutedExperts
from engine.parallel.experts.proof import Unproven, prove_routed
from tests.parallel.experts.stacks import (
    EXPERTS,
    INNER,
    WIDTH,
    Capacity,
    Centred,
    Counted,
    FlatMajor,
    Flattened,
    Listed,
    Major,
    Normed,
    Renamed,
    Reversed,
)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Counted, CountedCall("x", "num_tokens_per_expert", listed=False)),
        (Listed, CountedCall("x", "sizes", listed=True)),
        (Major, MajorCall("dispatched", flat=False)),
        (FlatMajor, MajorCall("x", flat=True)),
        (Reversed, RoutedCall("x", "n", "w")),
        (Renamed, RoutedCall("rows", "numbers", "weights")),
        (Flattened, RoutedCall("x", "n", "w", batched=True)),
        (Normed, RoutedCall("x", "n", "w")),
    ],
)
def test_form_of_call_is_found_by_trial(kind: type[nn.Module], call: ExpertCall) -> None:
    found = prove_routed("experts", kind())
    assert isinstance(found, RoutedExperts), found
    assert (found.call, found.experts, found.width) == (call, EXPERTS, WIDTH)


def test_parameters_of_experts_are_told_from_those_that_all_experts_use() -> None:
    flattened, normed = (prove_routed("experts", kind()) for kind in (Flattened, Normed))
    assert isinstance(flattened, RoutedExperts)
    assert isinstance(normed, RoutedExperts)
    assert flattened.parameters == {"experts.up": ExpertPacking(INNER), "experts.down": ExpertPacking(INNER)}
    assert dict(normed.own) == dict.fromkeys(("up", "down", "scale"), ExpertPacking())
    assert normed.common == ("norm.weight", "norm.bias")


@pytest.mark.parametrize("kind", [Centred, Capacity])
def test_experts_with_rows_that_depend_on_others_are_not_shared(kind: type[nn.Module]) -> None:
    found = prove_routed("experts", kind())
    assert isinstance(found, Unproven)
    assert found.reason == "a row's result depends on other rows"


@pytest.mark.parametrize("counts", [torch.tensor([2, 0, 3, 1]), [2, 0, 3, 1]])
def test_counted_call_for_some_rows_gives_their_results(counts: Any) -> None:
    call, module = CountedCall("x", "counts", isinstance(counts, list)), Counted()
    x = torch.randn(6, WIDTH)
    rows = call.read({"x": x, "counts": counts}, EXPERTS)
    assert rows is not None
    assert rows.numbers.flatten().tolist() == [0, 0, 2, 2, 2, 3]
    some = torch.tensor([5, 1, 3])
    written = call.write(Rows(*(each[some] for each in rows)), EXPERTS, {"counts": counts})
    assert type(written.arguments["counts"]) is type(counts)
    result = module(written.arguments["x"], torch.as_tensor(written.arguments["counts"]))
    torch.testing.assert_close(written.back(result), module(x, torch.as_tensor(counts))[some])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("some", [[7, 1, 3, 0], [2], []])
def test_major_call_for_some_rows_gives_their_results(flat: bool, some: list[int]) -> None:
    call, module = MajorCall("x", flat), (FlatMajor if flat else Major)()
    x = torch.randn(EXPERTS * 2, WIDTH)
    given = x if flat else x.view(EXPERTS, 2, WIDTH)
    rows = call.read({"x": given}, EXPERTS)
    assert rows is not None
    index = torch.tensor(some, dtype=torch.int64)
    written = call.write(Rows(*(each[index] for each in rows)), EXPERTS, {})
    torch.testing.assert_close(written.back(module(written.arguments["x"])), module(given).reshape(-1, WIDTH)[index])


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (RoutedCall("x", "n", "w"), {"x": torch.zeros(3, 2), "n": torch.zeros(3, 2), "w": torch.zeros(3, 1)}),
        (CountedCall("x", "c", listed=True), {"x": torch.zeros(3, 2), "c": [1, 1, 1, 1]}),
        (CountedCall("x", "c", listed=True), {"x": torch.zeros(3, 2), "c": [1, 2]}),
        (MajorCall("x", flat=True), {"x": torch.zeros(6, 2)}),
        (MajorCall("x", flat=False), {"x": torch.zeros(8, 1, 2)}),
    ],
)
def test_arguments_of_another_form_are_not_read(call: ExpertCall, given: dict[str, Any]) -> None:
    assert call.read(given, EXPERTS) is None
