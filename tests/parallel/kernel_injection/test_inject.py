"""What is recognised computes the same afterwards, what only looks like it is left alone, and all of it comes off."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.kernels.dispatch import Kernels
from engine.parallel.kernel_injection.equivalence import agrees, random
from engine.parallel.kernel_injection.inject import Replacement, describe_replacements, find_replacements
from engine.parallel.kernel_injection.replacements import find_norm
from engine.parallel.model.forward_patch import ForwardPatches
from tests.engine.parity.architectures import find

FOUND = {
    "Llama": {"norm": 9, "gated": 4, "rotary": 4},
    "GPT-2": {"norm": 9, "linear": 8},
    "Gemma": {"norm": 9, "gated": 4, "rotary": 4},
    "Phi-3": {"norm": 9, "gated": 4, "rotary": 4},
    "GPT-NeoX": {"norm": 9, "rotary": 4, "linear": 8},
    "T5": {"norm": 22, "linear": 16},
    "Qwen3": {"norm": 17, "gated": 4, "rotary": 4},
}


def put_all_on(model: nn.Module, mode: str) -> tuple[list[Replacement], ForwardPatches]:
    found = find_replacements(model, Kernels(mode))  # type: ignore[arg-type]
    patches = ForwardPatches()
    for _, put_on in found:
        put_on(patches)
    return [replacement for replacement, _ in found], patches


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
    replacements, patches = put_all_on(model, "reference")
    assert Counter(r.operator for r in replacements) == FOUND[name]
    for one, other in zip(outcome(name, model), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    patches.remove()
    assert all(map(torch.equal, outcome(name, model), before))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.long
def test_models_compute_the_same_with_kernels() -> None:
    model = find("Llama").build()
    before = outcome("Llama", model)
    put_all_on(model, "triton")
    for one, other in zip(outcome("Llama", model), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_alike_modules_are_told_together() -> None:
    lines = describe_replacements(put_all_on(find("Llama").build(), "reference")[0])
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
            case "training":
                return self.weight * x * torch.rsqrt(square + self.eps) * (1.1 if self.training else 1.0)
        return self.weight * x * torch.rsqrt(square + self.eps)


class Perceptron(nn.Module):
    """A gated one, and ways in which it is none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.how, self.drop, self.drop_prob = how, nn.Identity() if how != "dropout" else nn.Dropout(0.5), 0.5
        self.nested = nn.Sequential(nn.Identity(), nn.Dropout(0.5)) if how == "nested" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        match self.how:
            case "sum":
                inner = functional.silu(a) + b
            case "limit":
                inner = functional.silu(a) * b.clamp(max=1.0)
            case "other activation":
                inner = functional.mish(a) * b
            case "clamped":
                inner = functional.hardtanh(a, 0.0, 20.0) * b
            case "swapped":
                inner = a * functional.silu(b)
            case "functional":
                inner = functional.dropout(functional.silu(a) * b, self.drop_prob, self.training)
            case "training":
                inner = functional.silu(a) * b * (1.1 if self.training else 1.0)
            case _:
                inner = self.nested(self.drop(functional.silu(a) * b))
        return x + self.c(inner) if self.how == "residual" else self.c(inner)  # type: ignore[no-any-return]


NO_GATES = ("sum", "limit", "residual", "other activation", "clamped", "dropout", "nested", "functional", "training")


@pytest.mark.parametrize("how", ["", "detached", "eps outside", "scaled", "clamped", "other dtype"])
def test_what_only_looks_like_a_norm_is_none(how: str) -> None:
    found = put_all_on(nn.Sequential(Scaled(how)), "reference")[0]
    assert [r.operator for r in found] == ["norm"] * (how == "")


@pytest.mark.parametrize("how", ["", "swapped", *NO_GATES])
def test_what_only_looks_like_a_gated_perceptron_is_none(how: str) -> None:
    found = put_all_on(nn.Sequential(Perceptron(how)), "reference")[0]
    assert [r.operator for r in found] == ["gated"] * (how in ("", "swapped"))
    assert not found or found[0].detail == ("silu(a) * b, c" if how == "" else "silu(b) * a, c")


