"""Rotary position embedding (Su et al. 2021) of queries and keys, in the usual form of models:

    y = x cos + turn(x) sin      on the first R features; the others are unchanged
    turn                         (x1, x2) -> (-x2, x1) of the two halves, or of adjacent features if interleaved

cos and sin have all R features, and their values for x1 and x2 may differ.

Shape suffixes: B batch, H heads, S positions, D features of a head, R rotated features.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from engine.kernels.dispatch import Kernels, fused_operator, is_narrow


@dataclass(frozen=True, slots=True)
class Rotary:
    """Layout for rotary embeddings: the features of a pair (adjacent, or one from each half), and the heads dim."""

    interleaved: bool = False
    """True: adjacent features are rotated (GPT-J). False: the two halves (GPT-NeoX, Llama)."""
    heads_dim: int = 1
    """Dim of the heads: 1 for [B, H, S, D], 2 for [B, S, H, D]."""


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: Rotary, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Returns ``q`` and ``k``, rotated by rotary position embeddings. Differentiable.

    ``cos`` and ``sin`` are [B or 1, S, R]; the first R features of each head are rotated. ``form`` is the layout;
    ``kernels`` selects Triton or PyTorch.
    """
    if has_torch_function((q, k, cos, sin)):
        return handle_torch_function(rotary, (q, k, cos, sin), q, k, cos, sin, form, kernels)
    if not _fits(q, k, cos, sin, form.heads_dim) or not kernels.triton("rotary", q, q.shape[-1]):
        return rotary_reference(q, k, cos, sin, form)
    swapped = form.heads_dim != 1  # an unnecessary transpose would be a node of the graph
    q_BHSD, k_BHSD = (q.transpose(1, 2), k.transpose(1, 2)) if swapped else (q, k)
    turned = _rotary(_dense(q_BHSD), _dense(k_BHSD), cos.contiguous(), sin.contiguous(), form.interleaved, False)
    return (turned[0].transpose(1, 2), turned[1].transpose(1, 2)) if swapped else turned


def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: Rotary) -> tuple[Tensor, Tensor]:
    """Returns ``q`` and ``k``, rotated by rotary position embeddings in PyTorch."""
    cos, sin = cos.unsqueeze(form.heads_dim), sin.unsqueeze(form.heads_dim)
    return _turned(q, cos, sin, form.interleaved), _turned(k, cos, sin, form.interleaved)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    features = cos.shape[-1]
    first, rest = (x, None) if features == x.shape[-1] else (x[..., :features], x[..., features:])
    if interleaved:
        turn = torch.stack((-first[..., 1::2], first[..., ::2]), dim=-1).flatten(-2)
    else:
        turn = torch.cat((-first[..., features // 2 :], first[..., : features // 2]), dim=-1)
    y = first * cos + turn * sin
    return y if rest is None else torch.cat((y, rest), dim=-1)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> bool:
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and is_narrow(q) and cos.shape == sin.shape):
        return False
    positions = 3 - heads_dim
    batch, length, features = q.shape[0], q.shape[positions], q.shape[3]
    even = cos.shape[2] % 2 == 0 and 0 < cos.shape[2] <= features
    alike = all(t.dtype == q.dtype for t in (k, cos, sin)) and not (cos.requires_grad or sin.requires_grad)
    agree = (k.shape[0], k.shape[positions], k.shape[3]) == (batch, length, features)
    return even and alike and agree and cos.shape[1] == length and cos.shape[0] in (1, batch)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _blank(x: Tensor) -> Tensor:
    """Allocates memory with the dim order of ``x`` and contiguous features."""
    made = torch.empty_like(x)
    return made if made.stride(-1) == 1 else x.new_empty(x.shape)


@fused_operator("trine::rotary")
def _rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    from engine.kernels.gpu.rotary import turn

    out = _blank(q), _blank(k)
    turn((q, k), (cos, sin), out, interleaved, transposed)
    return out


@_rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    return _blank(q), _blank(k)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.transposed = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    """Applies the transposed map, which is the inverse rotation if cos and sin are of one angle."""
    made = _rotary(_dense(dq), _dense(dk), *ctx.saved_tensors, ctx.interleaved, not ctx.transposed)
    return *made, None, None, None, None


_rotary.register_autograd(_gradients, setup_context=_keep)
