"""Digits of a rank along the data and context axes: shard groups, and groups of ranks that share experts."""

from collections.abc import Iterable
from typing import NamedTuple


class DataParts(NamedTuple):
    """Division of a rank's data index into three mixed-radix digits, and of the context index into two. ``data`` and
    ``context`` list the number of values of each digit, slowest-varying digit first.

    A shard group or a group of experts is a run of neighbouring ranks, which differ only in the fastest digits. Example
    with 8 data ranks, shard groups (axis dp_shard) of 4 and expert groups (axis ep) of 2; ranks along each axis differ
    only in its digits:

        dp = 8, shard_size = 4, experts = 2     outer 2 x middle 2 x inner 2
        dp_shard    middle, inner               dp_replicate    outer
        ep          inner                       edp             outer, middle

    A group of experts takes neighbouring context ranks before data ranks, since context ranks vary faster.
    """

    data: tuple[int, int, int]
    context: tuple[int, int]
    shards: int
    """Number of fastest data digits that ``dp_shard`` has."""
    experts: int
    """Number of fastest data digits that ``ep`` has; it has the fastest context digit too."""

    def digits(self, axis: str, size: int) -> Iterable[tuple[str, int]]:
        """Returns (name, number of values) for each digit of the index along ``axis``, slowest-varying digit first.

        ``size``: number of ranks along ``axis``. Only "dp" and "cp" have several digits.
        """
        if axis == "dp":
            return zip(_DATA_DIGITS, self.data, strict=True)
        return zip(_CONTEXT_DIGITS, self.context, strict=True) if axis == "cp" else ((axis, size),)

    def names(self, axis: str) -> tuple[str, ...]:
        """Returns the digits in which ranks along ``axis`` differ, such as "dp_middle" and "dp_inner" for "dp_shard".

        Only data, context and expert axes are divided into digits.
        """
        data, context = set(_DATA_DIGITS), set(_CONTEXT_DIGITS)
        shard = set(_DATA_DIGITS[3 - self.shards :])
        experts = {*_DATA_DIGITS[3 - self.experts :], _CONTEXT_DIGITS[-1]}
        found = {
            "dp": data, "dp_shard": shard, "dp_replicate": data - shard, "cp": context, "ep": experts,
            "edp": (data | context) - experts, "edp_shard": (shard | context) - experts,
            "edp_replicate": data - shard - experts,
        }.get(axis)  # fmt: skip
        return (axis,) if found is None else tuple(name for name in (*_DATA_DIGITS, *_CONTEXT_DIGITS) if name in found)


_DATA_DIGITS = ("dp_outer", "dp_middle", "dp_inner")
_CONTEXT_DIGITS = ("cp_outer", "cp_inner")
_MOST_RANKS = 2**16
"""Bound of the numbers of expert ranks that are tried: a mistyped number of ranks must not take minutes to refuse."""


def data_parts(dp: int, cp: int, shards: int, experts: int) -> DataParts:
    """Returns the division of data and context indices into digits, for ``dp`` data ranks and ``cp`` context ranks.

    ``shards``: number of data ranks in a ZeRO shard group; ``experts``: number of ranks that divide the experts of a
    layer.
    """
    within = min(experts, cp)
    experts //= within
    inner, outer = min(shards, experts), max(shards, experts)
    data = (dp // outer, outer // inner, inner)
    return DataParts(data, (cp // within, within), 2 if shards >= experts else 1, 2 if experts > shards else 1)


def expert_problem(experts: int, dp: int, cp: int, shard_size: int | None) -> str | None:
    """Returns None if ``experts`` ranks can divide the experts of a layer; otherwise the end of an error text.

    ``experts`` must divide ``dp`` (data ranks) * ``cp`` (context ranks), and be a divisor or multiple of ``cp`` and of
    ``cp`` * ``shard_size``. ``shard_size``: data ranks in a shard group; None: all.
    """
    if experts == 1:
        return None
    named = f"{dp} data x {cp} context ranks" if cp > 1 else f"{dp} data ranks"
    if dp * cp == 1:
        return "is laid over data ranks, and there is one; give more of them, or one expert rank"
    sizes = expert_sizes(dp, cp, shard_size)
    given = ", ".join(map(str, sizes))
    if experts not in expert_sizes(dp, cp, None):
        return f"does not divide the {named}, over which experts are laid; give one of {given}"
    if experts not in sizes:
        return (
            f"and zero_optimization.shard_size {shard_size} do not fit into each other, but groups of experts and "
            f"shard groups are runs of neighbours, one inside the other; give one of {given}"
        )
    return None


def expert_sizes(dp: int, cp: int, shard_size: int | None) -> list[int]:
    """Returns all possible numbers of ranks that divide the experts of a layer, for ``dp`` data and ``cp`` context
    ranks.

    ``shard_size``: number of data ranks in a ZeRO shard group, None for all.
    """
    shards, most = shard_size or dp, range(1, _MOST_RANKS)
    inside = [size for size in most[: cp - 1] if cp % size == 0]
    outside = [size for size in most[:dp] if dp % size == 0 and max(shards, size) % min(shards, size) == 0]
    return [*inside, *(cp * size for size in outside)]
