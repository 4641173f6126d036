"""Groups are tried in the modules around them, and what is found there counts only if the block's proof holds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters
from engine.parallel.tensor.auto.equivalence import BlockReference, Verdict
from engine.parallel.tensor.auto.search import Decided, Search, enclosing_module, group_inside, reference_inside
from engine.parallel.tensor.plan.tensor_plan import ParameterCut
from tests.parallel.tensor.auto.blocks import LENGTH, WIDTH, Gated, Thirds, groups_of, truth_of


class Both(nn.Module):
    """Attention that needs numbers divided, and a perceptron that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.perceptron = Thirds(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.perceptron(self.attention(x))
        return out


class Scaled(Both):
    """Reads a weight of a module that is right alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.perceptron.down.weight.detach().sum()


class Twice(Both):
    """Calls one module twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.perceptron(x))


class Hidden(nn.Module):
    """Its second output is wrong on a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, also: Any = None) -> tuple[Tensor, Tensor]:
        h = self.up(x).relu()
        return self.down(h), h


class Dropping(nn.Module):
    """Uses the first output of its module alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x, also={"x": [x, 3]})[0]
        return out


def search_of(block: nn.Module, known: tuple[Decided, ...] = ()) -> Search:
    return Search(block, truth_of(block, LENGTH, LENGTH - 2), known=known)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The blocks of all proofs, in order."""
    seen, prove = [], BlockReference.prove

    def noted(self: BlockReference, *given: Any) -> Verdict:
        seen.append(self.block)
        return prove(self, *given)

    monkeypatch.setattr(BlockReference, "prove", noted)
    return seen


def test_strategies_are_tried_in_modules_and_proven_in_the_block(whole: list[nn.Module]) -> None:
    block = Both()
    found = search_of(block).decide(groups_of(block), 2)
    assert [one.way.how for one in found] == ["local+", "local"]
    assert found[0].way.styles["attention"] == "divide:heads divide:width"
    assert found[0].why == "divided attention.heads, attention.width"
    assert found[1].way.styles == {"perceptron.gate_up": "column fused:2", "perceptron.down": "row"}
    assert whole[0] is block and whole[-1] is block and sum(one is block for one in whole) == 2
    assert sum(one is block.attention for one in whole) > 2 and sum(one is block.perceptron for one in whole) == 1


def test_what_another_block_has_decided_is_proven_at_once(whole: list[nn.Module]) -> None:
    first, second = Both(), Both()
    found = search_of(first).decide(groups_of(first), 2)
    whole.clear()
    again = search_of(second, tuple(found)).decide(groups_of(second), 2)
    assert again == found and whole == [second]


def test_what_is_right_in_a_module_is_refused_where_the_block_is_wrong(whole: list[nn.Module]) -> None:
    block = Scaled()
    found = search_of(block).decide(groups_of(block), 2)
    assert found[0].way.how == "local+" and found[1].way.how != "local"
    assert any(one is block.perceptron for one in whole)


def test_what_another_block_has_decided_is_refused_where_the_block_is_wrong() -> None:
    first, second = Both(), Scaled()
    known = tuple(search_of(first).decide(groups_of(first), 2))
    assert search_of(second, known).decide(groups_of(second), 2)[1].way.how != "local"


def test_names_inside() -> None:
    block = Both()
    attention, perceptron = groups_of(block)
    assert [enclosing_module(group) for group in (attention, perceptron)] == ["attention", "perceptron"]
    inside = group_inside(perceptron, "perceptron")
    assert (inside.row, inside.columns) == ("down.weight", ("gate_up.weight",)) and "gate_up.bias" in inside.cuts
    assert enclosing_module(inside) == ""


def test_a_module_with_a_shard_of_its_own_holds_the_shards_of_its_layers() -> None:
    def path(*names: str) -> str:
        cuts = {name: ParameterCut(0, ()) for name in names}
        return enclosing_module(CoupledParameters(row=names[-1], columns=names[:1], cuts=cuts, partial=()))

    assert path("mixer.inner.weight", "mixer.decay", "mixer.outer.weight") == "mixer"
    assert path("mlp.experts.up", "mlp.experts.down") == "mlp"  # experts are called by the module around them
    assert path("decay", "inner.weight", "outer.weight") == "" == path("up", "down")


def test_outputs_count_that_the_block_uses() -> None:
    block = Dropping()
    truth = truth_of(block, LENGTH, LENGTH - 2)
    found = reference_inside(truth, "inner")
    assert found is not None and found.used == {0} and found.block is block.inner
    ((args, kwargs),) = found.givens
    assert args[0].shape == (2, LENGTH - 2, WIDTH) and args[0].requires_grad and kwargs["also"]["x"][1] == 3


@pytest.mark.parametrize("block", [Twice(), nn.Sequential(nn.Linear(WIDTH, WIDTH))])
def test_modules_that_do_not_run_once_are_not_tried(block: nn.Module) -> None:
    if isinstance(block, Twice):
        assert reference_inside(truth_of(block), "perceptron") is None
    else:
        block.add_module("uncalled", nn.Identity())
        block.forward = lambda x: block[0](x)  # type: ignore[index]
        assert reference_inside(truth_of(block), "uncalled") is None


def test_nothing_is_left_of_the_runs_that_show_arguments() -> None:
    block = Both()
    reference_inside(truth_of(block), "attention")
    assert not block.attention._forward_hooks and not block.attention._forward_pre_hooks
    assert all(parameter.grad is None for parameter in block.parameters()) and torch.is_grad_enabled()
