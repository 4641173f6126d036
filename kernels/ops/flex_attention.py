"""torch's ``flex_attention`` as an operator that traces and sharded tensors can follow.

torch compiles flex attention together with its mask and its change of scores, so that neither a trace on shapes nor a
sharded tensor can follow the call:

    GPU       the caller's own function, such as ``torch.compile(flex_attention)``
    CPU       plain torch in tiles of queries, since torch has no backward of flex attention there
    shapes    scaled dot product attention, which stores as much for backward as the kernels do

Shape suffixes: B rows, G query heads, H key heads, Q queries, K keys, D head size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.kernels.device import is_host

Modifier = Callable[..., Tensor]
"""Function of (score, row, head, query, key) that returns a score, or of the four places that returns a bool."""
_SCORES, _LINES = 1 << 22, 64
"""Number of scores that the CPU computes at a time, and the minimum number of queries."""


@dataclass(frozen=True, slots=True)
class FlexCall:
    """Arguments of torch's ``flex_attention`` except queries, keys and values."""

    run: Callable[..., Any]
    """torch's function, or the caller's compiled one."""
    score_mod: Modifier | None = None
    block_mask: Any = None
    """``torch.nn.attention.flex_attention.BlockMask``, or None: all keys are visible."""
    enable_gqa: bool = False
    options: Mapping[str, Any] | None = None
    """Other named arguments of ``run``."""


def attend_flex(q: Tensor, k: Tensor, v: Tensor, call: FlexCall) -> Any:
    """Runs torch's flex attention; returns the output [B, G, Q, E], and statistics if ``call.options`` requests them.

    ``q`` is [B, G, Q, D], ``k`` [B, H, K, D] and ``v`` [B, H, K, E]. Queries without a visible key get zeros.

    Raises:
        EngineError: the mask does not fit ``q`` and ``k``, or the numbers of heads do not match.
    """
    _check(q, k, call)
    if has_torch_function((q, k, v)):
        return handle_torch_function(attend_flex, (q, k, v), q, k, v, call)
    options = dict(call.options or {})
    if q.is_meta or isinstance(q, FakeTensor):
        return _on_shapes(q, k, v, call, options)
    if not is_host(q.device):
        named = {"score_mod": call.score_mod, "block_mask": call.block_mask, "enable_gqa": call.enable_gqa}
        return call.run(q, k, v, **named, **options)
    return _in_tiles(q, k, v, call, options)


def _check(q: Tensor, k: Tensor, call: FlexCall) -> None:
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    if call.block_mask is not None and (places := tuple(call.block_mask.seq_lengths)) != (queries, keys):
        raise EngineError(
            f"flex_attention got {queries} queries and {keys} keys with a mask of {places} places; make the mask for "
            "the full sequence, also where ranks share it."
        )
    if heads % k.shape[1] or (heads != k.shape[1] and not call.enable_gqa):
        raise EngineError(
            f"flex_attention got {heads} query heads and {k.shape[1]} key heads; pass equal numbers, or "
            "enable_gqa=True with a number of key heads that divides the query heads."
        )


def _on_shapes(q: Tensor, k: Tensor, v: Tensor, call: FlexCall, options: Mapping[str, Any]) -> Any:
    out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=call.enable_gqa)
    sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return _with_requested(q, options, out, sums, sums)


def _with_requested(q: Tensor, options: Mapping[str, Any], out: Tensor, lse: Tensor, highest: Tensor) -> Any:
    """Returns the output, alone or with the requested log-sum-exps and maxima [B, G, Q]."""
    asked = options.get("return_aux")
    out = _in_order(out, q)
    if asked is None:
        return (out, lse) if options.get("return_lse") else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse if asked.lse else None, highest if asked.max_scores else None)


