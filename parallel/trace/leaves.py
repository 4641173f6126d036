"""torch's trees of arguments and results, with a short way for tuples, lists and dicts.

A trace takes the arguments and the result of every operation apart several times. torch's own ``tree_map`` looks each
leaf up in its registry of containers, and takes a third of the time of a trace with that.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_LEAVES = frozenset((int, float, bool, str, type(None)))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` of every leaf, as ``torch.utils._pytree.tree_map`` gives it."""
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, Tensor):
        return function(tree)
    if kind is tuple:
        return tuple([map_leaves(function, item) for item in tree])
    if kind is list:
        return [map_leaves(function, item) for item in tree]
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):  # whose class may check what it holds (PackedSequence)
        return tuple.__new__(kind, [map_leaves(function, item) for item in tree])
    return tree_map(function, tree)


def plain_leaves(tree: Any) -> list[Any]:
    """The leaves of ``tree`` in the order of ``torch.utils._pytree.tree_leaves``."""
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, Tensor):
        return [tree]
    if kind is tuple or kind is list:
        return [leaf for item in tree for leaf in plain_leaves(item)]
    if kind is dict:
        return [leaf for item in tree.values() for leaf in plain_leaves(item)]
    return tree_leaves(tree)
