"""Process that owns the device for ``benchmarks.kernels``: runs one task at a time and returns plain data."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.harness.interpreted import interpret
from benchmarks.harness.worker import last_line
from benchmarks.kernels.cases.lineup import Order, Scale, measured
from benchmarks.kernels.clock import make_clock
from benchmarks.kernels.correctness import check_operator
from benchmarks.kernels.roofline import about, clocks, measure_rates
from benchmarks.kernels.trial import Bench, BrokenDeviceError, Effort, case_error, measure_case, settle
from benchmarks.kernels.tuning import tune

TINY_EFFORT = Effort(rounds=2, samples=1)


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
