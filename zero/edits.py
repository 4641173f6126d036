"""Notices when the user writes into parameters between steps, so that fp32 masters follow.

``load_state_dict`` after ``initialize``, an averaged model swapped in, a clamp: they all write into the
bf16 parameters, and the next update would overwrite them from the masters without a word. Such writes
raise the parameter's version counter; ours do not, because they go through the flat bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.zero.layout import Slot
from engine.zero.storage import FlatBucket


@dataclass(slots=True)
class _Watched:
    flat: FlatBucket
    slot: Slot
    parameter: nn.Parameter
    version: int


class EditWatch:
    """Carries the user's in-place writes from parameters to the masters of this rank."""

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        self._watched = [
            _Watched(flat, slot, parameter, parameter._version)
            for flat in buckets
            if flat.master is not None
            for slot, parameter in zip(flat.bucket.slots, flat.parameters, strict=True)
        ]

    @torch.no_grad()
    def carry_over(self) -> None:
        """Copy every parameter that was written since the last call into the part of its master held here."""
        for watched in self._watched:
            if watched.parameter._version == watched.version:
                continue
            watched.version = watched.parameter._version
            flat, owned = watched.flat, watched.flat.owned
            start, stop = max(watched.slot.start, owned.start), min(watched.slot.stop, owned.stop)
            if flat.master is not None and start < stop:
                flat.master[start - owned.start : stop - owned.start].copy_(flat.params[start:stop])
