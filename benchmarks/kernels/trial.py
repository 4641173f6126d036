"""Measures one case: all contenders in interleaved rounds, forward and backward apart, memory, and error to float64.

Each contender's inputs are filled anew before every sample, since some overwrite their inputs with gradients.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.budget import Budget
from benchmarks.harness.worker import last_line
from benchmarks.kernels.cases.case import Case, Inputs
from benchmarks.kernels.cases.errors import Operator, deviations
from benchmarks.kernels.clock import Clock
from engine.kernels.dispatch import Kernels

TRITON, REFERENCE, EAGER, COMPILED = "triton", "reference", "eager", "torch.compile"
CHECKED_ROWS = 64
"""Number of rows for the error, since float64 is slow."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of samples per contender, fewer if time is short."""

    rounds: int = 5
    samples: int = 11
    """Samples per round, 55 in all."""


class BrokenDeviceError(Exception):
    """Error of a device that only a new process can use again."""


class Trial:
    """Contender with its own inputs."""

    def __init__(self, operator: Operator, given: Inputs, differentiable: bool) -> None:
        self._operator, self._given = operator, given
        self._own = [x.clone().requires_grad_(differentiable and x.is_floating_point()) for x in given]
        self._wanted = [x for x in self._own if x.requires_grad]
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def refresh(self) -> None:
        """Restores the original inputs."""
        self._outputs = []
        with torch.no_grad():
            for own, given in zip(self._own, self._given, strict=True):
                own.copy_(given)

    def forward(self) -> None:
        """Runs the forward once."""
        outputs = self._operator(*self._own)
        every = outputs if isinstance(outputs, tuple) else (outputs,)
        self._outputs = [out for out in every if out.requires_grad]

    def prepare_backward(self) -> None:
        """Runs a forward, and draws output gradients."""
        self.refresh()
        self.forward()
        self._gradients = [torch.randn_like(out) if out.ndim else torch.ones_like(out) for out in self._outputs]

    def backward(self) -> None:
        """Runs one backward, after :meth:`prepare_backward`."""
        torch.autograd.grad(self._outputs, self._wanted, self._gradients, allow_unused=True)

    @property
    def differentiable(self) -> bool:
        """True if there is a backward."""
        return bool(self._wanted)

    def warm_up(self, clock: Clock, times: int) -> None:
        """Runs ``times`` untimed passes, for compilation, allocators and clocks."""
        clock.sample(self.refresh, self.forward, times)
        if self.differentiable:
            clock.sample(self.prepare_backward, self.backward, times)
        self.refresh()


def contenders(case: Case, device: torch.device) -> dict[str, Callable[[], Operator]]:
    """Returns functions that make the contenders of a case, by name."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"  # a C++ compiler is no matter here

    def compiled() -> Operator:
        torch.compiler.reset()
        operator: Operator = torch.compile(case.eager, dynamic=False, backend=backend)
        return operator

    return {
        TRITON: lambda: case.ours(Kernels("triton")),
        REFERENCE: lambda: case.ours(Kernels("reference")),
        EAGER: lambda: case.eager,
        **case.peers,
        **({COMPILED: compiled} if case.compiled else {}),
    }


@dataclass(frozen=True, slots=True)
class Bench:
    """Device, clock and effort of measurements."""

    device: torch.device
    clock: Clock
    effort: Effort


def measure_case(case: Case, bench: Bench, seconds: float, without: Mapping[str, str]) -> dict[str, Any]:
    """Measures times by contender, error and memory; ``without``: skipped contenders with reasons.

    Raises:
        BrokenDeviceError: the device broke; the message names the contender.
    """
    budget = Budget(seconds)
    given = case.make(bench.device, case.rows)
    trials: dict[str, Trial] = {}
    rows: dict[str, dict[str, Any]] = {name: {"error": why} for name, why in without.items()}
    for name, make in contenders(case, bench.device).items():
        if name in without:
            continue
        with _guarded(rows, name, bench.device):
            if not budget.left:
                raise TimeoutError("no time left")
            trial = Trial(make(), given, case.backward is not None)
            trial.warm_up(bench.clock, 2)
            rows[name] = {"peak_bytes": _peak_bytes(trial, case, bench.device), "samples": {}}
            trials[name] = trial
    order = random.Random(0)
    for turn in range(bench.effort.rounds):
        if turn and not budget.left:
            break
        for name in order.sample(list(trials), len(trials)):
            if "error" in rows[name]:
                continue
            with _guarded(rows, name, bench.device):
                _sample(trials[name], rows[name]["samples"], bench)
    return {"contenders": {name: _summary(row) for name, row in rows.items()}}


def case_error(case: Case, device: torch.device) -> dict[str, Any]:
    """Returns the maximum relative errors of our kernel and of eager torch against float64."""
    given = case.make(device, min(CHECKED_ROWS, case.rows))
    found = deviations(case.ours(Kernels("triton")), case.eager, given)
    return {
        "error": max((one.error / one.scale for one in found if one.scale), default=0.0),
        "eager_error": max((one.eager / one.scale for one in found if one.scale), default=0.0),
        "holds": all(one.holds for one in found),
        "results": [asdict(one) for one in found],
    }


@contextmanager
def _guarded(rows: dict[str, dict[str, Any]], name: str, device: torch.device) -> Iterator[None]:
    """An error inside becomes the row of ``name``; one that the device does not survive goes on up."""
    try:
        yield
    except Exception as error:
        rows[name] = {"error": last_line(error)}
    if "error" in rows[name]:
        settle(device, name)  # out here the traceback, which holds tensors, is gone


def settle(device: torch.device, name: str) -> None:
    """Frees memory after a failure.

    Raises:
        BrokenDeviceError: the device does not answer.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:
        raise BrokenDeviceError(name) from None


def _sample(trial: Trial, samples: dict[str, list[float]], bench: Bench) -> None:
    count = bench.effort.samples
    samples.setdefault("forward", []).extend(bench.clock.sample(trial.refresh, trial.forward, count))
    if trial.differentiable:
        samples.setdefault("backward", []).extend(bench.clock.sample(trial.prepare_backward, trial.backward, count))
    trial.refresh()


def _peak_bytes(trial: Trial, case: Case, device: torch.device) -> int | None:
    """Above its inputs, in a forward and a backward."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial.prepare_backward()
    if case.backward is not None:
        trial.backward()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    trial.refresh()
    return peak


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    if "error" in row:
        return row
    seconds = {direction: median(found) for direction, found in row["samples"].items()}
    return {
        "seconds": seconds | {"both": sum(seconds.values())},
        "spread": {direction: (min(found), max(found)) for direction, found in row["samples"].items()},
        "count": {direction: len(found) for direction, found in row["samples"].items()},
        "peak_bytes": row["peak_bytes"],
    }
