"""Attention of a rank's queries over keys that arrive in parcels: one softmax, merged by log-sum-exps.

Saved for backward: queries, keys and values of this rank, output and log-sum-exp. Nothing of the full length is stored.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.ops.attention_block import BlockRule, attend, attend_backward
from engine.parallel.comm.backend import Wait
from engine.parallel.context.key_flow import KeyFlow
from engine.parallel.context.recipe import TensorRecipe, mask_block, seen_lines
from engine.parallel.context.recut import take
from engine.parallel.context.sight import SeenBlock, all_keys, causal_blocks, unseeing_queries
from engine.parallel.tensor.collectives import refuse_second_derivatives
from engine.parallel.tensor.global_tensor.index_runs import Runs, indices_of


class KeyAttention(NamedTuple):
    """Attention of this context rank's queries over the keys of all ranks, with a causal mask or a given mask."""

    queries: Runs
    """Positions of the queries."""
    flow: KeyFlow
    causal: bool
    scale: float

    def rules(self, number: int, rows: Tensor | None, unseeing: Tensor | None) -> Iterator[tuple[SeenBlock, BlockRule]]:
        """Yields each block of queries and keys with its rule (scale and mask), for the keys received in communication
        ``number``, counted from 0.

        Blocks without visible keys are omitted. ``rows``: mask of this rank's queries, [.., queries or 1, keys of all
        ranks or 1]; None: no mask. ``unseeing``: bool, True for queries that see no key.
        """
        keys = self.flow.parcels[number].keys
        if type(rows) is TensorRecipe and rows.shape[-1] != 1:
            yield from self._by_lines(keys, rows, unseeing)
            return
        if rows is not None and rows.shape[-1] != 1:
            rows = take(rows, (*(None,) * (rows.ndim - 1), keys))
        for block in causal_blocks(self.queries, keys) if self.causal else all_keys(self.queries, keys):
            yield block, BlockRule(self.scale, block.causal, rows, unseeing)

    def _by_lines(
        self, keys: Runs, rows: TensorRecipe, unseeing: Tensor | None
    ) -> Iterator[tuple[SeenBlock, BlockRule]]:
        """Yields blocks of a few queries and the keys that they see, each with its part of the mask."""
        places = torch.as_tensor(indices_of(keys), device=rows.device)
        runs = (self.queries[:, 1] - self.queries[:, 0]).tolist()
        for lines, seen in seen_lines(rows, runs, places, keys.tobytes()):
            if seen is not None:
                hidden = unseeing if unseeing is None or rows.shape[-2] == 1 else unseeing[..., lines, :]
                yield (
                    SeenBlock(lines, seen),
                    BlockRule(self.scale, False, mask_block(rows, lines, places[seen]), hidden),
                )


