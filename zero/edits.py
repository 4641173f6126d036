"""What the user writes into bf16 parameters between steps reaches the fp32 masters.

``load_state_dict`` after ``initialize``, an averaged model swapped in, a clamp: all write into the
parameters, and the next update would overwrite them from the masters without a word. A parameter that
nobody wrote to is its master rounded, so comparing the two finds every written element, and leaves the
master of all others exactly as it was.
"""

import torch

from engine.zero.storage import FlatBucket


@torch.no_grad()
def carry_over(flat: FlatBucket) -> None:
    """Take written elements into the part of the master that this rank holds. No host synchronization."""
    if flat.master is None:
        return
    written = flat.kept != flat.master.to(flat.kept.dtype)
    torch.where(written, flat.kept.to(flat.master.dtype), flat.master, out=flat.master)
