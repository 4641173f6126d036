"""A tensor plan that the user has written: wrong blocks are refused, and what is not proven is said. One process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.errors import PlanError
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.planning import isolated_block
from engine.planning.analysis import PlanRequest
from engine.planning.plan import Plan, build_plan
from engine.planning.tensor_plan_proof import check_plan
from engine.planning.tensor_plan_search import SearchedProgram
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from engine.reporting.banner import banner_text
from tests.models import nano, token_batches

WIDTH, TP = 16, 2


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class KnowsItsWeight(Perceptron):
    """Refuses to run as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {id(self.up.weight)}

    def forward(self, x: Tensor) -> Tensor:
        if id(self.up.weight) not in self.known:
            raise ValueError("not alone\nand more")
        return super().forward(x)


class Looking(Perceptron):
    """Has an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(x.shape[1])))


class Dropping(Perceptron):
    """Drops hidden units, which each tensor rank draws for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(self.up(x).relu()))
        return out


class Chain(nn.Module):
    """A layer, blocks, a layer; their mean is the loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(x).square().mean()
        return out


class Peeking(Chain):
    """Reads on the host between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        x = x * 2 if x.mean() > 100 else x
        out: Tensor = self.last(self.layers[1](x)).square().mean()
        return out


STYLES = {"layers.*.up": "column", "layers.*.down": "row"}


def program_of(model: nn.Module) -> Program:
    config = load_config({"train_batch_size": 8, "parallel": {"data": 1, "tensor": TP}}, TP)
    return Program(model, None, make_precision(config, model), torch.device("cpu"))


def checked(model: nn.Module, styles: dict[str, str], example: Any = None) -> tuple[str, ...]:
    given = torch.ones(2, 6, WIDTH) if example is None else example
    return check_plan(program_of(model), given, find_tensor_plan(model, styles, TP), TP)


def planned(model: nn.Module, styles: Any, **parallel: Any) -> Plan:
    """As a run does it."""
    sizes = {"data": 1, "tensor": TP, "tensor_plan": styles}
    config = load_config({"train_batch_size": 8, "parallel": sizes | parallel}, TP)
    return build_plan(config, PlanRequest(program_of(model), torch.ones(2, 6, WIDTH)))


def test_nothing_is_said_of_blocks_that_are_proven() -> None:
    assert checked(Chain(Perceptron(), Perceptron()), STYLES) == ()


def test_a_proof_draws_no_random_number_of_the_users() -> None:
    model = Chain(Dropping(), Dropping())
    before = torch.get_rng_state()
    assert checked(model, STYLES) == ()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_block_that_does_not_run_alone_is_said_to_be_unproven() -> None:
    model = Chain(Perceptron(), KnowsItsWeight(), KnowsItsWeight(), KnowsItsWeight())
    plan = planned(model, STYLES)
    why = "its plan is not proven, because a copy of it does not run alone: not alone"
    note = f"block layers.1 (and 2 like it): {why}"
    assert note in plan.notes and f"  note       {note}" in banner_text(plan, "cpu").splitlines()


def test_a_search_says_what_does_not_run_alone() -> None:
    plan = planned(Chain(Perceptron(), KnowsItsWeight()), "auto")
    assert "layers.1" in banner_text(plan, "cpu") and "does not run alone: not alone" in banner_text(plan, "cpu")


def test_layers_outside_blocks_are_said_to_be_unproven() -> None:
    cut = {"first": "column+gather", "last": "replicate"}
    (note,) = checked(Chain(Perceptron(), Perceptron()), STYLES | cut)
    assert note == "parallel.tensor_plan is not proven for what lies outside blocks: first"


class Between(Chain):
    """Norms what lies between the layers outside of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.layer_norm(self.first(x), (WIDTH,)))


def test_layers_outside_blocks_that_do_not_run_on_shards_are_refused_by_a_sentence() -> None:
    model = Between(Perceptron(), Perceptron())
    with pytest.raises(
        PlanError, match=r"with the layers of parallel\.tensor_plan on 2 tensor ranks the forward raises: "
    ):
        planned(model, {"first": "column", "last": "row"})


def test_vocabularies_are_said_to_be_unproven() -> None:
    tokens, styles = token_batches(2, 1)[0], {"h.*.fc": "column", "h.*.proj": "row"}
    (note,) = checked(nano(), styles | {"wte": "vocabulary", "lm_head": "vocabulary"}, (tokens, tokens))
    assert note == "parallel.tensor_plan is not proven for what lies outside blocks: wte, lm_head"
    (note,) = checked(Chain(Looking(), Looking()), STYLES | {"layers.*.table": "vocabulary"})
    assert note == "parallel.tensor_plan is not proven for vocabularies in blocks: layers.0.table, layers.1.table"


def test_blocks_alike_with_other_styles_are_proven_too() -> None:
    model = Chain(Perceptron(), Perceptron())
    assert checked(model, {"layers.0.up": "column", "layers.0.down": "row"}) == ()
    wrong = {"layers.0.up": "column", "layers.0.down": "row", "layers.1.up": "cut:0"}
    with pytest.raises(PlanError, match=r"parallel.tensor_plan is wrong in layers.1: .*\(up 'cut:0'\)"):
        checked(model, wrong)


def test_a_model_that_cannot_be_followed_is_said_to_be_unproven() -> None:
    model = Peeking(Perceptron(), Perceptron())
    (note,) = checked(model, STYLES)
    assert note.startswith("parallel.tensor_plan is not proven, because the model cannot be followed: ")
    notes = planned(model, STYLES).notes
    assert any(note.startswith("bytes over tp are not known before they are sent: ") for note in notes)
    assert "parallel.tensor_plan is not proven, because the model cannot be followed" in notes


def test_a_proof_that_is_switched_off_is_said() -> None:
    notes = planned(Chain(Perceptron(), Perceptron()), STYLES, prove_plan=False).notes
    assert notes == ("parallel.tensor_plan is not proven, because parallel.prove_plan is false",)


class OfOneLength(nn.Module):
    """Takes text of 8 tokens; ``limit``: of at least so many."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.limit, self.embed = limit, nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Perceptron() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] < self.limit:
            raise ValueError(f"{ids.shape[1]} tokens\nare too few")
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = x.square().mean()
        return out


@pytest.mark.parametrize(
    ("limit", "length", "reason"),
    [
        (1, 8, None),
        (8, 8, "the model does not run with 4 tokens: 4 tokens"),
        (1, 2, "an example of 2 tokens cannot be shortened for 2 tensor ranks"),
    ],
)
def test_a_proof_for_one_length_only_is_said(limit: int, length: int, reason: str | None) -> None:
    model, ids = OfOneLength(limit), torch.zeros(2, length, dtype=torch.int64)
    expected = (f"the tensor plan is proven for one length of text only, because {reason}",) if reason else ()
    assert checked(model, STYLES, ids) == expected
    assert SearchedProgram(program_of(model), ids).find_styles(TP).notes == expected


def test_a_mistake_of_this_package_is_no_block_that_does_not_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_block, "_random", None)
    for styles in (STYLES, "auto"):
        with pytest.raises(TypeError, match="not callable"):
            planned(Chain(Perceptron(), Perceptron()), styles)