def _in_order(out: Tensor, q: Tensor) -> Tensor:
    """Returns the output with its dims in memory in the order of the queries' dims, as the kernels write it."""
    order = sorted(range(q.ndim), key=q.stride, reverse=True)
    return out.permute(order).contiguous().permute(*(order.index(dim) for dim in range(q.ndim)))


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, call: FlexCall, options: Mapping[str, Any]) -> Any:
    times = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(times, 1).expand(len(q), -1, -1, -1) for x in (k, v))
    scale = options.get("scale")
    tiles = _Tiles(keys, values, call, q.shape[-1] ** -0.5 if scale is None else scale)
    lines = max(_LINES, _SCORES // max(1, len(q) * q.shape[1] * k.shape[2]))
    starts = range(0, q.shape[2], lines) or (0,)
    many = len(starts) > 1 and torch.is_grad_enabled()
    made = []
    for start in starts:
        given = q[:, :, start : start + lines], start
        made.append(
            checkpoint(tiles.run, *given, use_reentrant=False, preserve_rng_state=False) if many else tiles.run(*given)
        )
    return _with_requested(q, options, *(torch.cat(each, 2) for each in zip(*made, strict=True)))


class _Tiles(NamedTuple):
    """Attention of a tile of queries over all keys [B, G, K, D] and values [B, G, K, E]."""

    keys: Tensor
    values: Tensor
    call: FlexCall
    scale: float

    def run(self, q: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output [B, G, Q, E], log-sum-exps and largest scores [B, G, Q] of queries from ``start``."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ self.keys.to(wide).transpose(-1, -2) * self.scale
        size = scores.shape
        places = [torch.arange(count, device=q.device) for count in size]
        places[2] += start
        if self.call.score_mod is not None:
            scores = over_places(self.call.score_mod, places, scores).to(wide)
        if self.call.block_mask is not None:
            seen = _visible(self.call.block_mask, places)
            scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        return weights.to(q.dtype) @ self.values, lse, scores.detach().amax(-1)


def over_places(modifier: Modifier, places: Sequence[Tensor], scores: Tensor | None = None) -> Tensor:
    """Calls ``modifier``, a mask or score function, for each row, head, query and key; returns [B, G, Q, K].

    ``places``: four vectors of row, head, query and key indices. ``scores`` [B, G, Q, K]: first argument of a score
    function.
    """
    function, scored = modifier, [] if scores is None else [0]
    for dim in range(3, -1, -1):
        function = torch.vmap(function, (*scored, *(0 if one == dim else None for one in range(4))))
    with _TensorIndices():
        return function(*([] if scores is None else [scores]), *places)


class _TensorIndices(TorchFunctionMode):
    """Mode in which ``x[i, j]`` with 0-dim tensors reads an element for each combination of places."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(place, Tensor) for place in places):
                return torch.ops.aten.index.Tensor(args[0], list(places))
        return func(*args, **(kwargs or {}))


def _visible(mask: Any, places: Sequence[Tensor]) -> Tensor:
    """Returns True [B or 1, G or 1, Q, K] for the visible keys of a block mask."""
    kinds = block_kinds(mask)
    rows, columns = (place // size for place, size in zip(places[2:], mask.BLOCK_SIZE, strict=True))
    kinds = kinds[:, :, rows][..., columns]
    return (kinds == FULL) | ((kinds == PARTIAL) & over_places(mask.mask_mod, places))


def build_block_mask(
    kind: Any, listed: Sequence[Any], block: tuple[int, int], mask_mod: Modifier, lengths: tuple[int, int]
) -> Any:
    """Returns a torch ``BlockMask`` of the class ``kind`` from lists of its blocks.

    Args:
        listed: four int32 tensors: counts [B, H, rows] and column indices [B, H, rows, n] of the partial blocks, then
            of the full blocks.
        block: size of a block, (queries, keys).
        mask_mod: mask function inside partial blocks.
        lengths: numbers of queries and keys.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return kind.from_kv_blocks(*listed, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=lengths)


PARTIAL, FULL = 1, 2
"""Kinds of blocks of a mask: the mask's function decides, or every key is visible; 0: none is."""


def block_kinds(mask: Any) -> Tensor:
    """Returns the kind of each block of ``mask``, a torch ``BlockMask``, int8 [B or 1, G or 1, query blocks, key
    blocks].

    The kinds are 0 (no key is visible), ``PARTIAL`` (the mask function decides) and ``FULL`` (every key is visible).
    """
    kinds = _blocks(mask.kv_num_blocks, mask.kv_indices) * PARTIAL
    if mask.full_kv_num_blocks is None:
        return kinds
    return kinds.masked_fill(_blocks(mask.full_kv_num_blocks, mask.full_kv_indices).bool(), FULL)


def _blocks(counts: Tensor, columns: Tensor) -> Tensor:
    """Returns 1 [.., rows, columns] for the first ``counts`` [.., rows] of the listed ``columns`` [.., rows, n]."""
    size = columns.shape[-1]
    listed = torch.arange(size, device=columns.device) < counts[..., None]
    marked = torch.zeros((*columns.shape[:-1], size + 1), dtype=torch.int8, device=columns.device)
    return marked.scatter_(-1, torch.where(listed, columns, size).long(), 1)[..., :size]
