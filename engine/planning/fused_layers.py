"""Layers that run fused communication kernels under overlap "auto": only sizes that were measured to be faster."""

import re
from collections.abc import Iterator

import torch

from engine.config import Config
from engine.kernels.device import device_name
from engine.kernels.dispatch import runs_triton
from engine.kernels.overlap import Operation, OverlapChoices, overlap_choices
from engine.planning.plan import Plan


def measured_overlap(config: Config, device: torch.device, card: str | None = None) -> OverlapChoices | None:
    """Looks up stored measurements of matrix products fused with tensor-parallel communication, for this GPU type.

    Returns None if fusing is never faster, if ``parallel.overlap`` is not "auto", or with one tensor rank.

    Args:
        card: name of the GPU type, equal on all ranks; None: type of this rank's GPU; "": a rank cannot run Triton
            kernels, so the result is None.
    """
    if config.parallel.overlap != "auto" or config.tp == 1 or card == "" or not runs_triton(device):
        return None
    found = overlap_choices(card or device_name(device), config.tp)
    return found if any(row.fuses for row in found.rows) else None


def fused_layers(plan: Plan, measured: OverlapChoices | None) -> tuple[str, ...]:
    """Returns one text, such as "layers.*.up from 512 rows", for each pattern of layers with fused communication.

    In this example, forwards with at least 512 token rows are fused. ``measured``: measurements of this GPU type, or
    None.
    """
    if measured is None:
        return ()
    found: dict[str, int] = {}
    for name, operation, columns, depth, dtype in _products(plan):
        rows = [
            row.rows
            for row in measured.rows
            if (row.operation, row.columns, row.depth, row.dtype) == (operation, columns, depth, dtype) and row.fuses
        ]
        if rows:
            found[re.sub(r"\d+", "*", name)] = min(rows)
    return tuple(f"{pattern} from {rows} rows" for pattern, rows in found.items())


def _products(plan: Plan) -> Iterator[tuple[str, Operation, int, int, str]]:
    """Yields layers, operation, columns, depth and dtype of each product of a rank."""
    assert plan.tensor is not None
    table, scatters = {row.name: row for row in plan.table}, plan.tensor.sequence
    for layer in plan.tensor.layers.values():
        weight = f"{layer.name}.weight"
        row, cut = table.get(weight), plan.tensor.parameters.get(weight)
        if row is None or cut is None or len(row.shape) != 2 or layer.kind not in ("column", "row"):
            continue
        if layer.around:  # the products of its pairs are added before the collective
            continue
        cut_width, whole = cut.widths(plan.config.tp)[0], row.shape[1 - cut.dim]
        dtype = plan.precision.compute or plan.precision.autocast or row.dtype
        name = str(dtype).removeprefix("torch.")
        if layer.kind == "row":
            yield layer.name, "product_scatter" if scatters else "product_sum", whole, cut_width, name
        elif scatters:
            yield layer.name, "gather_product", cut_width, whole, name
