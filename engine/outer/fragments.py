"""Fragments of a model, which are pushed at different steps (Streaming DiLoCo, arXiv 2501.18512), and their stores.

Blocks are strided over the fragments; every other tensor joins the lightest fragment. Each fragment is divided over the
stores by size. The division depends on names and shapes only, so all sites and stores compute the same one.

    rows        embed.weight   layers.0.*   layers.1.*   layers.2.*   layers.3.*   head.weight
    fragment         0             0            1            0            1             1

A block is an element of a numbered list with at least two elements of equal names and shapes; inside a block, lists are
ignored (experts).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Rows = Sequence[tuple[str, tuple[int, ...]]]
"""Name and shape of each trainable tensor, in the order of the model."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Group of whole tensors, all on one store, that training sites push and merge together."""

    index: int
    """Number of the fragment; its parts on all stores have the same number."""
    store: int
    names: tuple[str, ...]
    """Names of the tensors, in the order of the model."""
    elements: int


def divide(rows: Rows, fragments: int, stores: int = 1) -> tuple[Fragment, ...]:
    """Divides the trainable tensors of a model into ``fragments`` groups, and each group over ``stores`` stores.

    Returns the parts, ordered by group and then by store. A small group has no part on some stores.

    Args:
        rows: (name, shape) of each trainable tensor, in the order of the model.
        fragments: number of groups.
        stores: number of stores.

    Raises:
        ValueError: a name occurs twice, there are more fragments than tensors, or there is no store.
    """
    sizes = {name: prod(shape) for name, shape in rows}
    if len(sizes) < len(rows):
        twice, _ = Counter(name for name, _ in rows).most_common(1)[0]
        raise ValueError(f"the tensor {twice!r} occurs more than once, and has one fragment; name each tensor once.")
    if not 1 <= fragments <= len(rows):
        raise ValueError(
            f"the outer loop has {fragments:,} fragments, and the model has {len(rows):,} trained tensors; "
            f"give from 1 to {len(rows):,} fragments."
        )
    if stores < 1:
        raise ValueError(f"the outer loop has {stores} stores, and needs at least 1; give their number.")
    block_of = _blocks(rows)
    order = {block: at for at, block in enumerate(dict.fromkeys(block_of.values()))}
    fixed = {name: order[block] % fragments for name, block in block_of.items()}
    groups = _spread(sizes, fragments, fixed)
    if not all(groups):  # fewer blocks than fragments
        groups = _spread(sizes, fragments, {})
    return tuple(_over_stores(groups, sizes, stores))


def due(step: int, period: int, fragments: int, index: int) -> bool:
    """Returns True if fragment (group of tensors) ``index`` is due to be sent to the store after ``step`` steps.

    Each of the ``fragments`` fragments is due every ``period`` steps; no two are due after the same step.

    Raises:
        ValueError: ``period`` is smaller than ``fragments``, or ``index`` is out of range.
    """
    if not 0 <= index < fragments:
        raise ValueError(f"there is no fragment {index} among {fragments}; count them from 0 to {fragments - 1}.")
    if period < fragments:
        raise ValueError(
            f"a period of {period} steps has {fragments} fragments, and a step pushes one fragment at most; "
            f"give a period of at least {fragments} steps, or fewer fragments."
        )
    return step > 0 and (step - index * period // fragments) % period == 0


def _blocks(rows: Rows) -> dict[str, str]:
    """Returns the block of each tensor that is inside one, by name: the element of the outermost chain around it."""
    kinds: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(list))
    for name, shape in rows:
        for chain, number, inner in _elements(name):
            kinds[chain][number].append((inner, shape))
    chains = {chain for chain, elements in kinds.items() if max(Counter(map(tuple, elements.values())).values()) > 1}
    found: dict[str, str] = {}
    for name, _ in rows:
        block = next((f"{chain}{number}" for chain, number, _ in _elements(name) if chain in chains), None)
        if block is not None:
            found[name] = block
    return found


def _elements(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields the numbers in ``name``, outermost first: the name before, the number, and the name after.

    A name may not end in its number: the tensors of a ParameterList are no blocks.
    """
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdecimal():
            yield "".join(f"{one}." for one in parts[:at]), part, ".".join(parts[at + 1 :])


def _spread(sizes: Mapping[str, int], count: int, fixed: Mapping[str, int]) -> list[list[str]]:
    """Returns ``count`` groups of names, in the order of the model.

    Names in ``fixed`` have their group. The others follow from the largest to the smallest, each into the group with
    the fewest elements, and among equals into the one with the fewest tensors.
    """
    loads = [(0, 0)] * count
    group_of = dict(fixed)
    for name, group in fixed.items():
        loads[group] = (loads[group][0] + sizes[name], loads[group][1] + 1)
    for name in _largest_first(sizes, (name for name in sizes if name not in fixed)):
        group = min(range(count), key=loads.__getitem__)
        group_of[name] = group
        loads[group] = (loads[group][0] + sizes[name], loads[group][1] + 1)
    groups: list[list[str]] = [[] for _ in range(count)]
    for name in sizes:
        groups[group_of[name]].append(name)
    return groups


def _over_stores(groups: Sequence[Sequence[str]], sizes: Mapping[str, int], stores: int) -> Iterator[Fragment]:
    """Yields the parts of each fragment; among stores with equal parts, the one with the fewest elements is next."""
    totals = [0] * stores
    for index, names in enumerate(groups):
        here = [0] * stores
        store_of: dict[str, int] = {}
        for name in _largest_first(sizes, names):
            store = min(range(stores), key=lambda one: (here[one], totals[one]))
            store_of[name] = store
            here[store] += sizes[name]
            totals[store] += sizes[name]
        for store in sorted(set(store_of.values())):
            yield Fragment(index, store, tuple(name for name in names if store_of[name] == store), here[store])


def _largest_first(sizes: Mapping[str, int], names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: -sizes[name])  # stable: equal sizes stay in the order of the model
