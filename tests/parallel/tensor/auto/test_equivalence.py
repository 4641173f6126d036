"""A proof holds for right plans and for no other: every mutation of a right one is found. One process."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.shard_table import Range
from engine.parallel.tensor.auto import equivalence
from engine.parallel.tensor.auto.equivalence import BlockReference, Verdict
from engine.parallel.tensor.plan.sharding_rules import cut_model
from engine.parallel.tensor.plan.styles import parse_style
from engine.parallel.tensor.plan.tensor_plan import AttributeChange, ParameterCut, TensorPlan
from tests.parallel.tensor.auto.blocks import (
    LENGTH,
    WIDTH,
    Gated,
    Grouped,
    Perceptron,
    Thirds,
    filled,
    given_for,
    truth_of,
)

THIRDS = {"qkv": "column fused:3", "out": "row", "": "divide:heads divide:width"}
NORMED = {"q": "column", "k": "column", "v": "column", "out": "row", "norm.weight": "partial", "norm.bias": "partial"}
GATED = {"gate_up": "column fused:2", "down": "row"}
PAIR = {"up": "column", "down": "row"}


def plan_for(block: nn.Module, styles: dict[str, str], tp: int = 2) -> TensorPlan:
    return cut_model(block, {name: parse_style(text) for name, text in styles.items()}, tp, "given")


def proven(block: nn.Module, styles: dict[str, str], tp: int = 2) -> Verdict:
    used = [0] if isinstance(block, Perceptron) else None
    return truth_of(block, used=used).prove(plan_for(block, styles, tp), tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_right_plans_hold(tp: int) -> None:
    for block, styles in ((Thirds(), THIRDS), (Grouped(4, norm=True), NORMED), (Gated(), GATED), (Perceptron(), PAIR)):
        verdict = proven(block, styles, tp)
        assert verdict.holds, f"{block}: {verdict.problem}"
        assert [call.label for call in verdict.called] == ["row outputs", "column inputs"]


def test_rows_of_the_wrong_part() -> None:
    assert proven(Thirds(), THIRDS | {"qkv": "column"}).problem.startswith("output 0 on rank 0 is off by")
    assert proven(Gated(), GATED | {"gate_up": "column"}).problem.startswith("output 0 on rank 0 is off by")
    swapped = proven(Perceptron(), PAIR | {"up": "column rows:12-24/0-12"})
    assert swapped.problem.startswith("output 0 on rank 0 is off by")
    crossed = proven(Thirds(), THIRDS | {"qkv": "column rows:0-8+24-32+32-40/8-16+16-24+40-48"})
    assert crossed.problem.startswith("output 0 on rank 0 is off by")


def test_a_number_that_code_computes_with() -> None:
    alone = proven(Thirds(), THIRDS | {"": "divide:heads"})
    assert not alone.holds and alone.problem.partition(":")[0] in ("RuntimeError", "ValueError")
    assert not proven(Thirds(), THIRDS | {"": "set:heads=1 divide:width"}).holds
    assert proven(Thirds(), THIRDS | {"": "set:heads=2 set:width=8"}).holds


def test_a_mistake_of_this_package_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "apply_plan", None)
    with pytest.raises(TypeError, match="not callable"):
        proven(Perceptron(), PAIR)


def test_a_norm_whose_gradients_are_not_summed() -> None:
    forgotten = {name: style for name, style in NORMED.items() if style != "partial"}
    assert proven(Grouped(4, norm=True), forgotten).problem.startswith("the gradient of norm.weight is off by")
    bias = {name: style for name, style in NORMED.items() if name != "norm.bias"}
    assert proven(Grouped(4, norm=True), bias).problem.startswith("the gradient of norm.bias is off by")


def test_a_gradient_that_is_summed_and_is_whole_already() -> None:
    too_many = proven(Perceptron(), PAIR | {"norm.weight": "partial"})
    assert too_many.problem.startswith("the gradient of norm.weight is off by")


def test_sums_that_are_forgotten() -> None:
    block = Perceptron()
    plan = plan_for(block, PAIR)
    no_sum = replace(plan, layers={"up": plan.layers["up"]})
    assert truth_of(block, used=[0]).prove(no_sum, 2).problem.startswith("output 0 on rank 0 is off by")
    no_copy = replace(plan, layers={"down": plan.layers["down"]})
    said = truth_of(block, used=[0]).prove(no_copy, 2).problem
    assert said.startswith("gradient of input 0 on rank 0 is off by")


def test_one_that_all_ranks_hold_but_only_one_is_said_to() -> None:
    block = Grouped(1)
    styles = {"q": "column", "k": "column rows:0-4/0-4", "v": "column rows:0-4/0-4", "out": "row", "": "divide:repeats"}
    right = plan_for(block, styles)
    truth = truth_of(block)
    assert truth.prove(right, 2).holds
    thin = {**right.parameters, "v.bias": ParameterCut(0, (Range(0, 2, (0,)), Range(2, 4, (1,))))}
    assert not truth.prove(replace(right, parameters=thin), 2).holds
    wrong = replace(right, attributes=(AttributeChange("", "repeats", 3),))
    assert truth.prove(wrong, 2).problem


class Long(nn.Module):
    """Right on a part unless the text is shorter than the width that the code sees."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * LENGTH), nn.Linear(2 * LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if x.shape[1] < LENGTH:
            hidden = hidden * hidden.shape[-1]
        out: Tensor = self.down(hidden)
        return out


