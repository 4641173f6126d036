"""Part of a call of flex attention: some rows, heads and queries of all, over all keys.

The functions of a mask and of scores read places of the full tensors, so a part reads them through tables. Blocks of a
mask are rows of its table where the part has whole blocks of queries; elsewhere a block is the union of the blocks
that it overlaps, and the function reads the kind of the block at each place.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.ops.flex_attention import FULL, PARTIAL, FlexCall, Modifier, block_kinds, build_block_mask
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, LocalOnlyError
from engine.parallel.tensor.global_tensor.index_runs import Runs, indices_of, run_length


class FlexPart(NamedTuple):
    """Part of a flex attention call on one rank: int32 indices of batch rows, heads and queries; None: all."""

    rows: Tensor | None = None
    heads: Tensor | None = None
    queries: Tensor | None = None
    runs: Runs | None = None
    """Runs of ``queries``, known to the host."""

    @staticmethod
    def of(
        device: torch.device, rows: Runs | None = None, heads: Runs | None = None, queries: Runs | None = None
    ) -> "FlexPart":
        """Returns the part of a flex attention call with the given indices of batch rows, heads and queries.

        Each argument is an array [m, 2] of ranges (first, last + 1); None means all indices.
        """

        def table(runs: Runs | None) -> Tensor | None:
            return None if runs is None else torch.as_tensor(indices_of(runs), dtype=torch.int32, device=device)

        return FlexPart(table(rows), table(heads), table(queries), queries)

    def call(self, whole: FlexCall, mask: Any) -> FlexCall:
        """Returns the call ``whole`` restricted to this part; its score function gets indices of the full tensors.

        ``mask``: block mask of this part, or None.
        """
        score = whole.score_mod
        return replace(whole, score_mod=None if score is None else self._through(score, scored=True), block_mask=mask)

    def mask(self, whole: Any) -> Any:
        """Returns this part's block mask, cut from ``whole``, the block mask of the full call; None if ``whole`` is
        None.
        """
        if whole is None:
            return None
        listed = [whole.kv_num_blocks, whole.kv_indices, whole.full_kv_num_blocks, whole.full_kv_indices]
        for dim, table in enumerate((self.rows, self.heads)):
            listed = [_picked(one, dim, table) for one in listed]
        function, lengths = self._through(whole.mask_mod, scored=False), whole.seq_lengths
        if self.runs is None and listed[0] is whole.kv_num_blocks:  # equal blocks for all heads, found once
            made = copy(whole)
            made.mask_mod = function
            return made
        if self.runs is not None:
            lengths = (run_length(self.runs), lengths[1])
            blocks = _whole_blocks(self.runs, whole.BLOCK_SIZE[0])
            if blocks is None:
                listed, function = self._united(whole, function)
            else:
                lines = torch.as_tensor(blocks, device=listed[0].device)
                listed = [_picked(one, 2, lines) for one in listed]
        return build_block_mask(type(whole), listed, whole.BLOCK_SIZE, function, lengths)

    def _places(self, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        return tuple(place if table is None else table[place] for place, table in zip((b, h, q), self[:3], strict=True))

    def _through(self, modifier: Modifier, scored: bool) -> Modifier:
        """Returns ``modifier``, which is called with places of the part.

        Raises:
            LocalOnlyError: it reads a sharded tensor.
        """
        if any(type(one) is GlobalTensor for one in _captured(modifier)):
            raise LocalOnlyError(
                "a function of flex attention's mask or scores reads a tensor that is sharded over ranks, but it needs "
                'the full tensor; compute it from the batch or from parameters, or set the style "replicate" for the '
                "module that makes it in parallel.tensor_plan."
            )

        def on_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return modifier(score, *self._places(b, h, q), k)

        def on_places(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return modifier(*self._places(b, h, q), k)

        return on_score if scored else on_places

    def _united(self, mask: Any, visible: Modifier) -> tuple[list[Tensor], Modifier]:
        """Returns the lists of blocks where a block of queries overlaps several ones of the whole, and the function."""
        height, width = mask.BLOCK_SIZE
        kinds = whole = block_kinds(mask)
        for dim, table in enumerate((self.rows, self.heads)):
            kinds = _picked(kinds, dim, table)
        queries = self.queries
        assert queries is not None, "the caller has checked it"
        member = torch.zeros((-(-len(queries) // height), kinds.shape[2]), device=kinds.device)
        member[torch.arange(len(queries), device=kinds.device) // height, (queries // height).long()] = 1.0
        seen, bounded = (member @ (kinds != kind).float() for kind in (0, FULL))
        full = bounded == 0

        def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row, head, query = self._places(b, h, q)
            row, head = (one if size > 1 else one * 0 for one, size in zip((row, head), whole.shape[:2], strict=True))
            kind = whole[row, head, query // height, k // width]
            return (kind == FULL) | ((kind == PARTIAL) & visible(b, h, q, k))

        return [*_listed((seen > 0) & ~full), *_listed(full)], function


def _picked(listed: Any, dim: int, table: Tensor | None) -> Any:
    """Returns the entries of a list of blocks; a dim of size one is equal for all."""
    if listed is None or table is None or (dim < 2 and listed.shape[dim] == 1):
        return listed
    return listed.index_select(dim, table)


def _captured(function: Any) -> Iterator[Any]:
    """Yields the values in the closure of a function, and of functions in it."""
    for cell in getattr(function, "__closure__", None) or ():
        yield cell.cell_contents
        yield from _captured(cell.cell_contents)


def _whole_blocks(runs: Runs, height: int) -> list[int] | None:
    """Returns the blocks of ``height`` queries in ``runs``; None if a block is not whole."""
    blocks = list[int]()
    for number, (first, last) in enumerate(runs.tolist()):
        if first % height or (number < len(runs) - 1 and last % height):
            return None
        blocks += range(first // height, -(-last // height))
    return blocks


def _listed(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of marked columns of each row, and the columns, the marked ones first, as int32."""
    counts = marked.sum(-1, dtype=torch.int32)
    return counts, marked.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices.int()
