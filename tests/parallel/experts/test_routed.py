"""Modules of routed experts on thread ranks: equal to one process with all experts, and every byte accounted for."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Traffic
from engine.parallel.experts import routed
from engine.parallel.experts.calls import RoutedCall
from engine.parallel.experts.dispatch import AXIS, COMBINE, DISPATCH, ROUTING, Dispatch, Round
from engine.parallel.experts.forms import ExpertPacking, RoutedExperts, expert_bounds
from engine.parallel.experts.routed import share_experts
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.experts.moe import WIDTH, Stacked, on_expert_ranks
from tests.parallel.experts.test_dispatch import ROUTINGS, Numbers, drawn, pairs, table


@dataclass(frozen=True)
class Given:
    """Rows of a rank, the numbers of their experts, and the weights."""

    x: Tensor
    numbers: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Made:
    """Results of a rank: output, gradients, and traffic."""

    y: Tensor
    x: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    traffic: tuple[Traffic, ...]


def given(numbers: Numbers, rank: int) -> Given:
    chosen = max((len(row) for row in numbers), default=2)
    draw, index = torch.Generator().manual_seed(rank), table(numbers, chosen)
    return Given(torch.randn(len(index), WIDTH, generator=draw), index, torch.rand(index.shape, generator=draw))


def run(module: nn.Module, part: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Runs forward and backward of a loss that also reads the rows; returns the output and the gradients."""
    x, weights = part.x.clone().requires_grad_(), part.weights.clone().requires_grad_()
    y = module(x, part.numbers, weights)
    (y.square() + y * x).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, torch.zeros_like(weights) if weights.grad is None else weights.grad


def shared(comm: Comm, experts: int) -> Stacked:
    """Returns the module of one rank with the experts of this rank alone."""
    model = nn.ModuleDict({"moe": Stacked(experts)})
    share(model, comm, experts)
    module = model["moe"]
    assert isinstance(module, Stacked)
    return module


def share(model: nn.Module, comm: Comm, experts: int) -> None:
    """Shares the experts of the child ``moe`` of ``model``."""
    bounds, index, module = expert_bounds(experts, comm.grid.size(AXIS)), comm.grid.index(AXIS), model.moe
    assert isinstance(module, Stacked)
    for each in (module.up, module.down):
        each.data = each.data[bounds[index] : bounds[index + 1]].clone()
    found = RoutedExperts(
        "moe",
        experts,
        WIDTH,
        RoutedCall("hidden", "index", "weights"),
        {"up": ExpertPacking(), "down": ExpertPacking()},
        (),
        ("num_experts",),
    )
    share_experts(model, [found], comm, TensorAxis(comm), ForwardPatches())


def on_ranks(experts: int, parts: Sequence[Given]) -> list[Made]:
    def body(comm: Comm) -> Made:
        module = shared(comm, experts)
        results = run(module, parts[comm.grid.rank])
        assert module.num_experts == experts, "the attribute is of this rank only while its forward runs"
        up, down = module.up.grad, module.down.grad
        assert up is not None and down is not None, "experts without rows have gradients of zeros, as in one process"
        return Made(*results, up, down, comm.tally.rows())

    return on_expert_ranks(len(parts), body)


def compare(experts: int, parts: Sequence[Given], made: Sequence[Made]) -> None:
    """Compares each rank to one process with all experts and all rows."""
    whole = Stacked(experts)
    for part, found in zip(parts, made, strict=True):
        for own, right in zip((found.y, found.x, found.weights), run(whole, part), strict=True):
            torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)
    for name in ("up", "down"):
        grad = getattr(whole, name).grad
        right = torch.zeros_like(getattr(whole, name)) if grad is None else grad
        torch.testing.assert_close(torch.cat([getattr(each, name) for each in made]), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "rows of nobody"])
def test_a_shared_module_is_one_process_with_all_experts(name: str) -> None:
    experts, numbers = ROUTINGS[name]
    parts = [given(each, rank) for rank, each in enumerate(numbers)]
    compare(experts, parts, on_ranks(experts, parts))


