"""Every way in which a model calls flex attention leads to the engine's operator, until its patches are removed.

torch refuses the backward of flex attention on CPUs, so that a gradient shows the operator.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.attention.flex_attention as alias
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from engine.kernels.ops.flex_attention import FlexCall, attend_flex
from engine.parallel.kernel_injection.flex_calls import redirect_flex
from engine.parallel.model.forward_patch import ForwardPatches
from tests.parallel.context.flex_models import written_out

compiled = torch.compile(flex_attention)
REFUSED = "does not support backward on CPU"


class Global(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v)


class Compiled(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return compiled(q, k, v)


class Alias(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return alias.flex_attention(q, k, v)


class OfClass(nn.Module):
    run: ClassVar[Callable[..., Any]] = torch.compile(flex_attention)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return OfClass.run(q, k, v)


class Static(nn.Module):
    run = staticmethod(flex_attention)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.run(q, k, v)


class OfInstance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.run = flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.run(q, k, v)


def helped(q: Tensor, k: Tensor, v: Tensor) -> Any:
    def inner() -> Any:
        return flex_attention(q, k, v)

    return inner()


class Helper(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return helped(q, k, v)


def operands(heads: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, one, 12, 8, generator=draw).requires_grad_() for one in (2, heads, heads)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", [Global, Compiled, Alias, OfClass, Static, OfInstance, Helper])
def test_every_call_has_a_gradient_until_the_patches_are_removed(form: type[nn.Module]) -> None:
    model, patches = nn.ModuleList([form()]), ForwardPatches()
    q, k, v = operands()
    with pytest.raises(Exception, match=REFUSED):
        model[0](q, k, v)
    redirect_flex(model, patches)
    out = model[0](q, k, v)
    out.sum().backward()
    seen = torch.ones((), dtype=torch.bool)
    assert torch.allclose(out, written_out(q, k, v, lambda score, *_: score, lambda *_: seen), atol=1e-6)
    patches.remove()
    assert not {"forward", "run", "attend"} & vars(model[0]).keys() - ({"run"} if form is OfInstance else set())
    with pytest.raises(Exception, match=REFUSED):
        model[0](q, k, v)


def test_the_operator_is_flex_attention_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, log-sum-exps and gradients, of grouped heads with a mask that hides all keys of some queries."""
    monkeypatch.setattr(alias, "_validate_device", lambda *_: None)
    monkeypatch.setattr(alias, "_warn_once", lambda *_, **__: None)
    bias = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (k != 0) & (k > b), 2, None, 12, 12, "cpu", BLOCK_SIZE=4)

    def scored(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * (1 + h) + bias[q, k]

    found = []
    for operator in (False, True):
        q, k, v = operands(1)
        options: Any = {"return_aux": AuxRequest(lse=True), "scale": 0.3}
        if operator:
            out, aux = attend_flex(q, k, v, FlexCall(flex_attention, scored, mask, True, options))
        else:
            out, aux = flex_attention(q, k, v, scored, mask, enable_gqa=True, **options)
        bias.grad = None
        (out.square().sum() + aux.lse[:, :, 2:].sum()).backward()
        found.append([out, aux.lse.nan_to_num(0.0, 9.0, -9.0), *(x.grad for x in (q, k, v, bias))])
    for ours, torchs in zip(*found, strict=True):
        assert torch.allclose(ours, torchs, atol=1e-5), (ours - torchs).abs().max()
