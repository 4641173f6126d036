"""Adapters of stacks of experts, as PEFT puts them on: the place of each expert in them is proven by trial."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.parallel.experts.forms import ExpertPacking, RoutedExperts
from engine.parallel.experts.proof import Unproven, prove_adapted
from engine.parallel.experts.width import prove_width
from engine.parallel.model.parametrized_weights import adapter_chain, outermost_adapters
from engine.parallel.tensor.plan.ranges import cut_parts
from engine.parallel.tensor.plan.tensor_plan import ParameterCut
from tests.parallel.experts.moe import Stacked

RANK = 3


class Turned(Stacked):
    """Matrices of experts as [in, out]."""

    is_transposed = True

    def __init__(self, experts: int) -> None:
        super().__init__(experts, width=6, inner=6)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, slot = (index == expert).nonzero().unbind(1)
            made = functional.silu(hidden[token] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, token, made * weights[token, slot, None])
        return out


def adapted(stack: nn.Module, *parameters: str, adapters: int = 1) -> nn.Module:
    """A model with a stack and PEFT's pairs of its parameters; the first adapter is active."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, target_modules=[], target_parameters=[f"moe.{own}" for own in parameters])
    model: Any = get_peft_model(nn.ModuleDict({"moe": stack}), config)
    for number in range(1, adapters):
        model.add_adapter(f"other-{number}", config)
    return model.base_model.model["moe"]  # type: ignore[no-any-return]


def test_the_outermost_adapter_is_that_of_the_module() -> None:
    outer = adapted(Stacked(4), "up", "down")
    model = nn.ModuleDict({"a": nn.ModuleDict({"moe": outer}), "b": Stacked(4)})
    chain = adapter_chain(outer)
    assert [name for name, _ in chain] == ["", "base_layer.", "base_layer.base_layer."]
    assert outermost_adapters(model) == {chain[-1][1]: "a.moe"}
    assert adapter_chain(model["b"]) == [("", model["b"])]


@pytest.mark.parametrize("experts", [3, 4, 7])
def test_pairs_of_both_matrices_are_divided_as_their_experts(experts: int) -> None:
    found = prove_adapted("moe", adapted(Stacked(experts), "up", "down"), 2)
    assert isinstance(found, RoutedExperts), found
    first, second = ExpertPacking(RANK), ExpertPacking(RANK, 1, alternate=True)
    assert found.own == {
        "base_layer.base_layer.up": ExpertPacking(), "base_layer.base_layer.down": ExpertPacking(),
        "lora_A.default.weight": first, "lora_B.default.weight": second,
        "base_layer.lora_A.default.weight": first, "base_layer.lora_B.default.weight": second,
    }  # fmt: skip
    assert set(found.counts) >= {"num_experts", "base_layer.num_experts", "base_layer.base_layer.num_experts"}
    assert (found.experts, found.common) == (experts, ())


def test_adapters_are_the_reason_why_tensor_ranks_do_not_cut_their_experts() -> None:
    module: Any = adapted(Stacked(4), "up", "down")
    found = prove_adapted("moe", module, 2)
    assert isinstance(found, RoutedExperts), found
    cut = ParameterCut(1, cut_parts(module.base_layer.base_layer.up.shape[1], 2))
    assert prove_width(module, found, {"base_layer.base_layer.up": cut}, (), 2) == "they have adapters"


def test_matrices_of_the_other_order_need_two_experts_on_a_rank() -> None:
    several = prove_adapted("moe", adapted(Turned(4), "up", "down"), 2)
    assert isinstance(several, RoutedExperts) and several.own["lora_A.default.weight"] == ExpertPacking(RANK)
    alone = prove_adapted("moe", adapted(Turned(4), "up", "down"), 4)
    assert alone == Unproven("moe", "its adapters are not divided by experts")


def test_an_inactive_adapter_is_a_reason() -> None:
    found = prove_adapted("moe", adapted(Stacked(4), "up", adapters=2), 2)
    assert found == Unproven("moe", "its adapter lora_A.other-1.weight has no effect")
