"""Forms of call of modules that stack experts: read as rows and experts, written for some rows, found by trial."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.experts.calls import Call, CountedCall, MajorCall, RoutedCall, Rows
from engine.parallel.experts.forms import RoutedExperts
from engine.parallel.experts.proof import Unproven, prove_routed

EXPERTS, WIDTH, INNER = 4, 6, 10


class Stacked(nn.Module):
    """Two matrices of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))


class Counted(Stacked):
    """Experts with a tensor of counts, as torchtitan calls them."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = torch.split(x, num_tokens_per_expert.tolist())
        return torch.cat(
            [part.mm(up).relu().mm(down) for part, up, down in zip(parts, self.up, self.down, strict=True)]
        )


class Listed(Counted):
    """Experts with a list of counts after the rows, as JetMoE calls them, to another width."""

    def forward(self, x: Tensor, sizes: Any) -> Tensor:
        return torch.cat([part.mm(up) for part, up in zip(torch.split(x, sizes), self.up, strict=True)])


class Major(Stacked):
    """Experts with a dim for the experts, as GShard calls them."""

    def forward(self, dispatched: Tensor) -> Tensor:
        hidden = torch.einsum("ech,ehm->ecm", dispatched, self.up).relu()
        return torch.einsum("ecm,emh->ech", hidden, self.down)


class FlatMajor(Major):
    """Experts with equally many rows, as Llama 4 calls them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(self.up), -1, WIDTH)).view(-1, WIDTH)


class Reversed(Stacked):
    """Experts with weights before numbers, which hand their arguments to code with other names."""

    def forward(self, w: Tensor, n: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            row, slot = (n == expert).nonzero().unbind(1)
            out = out.index_add(0, row, x[row].mm(self.up[expert]).relu().mm(self.down[expert]) * w[row, slot][:, None])
        return out


class Renamed(Reversed):
    """Experts whose forward has the names of another one, as a decorator makes them."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return Reversed.forward(self, *args, **kwargs)

    forward.__wrapped__ = lambda self, weights, numbers, rows: None  # type: ignore[attr-defined]


class Centred(Counted):
    """Experts that subtract the mean of their rows."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = [part - part.mean(0) for part in torch.split(x, num_tokens_per_expert.tolist())]
        return super().forward(torch.cat(parts), num_tokens_per_expert)


class Capacity(Major):
    """Experts that drop all rows but two."""

    def forward(self, dispatched: Tensor) -> Tensor:
        keep = (torch.arange(dispatched.shape[1]) < 2)[:, None]
        return super().forward(dispatched) * keep


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Counted, CountedCall("x", "num_tokens_per_expert", listed=False)),
        (Listed, CountedCall("x", "sizes", listed=True)),
        (Major, MajorCall("dispatched", flat=False)),
        (FlatMajor, MajorCall("x", flat=True)),
        (Reversed, RoutedCall("x", "n", "w")),
        (Renamed, RoutedCall("rows", "numbers", "weights")),
    ],
)
def test_form_of_call_is_found_by_trial(kind: type[nn.Module], call: Call) -> None:
    found = prove_routed("experts", kind())
    assert isinstance(found, RoutedExperts), found
    assert (found.call, found.experts, found.width) == (call, EXPERTS, WIDTH)


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
def test_arguments_of_another_form_are_not_read(call: Call, given: dict[str, Any]) -> None:
    assert call.read(given, EXPERTS) is None
