"""What dtype an operation gives under autocast.

Autocast looks at the device of its arguments and passes meta tensors by. So the operation runs once more on
FakeTensors, which say they are on the run device; what comes out names the dtypes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


def cast_like_autocast(device: torch.device, run: Callable[[Any], Any], arguments: Any) -> Any:
    """``run(arguments)`` on meta tensors, with the dtypes that autocast would give on ``device``."""
    mode = FakeTensorMode()

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shown: Tensor = FakeTensor(mode, leaf.detach(), device)
        return shown.requires_grad_(leaf.requires_grad)

    fakes = tree_map(fake, arguments)  # outside the mode, which takes nothing but its own
    with mode:
        shown, spec = tree_flatten(run(tree_map(_inner, fakes)))
    try:
        plain = tree_leaves(run(arguments))
    except RuntimeError:  # dtypes that only autocast brings together
        plain = shown
    return tree_unflatten([_cast(leaf, like) for leaf, like in zip(plain, shown, strict=True)], spec)


def _inner(fake: Any) -> Any:
    """No leaf of the graph, which could not be written in place."""
    return fake.clone() if isinstance(fake, FakeTensor) and fake.requires_grad else fake


def _cast(leaf: Any, like: Any) -> Any:
    if not isinstance(like, Tensor):
        return like
    if leaf is not like:
        return leaf if leaf.dtype == like.dtype else leaf.to(like.dtype)
    size, stride = tuple(like.shape), like.stride()
    return torch.empty_strided(size, stride, dtype=like.dtype, device="meta").requires_grad_(like.requires_grad)
