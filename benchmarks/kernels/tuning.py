"""Measures which launch tile of ``linear`` is fastest for a product, and how many warps suit a row kernel.

Changes nothing: the result names the fastest and the current choice, for editing ``kernels/gpu/launch_shapes.py``.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from statistics import median
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness.worker import last_line
from benchmarks.kernels.cases.case import Case
from benchmarks.kernels.cases.lineup import Order, checked, measured
from benchmarks.kernels.trial import TRITON, Bench, Trial, contenders

PRODUCTS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "square": (8192, 8192, 8192),
        "up, tp8": (8192, 1792, 4096),
        "down, tp8": (8192, 4096, 1792),
        "head": (1024, 128256, 4096),
    }
)
"""Sizes (M, N, K) of the tuned products, by name."""
ROW_KERNELS = ("norm", "gated", "activation")
_MODULES = MappingProxyType({"norm": "norm", "gated": "activations", "activation": "activations"})
WARP_FACTORS = (0.5, 1.0, 2.0)
_SHAPES = ("row_shape", "column_shape")
"""How a launcher asks for its warps."""
_MOST_WARPS = 32


def tune(bench: Bench, tiny: bool, name: str) -> dict[str, Any]:
    """Tries the choices of one tuning task ``name``; returns all results and the best."""
    kind, _, what = name.partition(" ")
    if kind == "product":
        return tune_product((16, 48, 32) if tiny else PRODUCTS[what], bench)
    case = checked(what, torch.bfloat16, "tiny")[0] if tiny else _first(what)
    return tune_warps(case, bench)


def tuned(order: Order) -> list[str]:
    """Returns the names of the tuning tasks."""
    products = [f"product {name}" for name in PRODUCTS][: 1 if order.tiny else None]
    rows = [f"warps {name}" for name in ROW_KERNELS if name in order.operators]
    return [*(products if "linear" in order.operators else ()), *rows]


def _first(operator: str) -> Case:
    return next(case for case in measured(Order(quick=True, operators=(operator,))))


def tune_product(sizes: tuple[int, int, int], bench: Bench) -> dict[str, Any]:
    """Measures TFLOP/s of every shipped tile and of torch's product, in the layouts of forward and backward."""
    from engine.kernels.gpu.launch_shapes import capability, choose_tile, processors, tiles_for
    from engine.kernels.gpu.matmul import Follows, launch_matmul

    rows, columns, depth = sizes
    tiles = tiles_for(2, False, capability(bench.device))
    chosen = choose_tile(rows, columns, tiles, processors(bench.device))
    found: dict[str, Any] = {"sizes": sizes, "chosen": asdict(chosen), "layouts": {}}
    for layout in ("ab'", "ab", "a'b"):
        a = _random(depth, rows, bench).t() if layout == "a'b" else _random(rows, depth, bench)
        b = _random(columns, depth, bench).t() if layout == "ab'" else _random(depth, columns, bench)
        works: dict[str, Callable[[], object]] = {
            f"{tile.rows}x{tile.columns}x{tile.depth}": lambda tile=tile, a=a, b=b: launch_matmul(
                a, b, Follows(), tile=tile
            )  # type: ignore[misc]
            for tile in tiles
        }
        works["torch"] = lambda a=a, b=b: torch.mm(a, b)  # type: ignore[misc]
        rates = {name: _rate(work, 2 * rows * columns * depth, bench) for name, work in works.items()}
        known = {name: rate for name, rate in rates.items() if name != "torch" and isinstance(rate, float)}
        found["layouts"][layout] = {"tflops": rates, "won": max(known, key=known.__getitem__, default=None)}
    return found


def _random(rows: int, columns: int, bench: Bench) -> Tensor:
    return torch.randn(rows, columns, device=bench.device).to(torch.bfloat16)


def _rate(work: Callable[[], object], flops: int, bench: Bench) -> float | str:
    try:
        bench.clock.sample(_nothing, work, 2)
        taken = median(bench.clock.sample(_nothing, work, bench.effort.samples))
    except Exception as error:
        return last_line(error)
    return flops / taken / 1e12


def tune_warps(case: Case, bench: Bench) -> dict[str, Any]:
    """Measures forward and backward milliseconds with fewer and more warps than the default."""
    module = import_module(f"engine.kernels.gpu.{_MODULES[case.operator]}")
    names = [name for name in _SHAPES if hasattr(module, name)]
    given, found = case.make(bench.device, case.rows), {}
    for factor in WARP_FACTORS:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(module, name, _scaled(getattr(module, name), factor)))
            trial = Trial(contenders(case, bench.device)[TRITON](), given, differentiable=True)
            trial.warm_up(bench.clock, 2)
            forward = bench.clock.sample(trial.refresh, trial.forward, bench.effort.samples)
            backward = bench.clock.sample(trial.prepare_backward, trial.backward, bench.effort.samples)
            found[str(factor)] = {"forward": 1e3 * median(forward), "backward": 1e3 * median(backward)}
    won = {way: min(found, key=lambda factor, way=way: found[factor][way]) for way in ("forward", "backward")}  # type: ignore[misc]
    return {"case": case.name, "milliseconds_by_factor": found, "won": won}


def _scaled(shape: Callable[..., Any], factor: float) -> Callable[..., Any]:
    from engine.kernels.gpu.launch_shapes import RowShape

    def scaled(*args: Any, **named: Any) -> RowShape:
        usual = shape(*args, **named)
        return RowShape(usual.block, min(_MOST_WARPS, max(1, int(usual.warps * factor))))

    return scaled


def _nothing() -> None:
    pass
