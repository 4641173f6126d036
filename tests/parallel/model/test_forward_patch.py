"""Patches go on from inside to outside, come off in the opposite order, and spare what others have put there."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Other(Block):
    """A class to change to."""


def wrapped(module: nn.Module, factor: float) -> Any:
    own = module.forward
    return lambda x: own(x) * factor


def test_patches_run_from_outside_to_inside_and_come_off() -> None:
    block, patches, x = Block(), ForwardPatches(), torch.randn(3, 2)
    plain, attributes = block(x), dict(vars(block))
    patches.replace_forward(block, PatchLayer.KERNEL, lambda self, x: self.inner(x) + 1, "adds one")
    patches.wrap_forward(block, PatchLayer.FP32, wrapped(block, 2), "doubles")
    assert torch.equal(block(x), (plain + 1) * 2)
    with patches.changing(block, PatchLayer.RECOMPUTE, "is another class"):
        block.__class__ = Other
        object.__setattr__(block, "mark", 1)
    hook = block.register_forward_hook(lambda *_: None)
    patches.hook(block, PatchLayer.RANDOM, hook, "hooks")
    assert [patch.note for patch in patches.around(block)] == ["adds one", "doubles", "is another class", "hooks"]
    patches.remove()
    assert type(block) is Block and vars(block) == attributes and not block._forward_hooks
    assert torch.equal(block(x), plain) and not patches.around(block)


def test_a_patch_inside_one_that_is_there_is_a_mistake() -> None:
    block, patches = Block(), ForwardPatches()
    patches.wrap_forward(block, PatchLayer.RECOMPUTE, wrapped(block, 1), "outside")
    with pytest.raises(AssertionError, match="KERNEL is put on a Block after RECOMPUTE"):
        patches.wrap_forward(block, PatchLayer.KERNEL, wrapped(block, 1), "inside")


def test_what_somebody_else_has_put_over_a_patch_stays() -> None:
    block, patches = Block(), ForwardPatches()
    patches.wrap_forward(block, PatchLayer.FP32, wrapped(block, 2), "doubles")
    theirs = wrapped(block, 3)
    object.__setattr__(block, "forward", theirs)
    patches.remove()
    assert vars(block)["forward"] is theirs


def test_a_copy_of_a_replaced_forward_belongs_to_the_copy() -> None:
    block, patches, x = Block(), ForwardPatches(), torch.randn(3, 2)
    patches.replace_forward(block, PatchLayer.KERNEL, lambda self, x: self.inner(x) + 1, "adds one")
    copied = deepcopy(block)
    with torch.no_grad():
        copied.inner.weight.zero_()
        copied.inner.bias.zero_()
    assert torch.equal(copied(x), torch.ones(3, 2)) and not torch.equal(block(x), torch.ones(3, 2))


def test_calls_of_units_go_to_the_handler() -> None:
    block, patches, x = Block(), ForwardPatches(), torch.randn(3, 2)
    seen: list[str] = []

    def handler(unit: str, forward: Any, args: Any, kwargs: Any) -> Any:
        seen.append(unit)
        return forward(*args, **kwargs)

    plain = block(x)
    Interception(handler=handler, layer=PatchLayer.STAGE, patches=patches).install("blocks.0", block, "is watched")
    assert torch.equal(block(x), plain) and seen == ["blocks.0"]
    assert patches.explain(block, "") == ["the model: is watched"]
    patches.remove()
    assert "forward" not in vars(block)


def failing() -> None:
    raise ValueError("of an undo")


def test_patches_come_off_although_the_removal_of_one_fails() -> None:
    block, patches = Block(), ForwardPatches()
    attributes, removed = dict(vars(block)), list[str]()
    patches.wrap_forward(block, PatchLayer.FP32, wrapped(block, 2), "doubles")
    patches.own(block, PatchLayer.GATHER, partial(removed.append, "first"), "is removed last")
    patches.own(block, PatchLayer.GATHER, failing, "cannot be removed")
    patches.own(block, PatchLayer.GATHER, partial(removed.append, "second"), "is removed first")
    with pytest.raises(ValueError, match="of an undo"):
        patches.remove()
    assert vars(block) == attributes and removed == ["second", "first"]
    patches.remove()
    patches.wrap_forward(block, PatchLayer.KERNEL, wrapped(block, 2), "starts again from inside")


def test_a_change_that_fails_halfway_comes_off() -> None:
    block, patches = Block(), ForwardPatches()
    attributes = dict(vars(block))
    with pytest.raises(ValueError, match="of an undo"), patches.changing(block, PatchLayer.TENSOR, "is another class"):
        block.__class__ = Other
        object.__setattr__(block, "mark", 1)
        failing()
    patches.remove()
    assert type(block) is Block and vars(block) == attributes
