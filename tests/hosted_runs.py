"""Grids on which a loop of another library is compared with the same loop alone; each is trained once for all tests."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

EXACT = 1e-5
"""Largest relative difference of a loss in fp32."""
GRIDS: Mapping[str, tuple[int, int, Mapping[str, Any] | None]] = {
    "host": (1, 4, None),
    "host of two": (2, 2, None),
    "alone": (1, 4, {}),
    "tp2": (2, 4, {"parallel": {"tensor": 2}}),
    "dp2": (2, 2, {}),
    "zero3": (2, 2, {"zero_optimization": {"stage": 3}}),
    "dp2 x tp2": (4, 2, {"parallel": {"tensor": 2}, "zero_optimization": {"stage": 1}}),
    "pp2": (2, 4, {"parallel": {"pipeline": 2}}),
    "cp2": (2, 4, {"parallel": {"context": 2}}),
    "pp2 in parts": (2, 4, {"parallel": {"pipeline": 2}, "train_micro_batch_size_per_gpu": 2}),
    "tp2 x pp2": (4, 4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "dp2 x pp2": (4, 2, {"parallel": {"pipeline": 2}, "zero_optimization": {"stage": 1}}),
    "dp2 x pp2, zero3": (4, 2, {"parallel": {"pipeline": 2}, "zero_optimization": {"stage": 3}}),
}
"""Processes, rows of a data rank, configuration."""
SAME = {name: "host" if rows == 4 else "host of two" for name, (_, rows, config) in GRIDS.items() if config is not None}
"""The run of the host with as many data ranks."""
Found = TypeVar("Found")


class HostedRuns(Generic[Found]):
    """Each run once; several tests look at the same.

    ``case``: a frozen dataclass with ``folder``, ``config`` and ``rows``; ``run(case, processes)`` trains it.
    """

    def __init__(
        self, factory: pytest.TempPathFactory, case: Callable[..., Any], run: Callable[[Any, int], Found]
    ) -> None:
        self._factory, self._case, self._run = factory, case, run
        self._done: dict[str, tuple[Found, Path]] = {}

    def __call__(self, name: str, **changes: Any) -> tuple[Found, Path]:
        key = f"{name} {changes}"
        if key not in self._done:
            folder = self._factory.mktemp("run")
            ranks, rows, config = GRIDS[name]
            case = replace(self._case(folder=str(folder), config=config, rows=rows), **changes)
            self._done[key] = self._run(case, ranks), folder
        return self._done[key]