@pytest.mark.parametrize("name", ["one expert", "eight to one", "uneven"])
@pytest.mark.parametrize("limit", [1, 3])
def test_a_bound_of_the_rows_of_a_round_changes_no_result(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = list[int]()

    class Watched(Dispatch):
        @property
        def rounds(self) -> list[Round]:
            most.extend(max(each.gets) for each in super().rounds)
            return super().rounds

    monkeypatch.setattr(routed, "Dispatch", partial(Watched, limit=limit))
    experts, numbers = ROUTINGS[name]
    parts = [given(each, rank) for rank, each in enumerate(numbers)]
    compare(experts, parts, on_ranks(experts, parts))
    assert max(most) == limit and len(most) > 2 * len(parts)


@pytest.mark.parametrize("name", ["even", "uneven", "no token on a rank", "one token", "every expert"])
def test_bytes_are_rows_to_other_ranks_times_the_width(name: str) -> None:
    """Forward and backward of one round: a row goes out and its gradient comes back, and the reverse of results."""
    experts, numbers = ROUTINGS[name]
    ranks, bounds = len(numbers), expert_bounds(experts, len(numbers))
    parts = [given(each, rank) for rank, each in enumerate(numbers)]
    for rank, found in enumerate(on_ranks(experts, parts)):
        chosen = parts[rank].numbers.shape[1]
        out = sum(len(pairs(numbers[rank], bounds, other)) for other in range(ranks) if other != rank)
        back = sum(len(pairs(numbers[other], bounds, rank)) for other in range(ranks) if other != rank)
        sent = {row.label: row.bytes for row in found.traffic if row.axis == AXIS}
        # rows, weights and numbers in one message; gradients of rows and weights come back
        assert sent[DISPATCH] == 4 * ((WIDTH + 2 * chosen) * out + (WIDTH + chosen) * back)
        assert sent[COMBINE] == 4 * WIDTH * (back + out)
        assert sent[ROUTING] == 8 * (2 * ranks + 1) * (ranks - 1)  # the table of counts


def test_experts_of_frozen_rows_and_frozen_experts_of_rows_join_one_backward() -> None:
    """Two ranks of three get no rows; the rows, or the parameters, have no gradient."""
    numbers = torch.tensor([[0], [0]])

    def body(comm: Comm, rows: bool) -> tuple[Tensor, Tensor | None]:
        module = shared(comm, 3)
        module.requires_grad_(not rows)
        x = torch.ones(2, WIDTH, requires_grad=rows)
        module(x, numbers, torch.ones(2, 1)).sum().backward()
        return (torch.zeros(()) if x.grad is None else x.grad), module.up.grad

    with_rows = on_expert_ranks(3, partial(body, rows=True))
    assert all(torch.allclose(x, with_rows[0][0]) and x.any() and up is None for x, up in with_rows)
    with_experts = on_expert_ranks(3, partial(body, rows=False))
    assert [bool(up is not None and up.any()) for _, up in with_experts] == [True, False, False]


class Picked(Stacked):
    """Stacked experts without a loop: the host reads nothing, as in grouped products."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of each row's experts."""
        inner = functional.silu(torch.einsum("tkih,th->tki", self.up[index], hidden))
        return torch.einsum("tkhi,tki,tk->th", self.down[index], inner, weights)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators for which the host waits: their result is a number, or has a size that depends on content."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the operator."""
        waits = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        by_number = func is torch.ops.aten.index.Tensor and all(i is None or i.dtype != torch.bool for i in args[1])
        if waits and not by_number:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_the_host_reads_the_table_of_counts_alone(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a layer; ``tolist`` is no operator on a host, so its calls are counted."""
    parts = [given(drawn(6, 4, chosen, rank), rank) for rank in range(2)]
    tables, tolist = list[tuple[int, ...]](), Tensor.tolist

    def read(tensor: Tensor) -> Any:
        if "experts" in sys._getframe(1).f_globals["__name__"]:  # thread ranks send lists as well
            tables.append(tuple(tensor.shape))
        return tolist(tensor)

    def body(comm: Comm) -> list[str]:
        model = nn.ModuleDict({"moe": Picked(4)})
        share(model, comm, 4)
        reads = Reads()
        with reads:
            run(model["moe"], parts[comm.grid.rank])
        return reads.names

    monkeypatch.setattr(Tensor, "tolist", read)
    assert on_expert_ranks(2, body) == [[], []]
    assert tables == [(2, 5)] * 2


class Gated(Stacked):
    """Experts with a further argument."""

    def forward(
        self, hidden: Tensor, index: Tensor, weights: Tensor, gate: Tensor | None = None, twice: bool = False
    ) -> Tensor:
        """Returns the result of gated rows."""
        gated = hidden if gate is None else hidden * gate
        return super().forward(gated, index, weights * (1 + twice))


def test_a_further_tensor_is_refused_because_other_ranks_have_another_one() -> None:
    def body(comm: Comm) -> str:
        model, part = nn.ModuleDict({"moe": Gated(4)}), given(drawn(5, 4, 2, comm.grid.rank), comm.grid.rank)
        share(model, comm, 4)
        rows = part.x, part.numbers, part.weights
        torch.testing.assert_close(model["moe"](*rows, None, True), Gated(4)(*rows, None, True))
        with pytest.raises(EngineError) as caught:
            model["moe"](*rows, torch.ones(5, 1))
        return str(caught.value)

    first, second = on_expert_ranks(2, body)
    assert first == second and "called with a tensor gate [5, 1]" in first


def test_second_derivatives_are_refused_on_all_ranks() -> None:
    def body(comm: Comm) -> str:
        module, part = shared(comm, 4), given(drawn(5, 4, 2, comm.grid.rank), comm.grid.rank)
        x = part.x.requires_grad_()
        y = module(x, part.numbers, part.weights)
        with pytest.raises(EngineError) as caught:
            torch.autograd.grad((y * x.square()).sum(), x, create_graph=True)
        return str(caught.value)

    first, second = on_expert_ranks(2, body)
    assert first == second and first.endswith("set parallel.expert to 1.")


def test_arguments_of_other_shapes_are_refused_before_anything_is_sent() -> None:
    def body(comm: Comm) -> str:
        module = shared(comm, 4)
        with pytest.raises(EngineError) as caught:
            module(torch.zeros(2, 3, WIDTH), torch.zeros(2, 1).long(), torch.zeros(2, 1))
        assert not comm.tally.rows()
        return str(caught.value)

    assert set(on_expert_ranks(2, body)) == {
        "moe was called with [2, 3, 6], [2, 1], [2, 1], but with parallel.expert its arguments are rows [T, H] or "
        "[B, S, H], numbers of experts [T, k] and their weights [T, k]; call it with these, or leave parallel.expert "
        "out."
    }
