"""Pairs of PEFT inside the regions of their layers: collectives, gradients, masks, and pairs that stay outside."""

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.auto.equivalence import BlockReference, Verdict, exactly
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis

WIDTH = 8
KINDS = {"up": "column", "down": "row", "head": "column+gather"}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]


class Perceptron(nn.Module):
    """A column, a row and a gathered column layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return out


def adapted(**settings: Any) -> nn.Module:
    """The perceptron with pairs around its layers."""
    import peft

    torch.manual_seed(3)
    model: Any = Perceptron()
    config = peft.LoraConfig(r=2, target_modules=list(KINDS), init_lora_weights=False, **settings)
    made: nn.Module = peft.get_peft_model(model, config)
    return made


def plan_of(model: nn.Module, adapters: tuple[str, ...] = ("default",)) -> TensorPlan:
    """The plan of the layers, with the sharded halves of their pairs."""
    names, styles = {name for name, _ in model.named_modules()}, dict[str, str]()
    for layer, kind in KINDS.items():
        if layer in names:
            styles[layer] = kind
            continue
        half = "lora_A" if kind == "row" else "lora_B"
        styles |= {f"*{layer}.base_layer": kind} | {f"*{layer}.{half}.{name}": kind for name in adapters}
    return find_tensor_plan(model, styles, 2)


def proof(model: nn.Module, plan: TensorPlan) -> Verdict:
    """Two ranks against one process, in float64."""
    with exactly():
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        return BlockReference(model.double(), [((x,), {})]).prove(plan, 2)


def calls(verdict: Verdict) -> Mapping[tuple[str, str], int]:
    """Collectives of a rank, by operation and label."""
    assert verdict.holds, verdict.problem
    return Counter((call.op, call.label) for call in verdict.called)


@pytest.mark.parametrize("adapters", [("default",), ("default", "other")])
def test_pairs_add_no_collective(adapters: tuple[str, ...]) -> None:
    import peft

    plain, model = Perceptron(), adapted()
    for name in adapters[1:]:
        given: Any = model
        given.add_adapter(name, peft.LoraConfig(r=3, target_modules=list(KINDS), init_lora_weights=False))
        given.base_model.set_adapter(list(adapters))
    plan = plan_of(model, adapters)
    assert calls(proof(model, plan)) == calls(proof(plain, plan_of(plain)))
    prefix = "base_model.model."
    assert plan.partial == {
        f"{prefix}{layer}.{'lora_B' if kind == 'row' else 'lora_A'}.{name}.weight"
        for layer, kind in KINDS.items()
        for name in adapters
    }
    assert set(plan.communicating) == {prefix + layer for layer in KINDS} and len(plan.layers) == len(KINDS)


@pytest.mark.parametrize(
    ("settings", "joined"),
    [({"lora_bias": True}, {"up", "head"}), ({"use_dora": True}, set())],
    ids=["a bias would be added on each rank", "no sum of products"],
)
def test_other_pairs_stay_layers_of_their_own(settings: dict[str, Any], joined: set[str]) -> None:
    model = adapted(**settings)
    plan = plan_of(model)
    assert {cut.around.rpartition(".")[2] for cut in plan.layers.values() if cut.around} == joined
    if joined:
        assert proof(model, plan).holds


def test_a_mask_is_one_for_all_columns() -> None:
    model = adapted(lora_dropout=0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "head" in name and "lora_A" not in name:
                parameter.fill_(0.0 if "base_layer" in name else 1.0)

    def body(axis: TensorAxis) -> Tensor:
        mine = copy.deepcopy(model).train()
        apply_plan(mine, plan_of(model), axis, ForwardPatches())
        torch.manual_seed(0)
        out: Tensor = mine(torch.ones(5, WIDTH)).detach()
        return out

    for out in run_tensor_ranks(2, body):
        assert torch.equal(out, out[:, :1].expand_as(out)) and not torch.equal(out[0], out[1])
