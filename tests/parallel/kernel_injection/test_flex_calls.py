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

from engine.errors import EngineError
from engine.kernels.ops.flex_attention import FlexCall, attend_flex
from engine.parallel.kernel_injection.flex_calls import redirect_flex
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.global_tensor.flex_parts import FlexPart
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, LocalOnlyError
from engine.parallel.tensor.global_tensor.index_runs import one_run
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.tp_axis import DryAxis
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


def _mask(length: int) -> Any:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, "cpu", BLOCK_SIZE=4)


@pytest.mark.parametrize(
    ("heads", "mask", "said"),
    [
        (
            2,
            _mask(8),
            r"got 12 queries and 12 keys with a mask of \(8, 8\) places; make the mask for the full sequence",
        ),
        (1, None, "got 2 query heads and 1 key heads; pass equal numbers, or enable_gqa=True"),
    ],
)
def test_masks_and_heads_that_do_not_match_are_refused(heads: int, mask: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        q, k, v = operands(heads)
        attend_flex(q, k, v, FlexCall(flex_attention, block_mask=mask))


def test_a_function_that_reads_a_shard_is_refused() -> None:
    context = global_context(DryAxis(2))
    gate = GlobalTensor(torch.zeros(2, 6), (2, 12), (None, Index.even_blocks(12, 2)), context)
    part = FlexPart.of(torch.device("cpu"), queries=one_run(0, 6))
    call = FlexCall(flex_attention, lambda score, b, h, q, k: score + gate[b, q])
    with pytest.raises(LocalOnlyError, match="reads a tensor that is sharded over ranks"):
        part.call(call, None)
