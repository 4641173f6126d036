"""Grids on which each thing that a user does with an engine equals plain torch."""

from typing import Any

import pytest

GRIDS: dict[str, tuple[dict[str, int], int]] = {
    "dp2-zero0": ({"data": 2}, 0),
    "dp2-zero1": ({"data": 2}, 1),
    "dp2-zero2": ({"data": 2}, 2),
    "dp2-zero3": ({"data": 2}, 3),
    "tp2": ({"data": 1, "tensor": 2}, 0),
    "dp2-tp2-zero1": ({"data": 2, "tensor": 2}, 1),
    "dp2-tp2-zero3": ({"data": 2, "tensor": 2}, 3),
    "pp2": ({"data": 1, "pipeline": 2}, 0),
    "dp2-pp2-zero3": ({"data": 2, "pipeline": 2}, 3),
}
"""Name -> the section ``parallel``, and the ZeRO stage."""


def every_grid(*often: str) -> list[Any]:
    """Cases (grid, stage); all but those in ``often`` are long."""
    assert set(often) <= GRIDS.keys()
    return [
        pytest.param(*case, id=name, marks=[] if name in often else [pytest.mark.long]) for name, case in GRIDS.items()
    ]
