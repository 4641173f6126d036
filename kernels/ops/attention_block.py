"""Attention over a block of keys: output and log-sum-exp, and gradients given both.

Blocks of one softmax are merged by their log-sum-exps. With the merged output and log-sum-exp, the backward of each
block gives its part of the gradients (Liu et al. 2023, Ring Attention; Dao et al. 2022, section 3).

    flash        GPU, no mask tensor, bf16 or fp16    aten._scaled_dot_product_flash_attention
    flash        CPU, no mask tensor, fp32 or fp64    aten._scaled_dot_product_flash_attention_for_cpu
    efficient    GPU, a mask, or fp32                 aten._scaled_dot_product_efficient_attention
    reference    other cases, in tiles of queries     plain torch; half types compute in fp32

A run on shapes stores what these kernels store: half types represent a GPU, and other types the CPU.

Shape suffixes: queries [.., G heads, Q, D], keys [.., H heads, K, D], values [.., H, K, E]; G is a multiple of H.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from engine.kernels.device import attends_in_blocks, is_host

_HALF = (torch.bfloat16, torch.float16)
_TILE = 1 << 22
"""Number of scores that the reference computes at a time."""
_ON_SHAPES = 3
"""Number of tiles that a run on shapes computes: names keep the scores of a tile until the next one has its own."""


class BlockRule(NamedTuple):
    """Rule for the keys that a query attends to in a block: all, or limited by ``causal`` or ``mask``.

    ``causal``: the query attends to keys up to its own index in the block.
    ``mask`` is boolean (True: attends) or is added to the scores: [.., heads or 1, queries or 1, keys].
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    unseeing: Tensor | None = None
    """Queries [.., Q, 1] from which an added mask hides every key with a finite number: torch weighs them equally."""


def attend(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    """Computes attention over one block of keys; returns (output [.., G, Q, E], log-sum-exp [.., G, Q]).

    ``q`` is [.., G, Q, D] with G heads, a multiple of H, ``k`` [.., H, K, D] and ``v`` [.., H, K, E]. The log-sum-exp
    is -inf for a query without keys.
    """
    if _flash(q, k, v, rule):
        made = _aten()._scaled_dot_product_flash_attention(q, k, v, 0.0, rule.causal, False, scale=rule.scale)
        return made[0], made[1]
    if _flash_of_cpu(q, v, rule):
        given = (q, _repeated(q, k), _repeated(q, v))
        out, lse = _aten()._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, rule.causal, scale=rule.scale)
        return out, lse
    if _efficient(q, k, v):
        keys, values = _repeated(q, k), _repeated(q, v)
        bias = _bias(q, k, rule.mask)
        made = _aten()._scaled_dot_product_efficient_attention(
            q, keys, values, bias, True, 0.0, rule.causal, scale=rule.scale
        )
        lse = made[1][..., : q.shape[-2]]
        sees = lse.isfinite()
        return torch.where(sees[..., None], made[0], 0.0), torch.where(sees, lse, -math.inf)
    return _reference(q, k, v, rule)