@pytest.mark.parametrize("how", ["dropout", "nested", "functional"])
def test_dropout_stays_as_it_is(how: str) -> None:
    model = nn.Sequential(Perceptron(how))
    before = torch.get_rng_state()
    put_all_on(model, "reference")
    assert torch.equal(torch.get_rng_state(), before) and all(module.training for module in model.modules())
    x = torch.randn(64, 16)
    assert not torch.equal(model(x), model(x))


class Plain(nn.Module):
    """A perceptron of two layers, and ways in which its first one cannot take the activation."""

    def __init__(self, how: str = "", act: nn.Module | None = None) -> None:
        super().__init__()
        self.how, self.act, self.up, self.down = how, act or nn.GELU(), nn.Linear(16, 24), nn.Linear(24, 16)
        self.drop = nn.Dropout(0.5) if how.startswith("dropout") else nn.Identity()
        if how == "hook":
            self.up.register_forward_hook(lambda module, args, y: y * 2)
        if how == "hooked activation":
            self.act.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        match self.how:
            case "dropout before":
                h = self.act(self.drop(h))
            case "twice":
                h = self.act(self.act(h))
            case "read":
                h = self.act(h) + h
            case "evaluation":
                h = self.act(h) if self.training else h
            case "recomputed":
                h = checkpoint(lambda x: self.act(self.up(x)), x, use_reentrant=False)
            case _:
                h = self.drop(self.act(h))
        return self.down(h)  # type: ignore[no-any-return]


class Asked(Plain):
    """One that can be asked for something else."""

    def forward(self, x: Tensor, pre: bool = False) -> Tensor:
        return self.up(x) if pre else super().forward(x)


NO_PAIRS = ("dropout before", "read", "evaluation", "hook", "hooked activation", "recomputed")


def pairs(model: nn.Module) -> list[str]:
    found = put_all_on(model, "reference")[0]
    return [f"{r.module} {r.activation}" for r in found if r.operator == "linear" and r.activation != "none"]


def test_a_linear_layer_takes_the_activation_behind_it() -> None:
    for how in ("", "dropout behind"):
        model, x = nn.Sequential(Plain(how)).eval(), torch.randn(5, 16) * 10
        expected = model(x)
        assert pairs(model) == ["0.up gelu"], how
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("how", NO_PAIRS)
def test_what_stands_between_layer_and_activation_is_seen(how: str) -> None:
    assert pairs(nn.Sequential(Plain(how))) == []


def test_other_arguments_may_ask_for_other_things() -> None:
    assert pairs(nn.Sequential(Asked())) == []


@pytest.mark.parametrize("act", [nn.ReLU6(), nn.Hardtanh(0.0, 20.0), nn.LeakyReLU(1e-3), nn.GELU("tanh")], ids=str)
def test_an_activation_is_known_at_all_scales(act: nn.Module) -> None:
    assert pairs(nn.Sequential(Plain(act=act))) == (["0.up gelu_tanh"] if isinstance(act, nn.GELU) else [])


class Sharper(nn.Module):
    """GELU in one mode, and its approximation in the other."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh" if self.training else "none")


@pytest.mark.parametrize("training", [True, False])
def test_a_module_of_two_modes_stays_in_whichever_mode_it_is(training: bool) -> None:
    model = nn.Sequential(Scaled("training"), Plain(act=Sharper())).train(training)
    assert put_all_on(model, "reference")[0] == []
    assert all(module.training == training for module in model.modules())


def test_an_activation_that_two_modules_share_stays() -> None:
    act = nn.GELU()
    model, x = nn.Sequential(Plain(act=act), Plain(act=act)), torch.randn(5, 16)
    expected = model(x)
    assert pairs(model) == []
    assert torch.equal(model(x), expected)


def test_eps_is_what_is_called_so() -> None:
    class Dropping(nn.LayerNorm):
        """Has another float."""

        def __init__(self) -> None:
            super().__init__(16, eps=1e-12)
            self.dropout = 0.0

    replacements = put_all_on(nn.Sequential(Dropping()), "reference")[0]
    assert [r.detail for r in replacements] == ["LayerNorm, eps 1e-12"]


COUNT = 0


class Counting(nn.Module):
    """Attention that counts its calls."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        global COUNT
        COUNT += 1
        return apply_rotary(q, k, cos, sin)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-two, one), dim=-1) * sin.unsqueeze(1)

    return turned(q), turned(k)


