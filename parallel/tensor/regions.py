"""Which column layers and which row layer belong together, from their places in the module tree.

A layer's region is the innermost module around it that also holds a layer of the other kind:

    blocks.0.attention.{query,key,value}  blocks.0.attention.output     -> blocks.0.attention
    blocks.0.up                           blocks.0.down                 -> blocks.0
"""

from collections.abc import Iterator, Mapping

from engine.errors import PlanError


def find_regions(kinds: Mapping[str, str | None]) -> dict[str, str]:
    """The region of each column and row layer, by name; layers of other kinds have none.

    Raises:
        PlanError: a region without column layers or without a row layer.
    """
    around: dict[str, set[str]] = {"column": set(), "row": set()}
    for name, kind in kinds.items():
        if kind in around:
            around[kind].update(_ancestors(name))
    regions: dict[str, str] = {}
    for name, kind in kinds.items():
        if kind in around:
            other = around["row" if kind == "column" else "column"]
            place = next((module for module in _ancestors(name) if module in other), None)
            if place is None:
                raise _alone(name, kind)
            regions[name] = place
    for name, place in regions.items():
        if not any(regions[other] == place and kinds[other] != kinds[name] for other in regions):
            raise _alone(name, str(kinds[name]))
    return regions


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _alone(name: str, kind: str) -> PlanError:
    missing = "row layer that sums what it gives" if kind == "column" else "column layer that cuts what it gets"
    return PlanError(f'{name} is a {kind} layer, but around it there is no {missing}; add one or give it "replicate".')
