"""Parameters in flat buckets, without an engine."""

from collections.abc import Mapping

import torch
from torch import nn

from engine.zero.flat_buckets import FlatBucket, Ownership, fill, reserve
from engine.zero.layout import FlatLayout


def allocate(
    layout: FlatLayout, parameters: Mapping[str, nn.Parameter], who: Ownership, device: torch.device
) -> tuple[FlatBucket, ...]:
    """Move ``parameters`` into the buckets of ``layout``, which keep their values exactly."""
    buckets = reserve(layout, parameters, who, device)
    for flat in buckets:
        fill(flat)
    return buckets
