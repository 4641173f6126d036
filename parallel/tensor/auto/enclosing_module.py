"""A group of parameters in the innermost module around it: the smaller block on which its strategies are tried.

    block   norm ── self_attn ── + ── norm ── mlp ── +        the whole is proven once, when all groups are decided
                    q k v o                   gate up down
                    └ tried alone             └ tried alone

Such a module gets the arguments that it has in a run of the whole block, and of its outputs those count that reach an
output of the block. What holds of it alone need not hold of the block, whose proof decides.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters, Given, float_leaves
from engine.parallel.tensor.auto.equivalence import BlockReference, exactly
from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight, WholeWeightError
from engine.parallel.tensor.auto.strategies import ShardingStrategy


def enclosing_module(group: CoupledParameters) -> str:
    """Path of the innermost module that holds all modules of the group's shards; empty for the block itself."""
    owners = {tuple(name.split(".")[:-1]) for name in group.cuts}
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))]
    return ".".join(shared[:-1] if owners == {tuple(shared)} else shared)


def group_inside(group: CoupledParameters, path: str) -> CoupledParameters:
    """The same group by the names that its parameters have in the module at ``path``.

    Partial gradients outside the module would be due to a partial gradient of its input, which is wrong there.
    """

    def local(name: str) -> str:
        return name[len(path) + 1 :]

    return replace(
        group,
        row=local(group.row),
        columns=tuple(map(local, group.columns)),
        cuts={local(name): cut for name, cut in group.cuts.items()},
        partial=tuple(local(name) for name in group.partial if is_inside(name, path)),
        beside=tuple(map(local, group.beside)),
        factors=tuple(map(local, group.factors)),
    )


def strategy_outside(way: ShardingStrategy, path: str) -> ShardingStrategy:
    """The same strategy by the names in the block around the module at ``path``."""
    styles = {f"{path}.{name}".rstrip("."): style for name, style in way.styles.items()}
    return way._replace(styles=styles, changes=tuple(f"{path}.{change}" for change in way.changes))


def reference_inside(truth: BlockReference, path: str) -> BlockReference | None:
    """The reference of the module at ``path`` of the block of ``truth``; None if the block does not call it once, or
    if it cannot run on copies of its arguments."""
    try:
        call = _observed(truth, path, truth.givens[-1])  # the shortest: the proof of the block has all of them
        module = truth.block.get_submodule(path)
        return BlockReference(module, [call.given], call.used) if call.used else None
    except WholeWeightError:
        raise
    except Exception as error:  # what code gives its modules may be anything
        if is_own_mistake(error):
            raise
        return None


@dataclass
class _Observed:
    """A call of a module."""

    given: Given = ((), {})
    outputs: list[Any] = field(default_factory=list)
    times: int = 0
    used: Collection[int] = frozenset()
    """Leaves of its output that reach an output of the block; empty if it was not called once."""


def _observed(truth: BlockReference, path: str, given: Given) -> _Observed:
    block = copy.deepcopy(truth.block)
    with exactly(), _watching(block.get_submodule(path)) as call:
        args, kwargs = pytree.tree_map(_copied, given)
        out = block(*args, **kwargs)
        if call.times == 1:
            call.used = _reaching(call.outputs, float_leaves(out, truth.used))
    call.outputs.clear()  # they hold the graph of the block
    return call


@contextmanager
def _watching(module: nn.Module) -> Iterator[_Observed]:
    call = _Observed()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call.times += 1
        call.given = pytree.tree_map(_copied, (args, dict(kwargs)))

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        seen = pytree.tree_map(_named, out)  # what the module itself does with an output is no use of it
        call.outputs = pytree.tree_leaves(seen)
        return seen

    hooks = (module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after))
    try:
        yield call
    finally:
        for hook in hooks:
            hook.remove()


def _copied(leaf: Any) -> Any:
    """An argument with content of its own; no leaf of the graph, so that the block may write into it.

    Raises:
        ValueError: it is a parameter, whose gradient would be missed.
    """
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    if isinstance(leaf, nn.Parameter | LowRankWeight):
        raise ValueError("a parameter is an argument")
    twin = leaf.detach().clone()
    return twin.requires_grad_().clone() if leaf.requires_grad else twin


def _named(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _reaching(leaves: list[Any], outputs: list[Any]) -> frozenset[int]:
    """The places of the leaves of which a float output is a function with a gradient."""
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    total = sum((out.sum() for out in outputs if out.requires_grad), torch.zeros(()))
    if not places or not total.requires_grad:
        return frozenset()
    gradients = torch.autograd.grad(total, [leaves[place] for place in places], allow_unused=True)
    return frozenset(place for place, grad in zip(places, gradients, strict=True) if grad is not None)