def test_a_second_length_shows_what_the_first_does_not() -> None:
    block = Long()
    plan = plan_for(block, PAIR)
    assert truth_of(block, LENGTH).prove(plan, 2).holds
    assert truth_of(block, LENGTH, LENGTH - 2).prove(plan, 2).problem.startswith("output 0 on rank 0 is off by")


def test_outputs_that_nobody_reads_may_be_parts() -> None:
    block = Perceptron()
    plan = plan_for(block, PAIR)
    assert truth_of(block, used=[0]).prove(plan, 2).holds
    assert truth_of(block).prove(plan, 2).problem == f"output 1 on rank 0 has the shape [2, {LENGTH}, 12], not " + (
        f"[2, {LENGTH}, 24]"
    )


def test_the_bias_of_a_key_has_no_gradient_and_rounding_is_none() -> None:
    """Its gradient is some 1e-17 on one rank and another 1e-17 in truth: no relative rule would do."""
    block = Grouped(4)
    assert proven(block, {"q": "column", "k": "column", "v": "column", "out": "row"}).holds
    bias = dict(block.named_parameters())["k.bias"]
    out = block(given_for(block)[0][0])
    out.sum().backward()
    assert bias.grad is not None and 0 < float(bias.grad.abs().max()) < 1e-12


def test_an_error_in_the_tenth_digit_is_found() -> None:
    """Only float64 leaves room between rounding and the smallest mistake."""

    class Nearly(Perceptron):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out, hidden = super().forward(x)
            return out * (1.0 if hidden.shape[-1] == 24 else 1.0 + 1e-8), hidden

    assert proven(Nearly(), PAIR).problem.startswith("output 0 on rank 0 is off by")


def test_code_that_raises_on_a_part_is_the_problem_and_nothing_hangs() -> None:
    class Strict(Perceptron):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out, hidden = super().forward(x)
            if hidden.shape[-1] != 24:
                raise LookupError("24 hidden units are needed")
            return out, hidden

    assert proven(Strict(), PAIR).problem == "LookupError: 24 hidden units are needed"


def test_a_truth_is_the_same_for_every_plan() -> None:
    block = filled(Perceptron())
    truth = BlockReference(block, [given_for(block)], [0])
    before = {name: p.clone() for name, p in block.state_dict().items()}
    assert truth.prove(plan_for(block, PAIR), 2).holds and truth.prove(plan_for(block, PAIR, 4), 4).holds
    assert not truth.prove(plan_for(block, PAIR | {"up": "column rows:12-24/0-12"}), 2).holds
    assert all(torch.equal(before[name], p) for name, p in block.state_dict().items())