def attend_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: BlockRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the contribution of one block of keys to the attention's gradients of ``inputs`` (q, k, v).

    ``merged`` is (output, log-sum-exp) over all blocks of keys, and ``grad`` the gradient of this output.
    """
    (q, k, v), (out, lse) = inputs, merged
    lse = lse.masked_fill(lse == -math.inf, math.inf).contiguous()  # a query without keys has weights of zero
    if _flash(q, k, v, rule):
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        made: Any = _aten()._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, rule.causal, seed, seed[:0],
            scale=rule.scale,
        )  # fmt: skip
        return made[0], made[1], made[2]
    if _flash_of_cpu(q, v, rule):
        made = _aten()._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.to(q.dtype), q, _repeated(q, k), _repeated(q, v), out, lse, 0.0, rule.causal, scale=rule.scale
        )
        return made[0], _summed(made[1], k), _summed(made[2], v)
    if _efficient(q, k, v):
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        made = _aten()._scaled_dot_product_efficient_attention_backward(
            grad, q, _repeated(q, k), _repeated(q, v), _bias(q, k, rule.mask), out, padded, seed, seed, 0.0,
            [True, True, True, False], rule.causal, scale=rule.scale,
        )  # fmt: skip
        return made[0], _summed(made[1], k), _summed(made[2], v)
    return _reference_backward(grad, (q, k, v), (out, lse), rule)


def _aten() -> Any:
    return torch.ops.aten


def _on_shapes(q: Tensor) -> bool:
    return q.is_meta or isinstance(q, FakeTensor)


def _on_gpu(q: Tensor) -> bool:
    """Returns True if kernels of a GPU compute the block; on shapes, half types represent one."""
    return attends_in_blocks(q.device) or (_on_shapes(q) and q.dtype in _HALF)


def _flash(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> bool:
    fits = q.ndim == 4 and q.dtype in _HALF and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    return fits and rule.mask is None and _on_gpu(q)


def _flash_of_cpu(q: Tensor, v: Tensor, rule: BlockRule) -> bool:
    exact = q.dtype not in _HALF  # blocks of half types are merged in fp32
    return (
        (is_host(q.device) or q.is_meta) and exact and q.ndim == 4 and rule.mask is None and q.shape[-1] == v.shape[-1]
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> bool:
    fits = q.ndim == 4 and q.dtype in (*_HALF, torch.float32)
    return fits and not any(x.shape[-1] % 8 for x in (q, v)) and _on_gpu(q)


def _repeated(q: Tensor, x: Tensor) -> Tensor:
    times = q.shape[-3] // x.shape[-3]
    return x if times == 1 else x.repeat_interleave(times, -3)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    times = grad.shape[-3] // x.shape[-3]
    return grad if times == 1 else torch.unflatten(grad, -3, (-1, times)).sum(-3)


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns a mask that is added to scores, with rows aligned to 16 elements, as the kernel reads them."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    mask, keys = mask.to(q.dtype), k.shape[-2]
    mask = mask.expand(*mask.shape[:-1], keys)
    aligned = functional.pad(mask, (0, -keys % 16))[..., :keys]
    return aligned.expand(*q.shape[:-1], keys)


# ---- reference


def _reference(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    q, k, v = _grouped(q, k, v)
    tiles = _tiles(q, k)
    outs, sums = _skipped(q, tiles, v.shape[-1]), _skipped(q, tiles)
    for rows in tiles:
        scores = _scores(q[..., rows, :], k, rule, rows)
        lse = torch.logsumexp(scores, -1)
        weights = (scores - lse.masked_fill(lse == -math.inf, math.inf)[..., None]).exp_()
        outs.append(weights @ v)
        sums.append(lse)
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, dim) for parts, dim in ((outs, -2), (sums, -1)))
    return out.flatten(-4, -3), lse.flatten(-3, -2)


def _reference_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: BlockRule
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _grouped(*inputs)
    grouped = q.shape[-4:-2]
    grad, out, lse = (torch.unflatten(x, dim, grouped) for x, dim in ((grad, -3), (merged[0], -3), (merged[1], -2)))
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    tiles, d_k, d_v = _tiles(q, k), torch.zeros_like(k), torch.zeros_like(v)
    d_q = _skipped(q, tiles, q.shape[-1])
    for rows in tiles:
        queries, above = q[..., rows, :], grad[..., rows, :]
        weights = (_scores(queries, k, rule, rows) - lse[..., rows, None]).exp_()
        d_v += (weights.transpose(-1, -2) @ above).sum(-3, keepdim=True)
        inner = (above * out[..., rows, :]).sum(-1, keepdim=True)
        d_scores = weights.mul_(above @ v.transpose(-1, -2) - inner).mul_(rule.scale)
        d_q.append(d_scores @ k)
        d_k += (d_scores.transpose(-1, -2) @ queries).sum(-3, keepdim=True)
    return torch.cat(d_q, -2).flatten(-4, -3), d_k.squeeze(-3), d_v.squeeze(-3)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [.., H, G/H, Q, D], and keys and values [.., H, 1, K, D], at least in fp32."""
    if q.dtype in _HALF:
        q, k, v = q.float(), k.float(), v.float()
    return torch.unflatten(q, -3, (k.shape[-3], -1)), k.unsqueeze(-3), v.unsqueeze(-3)


def _tiles(q: Tensor, k: Tensor) -> list[slice]:
    """Returns the tiles of queries; on shapes only the last ones, where the results of the others live as well."""
    length, across = q.shape[-2], math.prod(q.shape[:-2]) * k.shape[-2]
    rows = max(1, _TILE // max(across, 1))
    starts = range(0, length, rows)
    return [slice(start, min(start + rows, length)) for start in (starts[-_ON_SHAPES:] if _on_shapes(q) else starts)]


def _skipped(q: Tensor, tiles: list[slice], *width: int) -> list[Tensor]:
    """Returns memory for the results of the queries before the first tile, if there are any."""
    queries = tiles[0].start if tiles else 0
    return [q.new_empty((*q.shape[:-2], queries, *width))] if queries else []


def _scores(q: Tensor, k: Tensor, rule: BlockRule, rows: slice) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(rule.scale)
    if rule.causal:
        places = torch.arange(rows.start, rows.stop, device=q.device)
        return scores.masked_fill_(places[:, None] < torch.arange(k.shape[-2], device=q.device), -math.inf)
    mask = rule.mask
    if mask is None:
        return scores
    mask = _of_heads(mask, q, rows)
    if mask.dtype is torch.bool:
        return scores.masked_fill_(~mask, -math.inf)
    scores = scores + mask
    if rule.unseeing is None:
        return scores
    # such scores are all the same number, next to which the logarithm in a log-sum-exp would vanish
    return scores.masked_fill_(_of_heads(rule.unseeing, q, rows) & mask.isfinite(), 0.0)


def _of_heads(mask: Tensor, q: Tensor, rows: slice) -> Tensor:
    """Returns the rows of a mask in the shape of scores [.., H, G/H, Q, K]."""
    mask = mask[..., rows, :] if mask.shape[-2] != 1 else mask
    if mask.ndim < 3:
        return mask
    return torch.unflatten(mask, -3, q.shape[-4:-2]) if mask.shape[-3] != 1 else mask.unsqueeze(-3)
