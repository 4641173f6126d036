"""Attention of a rank's queries over keys that arrive in parcels: one softmax, merged by log-sum-exps.

Saved for backward: queries, keys and values of this rank, output and log-sum-exp. Nothing of the full length is stored.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.ops.attention_block import BlockRule, attend, attend_backward
from engine.parallel.context.key_flow import KeyFlow
from engine.parallel.context.recut import take
from engine.parallel.context.sight import SeenBlock, all_keys, causal_blocks, unseeing_queries
from engine.parallel.tensor.collectives import refuse_second_derivatives
from engine.parallel.tensor.global_tensor.index_runs import Runs


class KeyAttention(NamedTuple):
    """Attention of this rank's queries over keys of all ranks; causal, or with the mask passed to ``attend_keys``."""

    queries: Runs
    """Positions of the queries."""
    flow: KeyFlow
    causal: bool
    scale: float

    def rules(self, number: int, rows: Tensor | None, unseeing: Tensor | None) -> Iterator[tuple[SeenBlock, BlockRule]]:
        """Yields the blocks of queries and visible keys in parcel ``number``, each with its rule.

        ``rows``: mask of this rank's queries, [.., queries or 1, keys of all ranks or 1]. ``unseeing``: queries from
        which it hides all keys.
        """
        keys = self.flow.parcels[number].keys
        if rows is not None and rows.shape[-1] != 1:
            rows = take(rows, (*(None,) * (rows.ndim - 1), keys))
        for block in causal_blocks(self.queries, keys) if self.causal else all_keys(self.queries, keys):
            yield block, BlockRule(self.scale, block.causal, rows, unseeing)


def attend_keys(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, attention: KeyAttention) -> Tensor:
    """Returns attention's output [.., G, Q, E] for this rank's queries [.., G, Q, D] over keys of all ranks.

    k [.., H, K, D] and v [.., H, K, E] belong to this rank; ``attention.flow`` exchanges them over its axis, again in
    backward. ``rows``: mask of this rank's queries, without a gradient.
    """
    if casts_for_autocast(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if x.dtype is not torch.float64 else x for x in (q, k, v))
    out: Tensor = _Attention.apply(q, k, v, rows, attention)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and out.requires_grad:
        attention.flow.expect_backward(k, out)
    return out


def casts_for_autocast(x: Tensor) -> bool:
    """Returns True if autocast casts the inputs of attention on the device of ``x``."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class _Merged:
    """Output and log-sum-exp over the blocks so far, at least in fp32."""

    def __init__(self, q: Tensor, width: int) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:-1], width), dtype=dtype)
        self.lse = q.new_full(q.shape[:-1], -math.inf, dtype=dtype)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges the output and log-sum-exp of a block of queries."""
        before = self.lse[..., rows]
        both = torch.logaddexp(before, lse.to(before.dtype))
        base = both.masked_fill(both == -math.inf, math.inf)  # a query that has seen no key yet
        self.out[..., rows, :].mul_((before - base).exp_()[..., None])
        self.out[..., rows, :].add_(out.to(self.out.dtype) * (lse - base).exp_()[..., None])
        self.lse[..., rows] = both


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, attention: KeyAttention) -> Tensor:
        merged, widths = _Merged(q, v.shape[-1]), [k.shape[-1], v.shape[-1]]
        unseeing = None if rows is None else unseeing_queries(rows)
        with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):
            for number, parcel in attention.flow.bring(torch.cat((k, v), -1)):
                keys, values = torch.split(parcel, widths, -1)
                for block, rule in attention.rules(number, rows, unseeing):
                    part = (q[..., block.queries, :], keys[..., block.keys, :], values[..., block.keys, :])
                    merged.add(block.queries, *attend(*part, rule))
        out = merged.out.to(q.dtype)
        ctx.attention = attention
        ctx.save_for_backward(q, k, v, rows, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        refuse_second_derivatives()
        attention: KeyAttention = ctx.attention
        q, k, v, rows, out, lse = ctx.saved_tensors
        widths, local = [k.shape[-1], v.shape[-1]], torch.cat((k, v), -1)
        unseeing = None if rows is None else unseeing_queries(rows)
        d_q, home = torch.zeros_like(q, dtype=lse.dtype), []
        for number, parcel in attention.flow.bring(local):
            keys, values = torch.split(parcel, widths, -1)
            d_parcel = torch.zeros_like(parcel, dtype=lse.dtype)
            for block, rule in attention.rules(number, rows, unseeing):
                at, of = block.queries, block.keys
                given = (q[..., at, :], keys[..., of, :], values[..., of, :])
                merged = (out[..., at, :], lse[..., at])
                parts = attend_backward(grad[..., at, :], given, merged, rule)
                d_q[..., at, :] += parts[0]
                d_parcel[..., of, :] += torch.cat(parts[1:], -1)
            home.append(attention.flow.take_home(number, d_parcel.to(local.dtype)))
        total = torch.zeros_like(local, dtype=lse.dtype)
        for made, wait in home:
            wait()
            total += made
        d_k, d_v = torch.split(total.to(local.dtype), widths, -1)
        return d_q.to(q.dtype), d_k, d_v, None, None