def attend_keys(q: Tensor, pairs: Tensor, rows: Tensor | None, attention: KeyAttention) -> Tensor:
    """Returns attention's output [.., G, Q, E] for this rank's queries ``q`` [.., G, Q, D] over the keys of all ranks.

    G, H: heads of queries and of keys. Q, K: their positions. D, E: sizes of a key and of a value.

    ``pairs`` [.., H, K, D + E]: this rank's keys, each concatenated with its value. ``rows``: mask of this rank's
    queries, without a gradient; None: no mask. ``attention``: causality, scale, and order in which keys are received.
    Backward receives the keys of other ranks again.
    """
    if casts_for_autocast(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, pairs = (x.to(dtype) if x.dtype is not torch.float64 else x for x in (q, pairs))
    out: Tensor = _Attention.apply(q, pairs, rows, attention)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and out.requires_grad:
        attention.flow.expect_backward(pairs, out)
    return out


def casts_for_autocast(x: Tensor) -> bool:
    """Returns True if autocast on the device of ``x`` casts the inputs of attention; False for meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class _Merged:
    """Output and log-sum-exp over the blocks so far, at least in fp32; a single block of all queries is not copied."""

    def __init__(self, q: Tensor, width: int) -> None:
        self._dtype, self._width = torch.promote_types(q.dtype, torch.float32), width
        self._q = q
        self._written: list[slice] = []
        self._end = 0
        self._made: tuple[Tensor, Tensor] | None = None

    @property
    def made(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; zero and -inf for queries without a block."""
        if self._made is None:
            out = self._q.new_zeros((*self._q.shape[:-1], self._width), dtype=self._dtype)
            self._made = out, self._q.new_full(self._q.shape[:-1], -math.inf, dtype=self._dtype)
        return self._made

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges the output and log-sum-exp of a block of queries."""
        after = rows.start >= self._end  # the usual case, in a constant time
        fresh = after or all(rows.stop <= one.start or one.stop <= rows.start for one in self._written)
        self._written.append(rows)
        self._end = max(self._end, rows.stop)
        if self._made is None and out.shape[-2] == self._q.shape[-2]:
            self._made = out, lse
            return
        total, sums = self._made = tuple(x.to(self._dtype) for x in self.made)  # type: ignore[assignment]
        if fresh:
            total[..., rows, :], sums[..., rows] = out, lse
            return
        before = sums[..., rows]
        both = torch.logaddexp(before, lse.to(before.dtype))
        base = both.masked_fill(both == -math.inf, math.inf)  # a query that has seen no key yet
        total[..., rows, :].mul_((before - base).exp_()[..., None])
        total[..., rows, :].add_(out.to(total.dtype) * (lse - base).exp_()[..., None])
        sums[..., rows] = both


class _RowSum:
    """Sum of blocks of rows [.., S, D]; a single block of all rows is not copied."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._made: Tensor | None = None

    @property
    def made(self) -> Tensor:
        """Sum of the blocks so far; zero for rows without one."""
        return torch.zeros_like(self._like, dtype=self._dtype) if self._made is None else self._made

    def add(self, rows: slice, part: Tensor) -> None:
        """Adds a block."""
        if self._made is None and part.shape[-2] == self._like.shape[-2]:
            self._made = part
            return
        self._made = self.made.to(self._dtype)
        self._made[..., rows, :] += part


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, pairs: Tensor, rows: Tensor | None, attention: KeyAttention) -> Tensor:
        widths = [q.shape[-1], pairs.shape[-1] - q.shape[-1]]
        merged = _Merged(q, widths[1])
        unseeing = _unseeing(rows)
        with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):
            for number, parcel in attention.flow.bring(pairs):
                keys, values = torch.split(parcel, widths, -1)
                for block, rule in attention.rules(number, rows, unseeing):
                    part = (q[..., block.queries, :], keys[..., block.keys, :], values[..., block.keys, :])
                    merged.add(block.queries, *attend(*part, rule))
        out, lse = merged.made
        out = out.to(q.dtype)
        ctx.attention, ctx.recipe = attention, rows if type(rows) is TensorRecipe else None
        ctx.save_for_backward(q, pairs, None if ctx.recipe is not None else rows, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_derivatives("cp")
        attention: KeyAttention = ctx.attention
        q, pairs, rows, out, lse = ctx.saved_tensors
        rows = rows if ctx.recipe is None else ctx.recipe
        widths = [q.shape[-1], pairs.shape[-1] - q.shape[-1]]
        unseeing = _unseeing(rows)
        d_q, home = _RowSum(q, lse.dtype), []
        for number, parcel in attention.flow.bring(pairs):
            keys, values = torch.split(parcel, widths, -1)
            sums = [_RowSum(x, lse.dtype) for x in (keys, values)]
            for block, rule in attention.rules(number, rows, unseeing):
                at, of = block.queries, block.keys
                given = (q[..., at, :], keys[..., of, :], values[..., of, :])
                merged = (out[..., at, :], lse[..., at])
                d_block, *parts = attend_backward(grad[..., at, :], given, merged, rule)
                d_q.add(at, d_block)
                for total, part in zip(sums, parts, strict=True):
                    total.add(of, part)
            d_parcel = torch.cat([total.made.to(pairs.dtype) for total in sums], -1)
            home.append(attention.flow.take_home(number, d_parcel))
        return d_q.made.to(q.dtype), _summed_parcels(home, lse.dtype).to(pairs.dtype), None, None


def _unseeing(rows: Tensor | None) -> Tensor | None:
    """Returns the queries that see no key, as :func:`unseeing_queries`; a recipe is made in parts."""
    if type(rows) is not TensorRecipe or rows.dtype is torch.bool:
        return None if rows is None else unseeing_queries(rows)
    blocks = seen_lines(rows, (rows.shape[-2],))
    found = [unseeing_queries(mask_block(rows, block.lines, None)) for block in blocks]
    return torch.cat([one for one in found if one is not None], -2)


def _summed_parcels(home: Sequence[tuple[Tensor, Wait]], dtype: torch.dtype) -> Tensor:
    """Waits for this rank's gradients from all parcels; returns their sum."""
    (first, wait), *others = home
    wait()
    for made, wait in others:
        wait()
        first = first.to(dtype).add_(made)
    return first