class Attending(nn.Module):
    """The same without the count."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return apply_rotary(q, k, cos, sin)


def test_a_forward_that_writes_globals_keeps_them() -> None:
    found = put_all_on(nn.Sequential(Counting(), Attending()), "reference")[0]
    assert [(r.module, r.operator) for r in found] == [("1", "rotary")]


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


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def failing(x: Tensor) -> Tensor:
    raise KeyError("of the user")


@pytest.mark.parametrize(
    "module",
    [failing, lambda: 1, lambda x: None, lambda x: {"out": 2 * x}, lambda x: (2 * x, x), lambda x: 2 * x[:0]],
    ids=["raises", "takes nothing", "gives nothing", "gives a mapping", "gives more", "gives no element"],
)
def test_a_module_that_cannot_be_compared_does_not_agree(module: object) -> None:
    assert agrees(doubled, lambda x: x + x, [random(2, 3)])
    assert not agrees(module, doubled, [random(2, 3)])  # type: ignore[arg-type]
    assert not agrees(doubled, module, [random(2, 3)])  # type: ignore[arg-type]


def test_a_mistake_in_an_operator_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.kernel_injection.replacements.norm", None)
    with pytest.raises(TypeError, match="not callable"):
        find_norm(torch.nn.LayerNorm(8))


class Around(nn.Module):
    """Module that also calls the parts of its perceptron."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.mlp = how, Plain("dropout behind" if how == "evaluation" else "")

    def forward(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        match self.how:
            case "activation before":
                y = mlp(mlp.act(x))
            case "activation after, twice":
                y = mlp.act(mlp.act(mlp(x)))
            case "layer alone":
                y = mlp(x) + mlp.up(x).mean()
            case "by itself":
                y = mlp(x) + mlp.down(mlp.act(mlp.up(x)))
            case "recomputed":
                y = checkpoint(mlp.act, checkpoint(mlp, mlp.act(x), use_reentrant=False), use_reentrant=False)
            case "recomputed inside":
                y = mlp(checkpoint(mlp.up, x, use_reentrant=False)[..., :16])
            case "after another activation":
                mlp.act = nn.Tanh()
                y = mlp(x)
            case _:
                y = mlp(x)
        return y  # type: ignore[no-any-return]


OUTSIDE = ("activation before", "activation after, twice", "layer alone", "by itself", "recomputed")


@pytest.mark.parametrize("how", [*OUTSIDE, "recomputed inside", "after another activation", "evaluation"])
def test_calls_of_a_pair_from_outside_of_its_owner_compute_alone(how: str) -> None:
    model = Around(how).train(how != "evaluation")
    other, x = deepcopy(model), torch.randn(5, 16)
    assert pairs(model) == ["mlp.up gelu"]
    copied = deepcopy(model)
    expected = torch.autograd.grad(other(x).square().sum(), list(other.parameters()))
    for each in (model, copied, model):
        found = torch.autograd.grad(each(x).square().sum(), list(each.parameters()))
        torch.testing.assert_close(found, expected)


def test_an_owner_that_fails_leaves_calls_from_outside_alone() -> None:
    mlp, x = Plain(), torch.randn(5, 16)
    expected = mlp.act(x)
    assert pairs(mlp) == ["up gelu"]
    with pytest.raises(RuntimeError):
        mlp(x[:, :8])
    assert torch.equal(mlp.act(x), expected)
