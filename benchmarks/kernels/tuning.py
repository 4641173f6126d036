"""Measures which launch tile of ``linear`` is fastest for a product, and how many warps and programs suit a kernel.

Changes nothing: the result names the fastest and the current choice, for editing ``kernels/gpu/launch_shapes.py``.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from itertools import product
from statistics import median
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness.worker import last_line
from benchmarks.kernels.cases.case import Case
from benchmarks.kernels.cases.lineup import Order, checked, measured
from benchmarks.kernels.clock import nothing
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
PROGRAMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "norm": ("norm", "_BACKWARD_PROGRAMS"),
        "activation": ("activations", "_BACKWARD_PROGRAMS"),
        "squared_norm": ("norm", "_PROGRAMS_EACH"),
    }
)
"""Module and name of the number of programs per processor, by operator."""
PROGRAM_FACTORS = (0.5, 1, 2, 4)
_SHAPES = ("row_shape", "column_shape")
"""How a launcher asks for its warps."""
_MOST_WARPS = 32


def tune(bench: Bench, tiny: bool, name: str) -> dict[str, Any]:
    """Tries the choices of one tuning task ``name``; returns all results and the best."""
    kind, _, what = name.partition(" ")
    if kind == "product":
        return tune_product((16, 48, 32) if tiny else PRODUCTS[what], bench)
    case = checked(what, torch.bfloat16, "tiny")[0] if tiny else _first(what)
    return (tune_programs if kind == "programs" else tune_warps)(case, bench)


def tuned(order: Order) -> list[str]:
    """Returns the names of the tuning tasks."""
    products = [f"product {name}" for name in PRODUCTS][: 1 if order.tiny else None]
    rows = [f"warps {name}" for name in ROW_KERNELS if name in order.operators]
    programs = [f"programs {name}" for name in PROGRAMS if name in order.operators]
    return [*(products if "linear" in order.operators else ()), *rows, *programs]


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
        bench.clock.sample(nothing, work, 2)
        taken = median(bench.clock.sample(nothing, work, bench.effort.samples))
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
            found[str(factor)] = _milliseconds(case, given, bench)
    return {"case": case.name, "milliseconds_by_factor": found, "won": _winners(found)}


def tune_programs(case: Case, bench: Bench) -> dict[str, Any]:
    """Measures milliseconds with fewer and more programs per processor, each with half, usual and twice the warps."""
    kind, name = PROGRAMS[case.operator]
    module = import_module(f"engine.kernels.gpu.{kind}")
    usual, given, found = getattr(module, name), case.make(bench.device, case.rows), {}
    shapes = [shape for shape in _SHAPES if hasattr(module, shape) and case.operator in ROW_KERNELS]
    for count, factor in product(PROGRAM_FACTORS, WARP_FACTORS if shapes else (1.0,)):
        with ExitStack() as stack:
            stack.enter_context(patch.object(module, name, max(1, int(usual * count))))
            for shape in shapes:
                stack.enter_context(patch.object(module, shape, _scaled(getattr(module, shape), factor)))
            found[f"{max(1, int(usual * count))} programs, warps x {factor}"] = _milliseconds(case, given, bench)
    return {"case": case.name, "milliseconds_by_programs": found, "won": _winners(found)}


def _milliseconds(case: Case, given: Any, bench: Bench) -> dict[str, float]:
    trial = Trial(contenders(case, bench.device)[TRITON](), given, differentiable=case.backward is not None)
    trial.warm_up(bench.clock, 2)
    samples = {"forward": bench.clock.sample(trial.refresh, trial.forward, bench.effort.samples)}
    if case.backward is not None:
        samples["backward"] = bench.clock.sample(trial.prepare_backward, trial.backward, bench.effort.samples)
    return {way: 1e3 * median(times) for way, times in samples.items()}


def _winners(found: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    ways = next(iter(found.values()))
    return {way: min(found, key=lambda choice, way=way: found[choice][way]) for way in ways}  # type: ignore[misc]


def _scaled(shape: Callable[..., Any], factor: float) -> Callable[..., Any]:
    from engine.kernels.gpu.launch_shapes import RowShape

    def scaled(*args: Any, **named: Any) -> RowShape:
        usual = shape(*args, **named)
        return RowShape(usual.block, min(_MOST_WARPS, max(1, int(usual.warps * factor))))

    return scaled
