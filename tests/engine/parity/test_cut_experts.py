"""Shared experts that tensor ranks cut along their width, or hold whole: three clipped steps equal one process."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.errors import PlanError
from engine.parallel.comm.traffic import sent_bytes
from engine.reporting.banner import banner_text
from tests.engine.parity.expert_families import small_mixture
from tests.engine.parity.expert_runs import GRIDS, ROWS, TOKENS, WORDS, assert_equal, mixture, own_batch, run
from tests.engine.parity.transformers_types import model_types
from tests.parallel.experts.moe import Member
from tests.parallel.experts.stacks import Biased

FORMS = ("cut", "whole")
GRID: Mapping[str, Any] = GRIDS["ep2-tp2"]
HIDDEN, EXPERTS, INNER = 16, 8, 16
"""Widths and experts of ``mixture``."""


class Block(nn.Module):
    """A gate and the experts of a stack, or of a list."""

    def __init__(self, listed: bool, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts: nn.Module = nn.ModuleList(Member(8, inner) for _ in range(4)) if listed else Biased()

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, 8)
        weights, numbers = self.gate(x).softmax(-1).topk(2)
        if isinstance(self.experts, Biased):
            made: Tensor = self.experts(x, numbers, weights)
            return hidden + made.view_as(hidden)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts.children()):
            row, slot = torch.where(numbers == number)
            if len(row):
                y = y.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return hidden + y.view_as(hidden)


class HomeMade(nn.Module):
    """Two blocks of experts between an embedding and a head."""

    def __init__(self, listed: bool, inner: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.blocks = nn.ModuleList(Block(listed, inner) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def home_made(listed: bool, inner: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return HomeMade(listed, inner)


def family(name: str) -> nn.Module:
    return small_mixture(next(kind for kind in model_types() if kind.name == name))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mixture": mixture,
    "stack": partial(home_made, False),
    "list": partial(home_made, True),
    "mixtral": partial(family, "mixtral"),
    "gpt_oss": partial(family, "gpt_oss"),
}


@cache
def alone(name: str) -> Any:
    return run({"data": 1}, make=MODELS[name])


def form_of(eng: Engine) -> str:
    """Returns the line of the banner about experts on tensor ranks."""
    (line,) = (each.strip() for each in banner_text(eng.plan, "cpu").splitlines() if "on 2 tensor ranks" in each)
    return line


def cases() -> list[Any]:
    often = {("stack", "cut", 0, False)}
    every = [(name, form, stage, False) for name in MODELS for form in FORMS for stage in (0, 1, 2, 3)]
    every += [(name, form, stage, True) for name in MODELS for form in FORMS for stage in (0, 3)]
    return [pytest.param(*case, marks=() if case in often else pytest.mark.long) for case in every]


@pytest.mark.parametrize(("name", "form", "stage", "sequence"), cases())
def test_experts_on_tensor_ranks_train_as_one_process(name: str, form: str, stage: int, sequence: bool) -> None:
    parallel = {**GRID, "expert_tensor": form, "sequence_parallel": sequence}
    found = run(parallel, {"zero_optimization": {"stage": stage}}, MODELS[name], after=form_of)
    assert_equal(found, alone(name))
    words = {"cut": "cut along their width", "whole": "whole"}[form]
    assert set(found.extra) == {f"{words} on 2 tensor ranks (parallel.expert_tensor)"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stack", "whole on 2 tensor ranks (auto: 16.0 KiB a rank and step cut, 10.4 KiB whole, with even routing)"),
        pytest.param(
            "mixture",
            "cut along their width on 2 tensor ranks (auto: 30.9 KiB a rank and step cut, 39.4 KiB whole, with even "
            "routing; 48.0 KiB of state instead of 96.0 KiB)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_banner_gives_the_form_of_experts_on_tensor_ranks_and_its_reason(name: str, said: str) -> None:
    assert set(run(GRID, make=MODELS[name], after=form_of, steps=0).extra) == {said}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("more", "changes"),
    [
        ({"pipeline": 2}, {"zero_optimization": {"stage": 1}}),
        ({"data": 4}, {"zero_optimization": {"stage": 3}}),
        ({"data": 4}, {"zero_optimization": {"stage": 2, "shard_size": 2}}),
        ({"tensor": 3}, {}),
        ({}, {"activation_checkpointing": {"mode": "full"}}),
        ({}, {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 3}}),
    ],
)
def test_cut_experts_with_other_features_train_as_one_process(
    name: str, more: dict[str, Any], changes: dict[str, Any]
) -> None:
    if more.get("tensor") == 3 and name not in ("stack", "list"):
        pytest.skip("heads do not divide among three ranks")
    wanted = run({"data": 1}, {k: v for k, v in changes.items() if k == "optimizer"}, MODELS[name])
    assert_equal(run({**GRID, "expert_tensor": "cut", **more}, changes, MODELS[name]), wanted)


def measured(eng: Engine) -> dict[str, Any]:
    """Bytes of a step over the tensor axis by label, those of the plan, and of the state of this rank."""
    before = eng.sent
    eng.train_batch(own_batch(eng, 3))
    rows = eng.sent.since(before).rows()
    ids = {each.name for each in eng.plan.table if each.experts}
    holder = eng.grid.holder()
    return {
        "sent": {row.label: row.bytes for row in rows if row.axis == "tp"},
        "planned": {row.label: row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if row.axis == "tp"},
        "exchanged": {row.label: row.bytes for row in rows if row.axis == "ep"},
        "elements": sum(each.local_elements(holder) for each in eng.plan.table if each.name in ids),
        "gradients": sum(row.bytes for row in rows if row.label == "replicated gradients"),
    }


@pytest.mark.long
def test_cut_experts_send_the_bytes_of_the_formulas_and_halve_their_state() -> None:
    cut, whole = (run({**GRID, "expert_tensor": form}, after=measured).extra for form in FORMS)
    tokens, layers, steps = TOKENS * ROWS // 2, 2, 1
    for own, other in zip(cut, whole, strict=True):
        assert own["sent"] == own["planned"], "sums of rows are planned exactly"
        assert 2 * own["elements"] == other["elements"]
        assert own["gradients"] < other["gradients"], "gradients of cut experts are not summed over tensor ranks"
        more = {label: own["sent"].get(label, 0) for label in ("row outputs", "column inputs")}
        rows = sent_bytes("all_reduce", tokens * HIDDEN * 4, 2) * layers * steps
        weights = sent_bytes("all_reduce", tokens * 2 * 4, 2) * layers * steps
        rest = {label: other["sent"].get(label, 0) for label in more}
        assert more["row outputs"] - rest["row outputs"] == rows
        assert more["column inputs"] - rest["column inputs"] == rows + weights
    for first, second in zip(cut[::2], cut[1::2], strict=True):
        assert first["exchanged"] == second["exchanged"], "each tensor rank sends all rows"
    both = [sum(each["exchanged"]["dispatch"] for each in ranks) for ranks in (cut, whole)]
    assert 1.8 < both[0] / both[1] < 2.2, "each tensor rank of whole experts sends its share of the rows"


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_a_list_of_experts_of_odd_width_is_whole_on_tensor_ranks(stage: int) -> None:
    """The width divides among 7 tensor ranks, which is no reason to refuse 2 that hold whole experts."""
    make = partial(home_made, True, 7)
    found = run(GRID, {"zero_optimization": {"stage": stage}}, make, after=form_of)
    assert_equal(found, run({"data": 1}, make=make))
    assert all(said.startswith("whole on 2 tensor ranks (auto: ") for said in found.extra)


def test_a_list_of_experts_of_odd_width_is_refused_as_cut() -> None:
    said = r"experts of blocks.0 cannot be cut along their width: the tensor plan does not cut their layers; set it to"
    with pytest.raises(PlanError, match=said):
        run({**GRID, "expert_tensor": "cut"}, make=partial(home_made, True, 7), steps=0)


@pytest.mark.parametrize("listed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_experts_of_stages_take_inputs_of_another_shape_than_the_example(listed: bool) -> None:
    """Each rank traces them, and has the experts of one expert rank alone."""

    def short(eng: Engine, step: int) -> dict[str, Tensor]:
        return {name: each[:, : TOKENS - 1 - step] for name, each in own_batch(eng, step).items()}

    def losses(eng: Engine) -> float:
        return eng.eval_batch(short(eng, 4)).loss

    make = partial(home_made, listed)
    found, wanted = (run(grid, None, make, losses, short, steps=1) for grid in (GRIDS["ep2-pp2"], {"data": 1}))
    assert_equal(found, wanted)
    assert found.extra == pytest.approx(wanted.extra * len(found.extra), rel=1e-6)


def test_experts_that_the_tensor_plan_does_not_cut_are_refused_as_cut() -> None:
    plan = {"tensor_plan": {"embed": "vocabulary"}}
    said = r'"cut", but the experts of blocks.0.experts cannot be cut along their width: the tensor plan does not cut'
    with pytest.raises(PlanError, match=said):
        run({**GRID, **plan, "expert_tensor": "cut"}, make=MODELS["stack"], steps=0)
