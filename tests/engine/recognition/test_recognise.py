"""What is recognised computes the same afterwards, what only looks like it is left alone, and all of it comes off."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.kernels.choice import Kernels
from engine.recognition.recognise import Replacement, describe, recognise
from tests.engine.architectures import find

FOUND = {
    "Llama": {"norm": 9, "gated": 4, "rotary": 4},
    "GPT-2": {"norm": 9, "linear": 8},
    "Gemma": {"norm": 9, "gated": 4, "rotary": 4},
    "Phi-3": {"norm": 9, "gated": 4, "rotary": 4},
    "GPT-NeoX": {"norm": 9, "rotary": 4, "linear": 8},
    "T5": {"norm": 22, "linear": 16},
    "Qwen3": {"norm": 17, "gated": 4, "rotary": 4},
}


def put_all_on(model: nn.Module, mode: str) -> tuple[list[Replacement], list[Callable[[], None]]]:
    found = recognise(model, Kernels(mode))  # type: ignore[arg-type]
    return [replacement for replacement, _ in found], [put_on() for _, put_on in found]


def outcome(name: str, model: nn.Module) -> list[Tensor]:
    """Loss and gradients of one microbatch."""
    architecture = find(name)
    batch: Any = architecture.batches(2)[0]
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = output.loss if architecture.loss_fn is None else architecture.loss_fn(output, batch)
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize("name", FOUND)
def test_models_compute_the_same_with_operators(name: str) -> None:
    model = find(name).build()
    before = outcome(name, model)
    replacements, undo = put_all_on(model, "reference")
    assert Counter(r.operator for r in replacements) == FOUND[name]
    for one, other in zip(outcome(name, model), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for take_off in undo:
        take_off()
    assert all(map(torch.equal, outcome(name, model), before))
    assert not any("forward" in vars(module) for module in model.modules())


def test_models_compute_the_same_with_kernels() -> None:
    model = find("Llama").build()
    before = outcome("Llama", model)
    put_all_on(model, "triton")
    for one, other in zip(outcome("Llama", model), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_alike_modules_are_told_together() -> None:
    lines = describe(put_all_on(find("Llama").build(), "reference")[0])
    assert "norm    model.layers.*.input_layernorm (4): RMSNorm, eps 1e-06" in lines
    assert "gated   model.layers.*.mlp (4): silu(gate_proj) * up_proj, down_proj" in lines


class Scaled(nn.Module):
    """An RMSNorm in many ways that are none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.eps, self.how = nn.Parameter(torch.ones(16)), 1e-6, how

    def forward(self, x: Tensor) -> Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        match self.how:
            case "detached":
                return self.weight * x * torch.rsqrt(square.detach() + self.eps)
            case "eps outside":
                return self.weight * x / (square.sqrt() + self.eps)
            case "scaled":
                return self.weight * x * torch.rsqrt(square + self.eps) * 1.001
            case "clamped":
                return self.weight * (x * torch.rsqrt(square + self.eps)).clamp(-2, 2)
            case "other dtype":
                return (self.weight * x * torch.rsqrt(square + self.eps)).to(
                    torch.promote_types(x.dtype, torch.float32)
                )
        return self.weight * x * torch.rsqrt(square + self.eps)


class Perceptron(nn.Module):
    """A gated one in ways that are none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.how, self.drop = how, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "sum":
                return self.c(functional.silu(self.a(x)) + self.b(x))  # type: ignore[no-any-return]
            case "limit":
                return self.c(functional.silu(self.a(x)) * self.b(x).clamp(max=1.0))  # type: ignore[no-any-return]
            case "residual":
                return x + self.c(functional.silu(self.a(x)) * self.b(x))  # type: ignore[no-any-return]
            case "other activation":
                return self.c(functional.mish(self.a(x)) * self.b(x))  # type: ignore[no-any-return]
            case "swapped":
                return self.c(self.a(x) * functional.silu(self.b(x)))  # type: ignore[no-any-return]
        return self.c(self.drop(functional.silu(self.a(x)) * self.b(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["", "detached", "eps outside", "scaled", "clamped", "other dtype"])
def test_what_only_looks_like_a_norm_is_none(how: str) -> None:
    found = put_all_on(nn.Sequential(Scaled(how)), "reference")[0]
    assert [r.operator for r in found] == ["norm"] * (how == "")


@pytest.mark.parametrize("how", ["", "sum", "limit", "residual", "other activation", "swapped"])
def test_what_only_looks_like_a_gated_perceptron_is_none(how: str) -> None:
    found = put_all_on(nn.Sequential(Perceptron(how)), "reference")[0]
    assert [r.operator for r in found] == ["gated"] * (how in ("", "swapped"))
    assert not found or found[0].detail == ("silu(a) * b, c" if how == "" else "silu(b) * a, c")


def test_dropout_between_the_layers_stays() -> None:
    model = nn.Sequential(Perceptron(""))
    put_all_on(model, "reference")
    x = torch.randn(64, 16)
    assert not torch.equal(model(x), model(x))
    model.eval()
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


def test_under_autocast_modules_run_their_own_code() -> None:
    model = nn.Sequential(nn.LayerNorm(16), Perceptron(""))
    with torch.autocast("cpu", torch.bfloat16):
        before = model.eval()(torch.ones(2, 16))
        put_all_on(model, "reference")
        assert torch.equal(model(torch.ones(2, 16)), before)


def test_a_copy_of_a_module_uses_its_own_weights() -> None:
    model = nn.Sequential(nn.LayerNorm(16), Perceptron("swapped"))
    put_all_on(model, "reference")
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert other(torch.randn(3, 16)).abs().max() > 0


def test_nothing_is_drawn_and_meta_models_will_do() -> None:
    model = nn.Sequential(nn.LayerNorm(16, device="meta"), Perceptron("").to("meta"))
    before = torch.get_rng_state()
    assert Counter(r.operator for r in put_all_on(model, "reference")[0]) == {"norm": 1, "gated": 1}
    assert torch.equal(torch.get_rng_state(), before)


def test_the_source_file_keeps_its_function() -> None:
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb
    forward = modeling_llama.LlamaAttention.forward
    put_all_on(find("Llama").build(), "reference")
    assert modeling_llama.apply_rotary_pos_emb is before and modeling_llama.LlamaAttention.forward is forward
