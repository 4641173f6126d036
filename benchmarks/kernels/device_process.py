"""Process that owns the device for ``benchmarks.kernels``: runs one task at a time and returns plain data."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.harness.interpreted import interpret
from benchmarks.harness.worker import last_line
from benchmarks.kernels.cases.case import Case, short
from benchmarks.kernels.cases.errors import deviations, results
from benchmarks.kernels.cases.lineup import Order, Scale, checked, measured
from benchmarks.kernels.clock import make_clock
from benchmarks.kernels.roofline import about, clocks, measure_rates
from benchmarks.kernels.trial import Bench, BrokenDeviceError, Effort, case_error, measure_case, settle
from benchmarks.kernels.tuning import tune
from engine.kernels.dispatch import Kernels

TINY_EFFORT = Effort(rounds=2, samples=1)


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


def make_desk(order: Order) -> Callable[..., Any]:
    """Returns the handler (task, arguments) -> answer; "broken" in an answer marks a device that needs a new
    process.
    """
    if order.tiny:
        interpret()
    device = torch.device(order.device)
    bench = Bench(device, make_clock(device), TINY_EFFORT if order.tiny else Effort())
    scale: Scale = "tiny" if order.tiny else "some"
    tasks: Mapping[str, Callable[..., Any]] = {
        "about": partial(about, device),
        "clocks": partial(clocks, device),
        "rates": partial(measure_rates, device, bench.clock),
        "check": lambda operator, dtype: check_operator(operator, getattr(torch, dtype), device, scale),
        "tune": partial(tune, bench, order.tiny),
        "measure": partial(_measure, order, bench),
    }

    def answer(task: str, *arguments: Any) -> Any:
        try:
            return tasks[task](*arguments)
        except BrokenDeviceError as error:
            return {"broken": str(error)}
        except Exception as error:
            failure = last_line(error)
        try:
            settle(device, task)
        except BrokenDeviceError:
            return {"broken": task, "error": failure}
        return {"error": failure}

    return answer


def _measure(order: Order, bench: Bench, name: str, seconds: float, without: Mapping[str, str]) -> dict[str, Any]:
    case = next(case for case in measured(order) if case.name == name)
    found = measure_case(case, bench, seconds, without)
    try:
        found["accuracy"] = case_error(case, bench.device)
    except Exception as error:
        found["accuracy"] = {"failed": last_line(error)}
    settle(bench.device, "accuracy")
    return found
