"""Checks an operator on a device: its error against float64, and equal bits in two runs."""

from typing import Any

import torch

from benchmarks.kernels.cases.case import Case, short
from benchmarks.kernels.cases.errors import deviations, results
from benchmarks.kernels.cases.lineup import Scale, checked
from engine.kernels.dispatch import Kernels


def check_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Returns the worst error of the Triton kernel relative to the allowed one, and True if two runs are equal."""
    given = case.make(device, case.rows)
    operator = case.ours(Kernels("triton"))
    found = deviations(operator, case.eager, given)
    pairs = zip(results(operator, given), results(operator, given), strict=True)
    same = all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)
    shares = [one.error / one.allowed if one.allowed else float(one.error > 0) for one in found]
    return {
        "case": case.name,
        "share_of_allowed": max(shares),
        "same_bits_twice": same,
        "passed": all(one.holds for one in found) and same,
    }


def check_operator(operator: str, dtype: torch.dtype, device: torch.device, scale: Scale) -> dict[str, Any]:
    """Runs all checks of an operator in ``dtype``."""
    found = [check_case(case, device) for case in checked(operator, dtype, scale)]
    return {
        "operator": operator,
        "dtype": short(dtype),
        "cases": found,
        "share_of_allowed": max(one["share_of_allowed"] for one in found),
        "passed": all(one["passed"] for one in found),
    }
