"""Report of a training step: loss, norm and counts, equal on every rank, and times and bytes of this rank."""

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any

import torch

from engine.kernels.device import device_name, is_host, peak_allocated
from engine.parallel.comm.traffic import megabytes

# Dense bf16 TFLOP/s from the vendors' datasheets; MFU needs one of these.
PEAK_TFLOPS = MappingProxyType(
    {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0, "L40S": 362.0, "V100": 125.0}
)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of one training or evaluation step on one rank. ``loss``, ``weight``, ``grad_norm``, ``lr``, ``tokens``,
    ``skipped``, ``nonfinite`` and ``loss_scale`` are equal on every rank.
    """

    step: int
    """Number of updates, including this one (0 for an evaluation before the first)."""
    loss: float
    """Sum of losses over sum of weights, over all microbatches and data ranks."""
    weight: float
    """Divisor of the summed loss: number of microbatches, or sum of the weights that ``loss_fn`` returned."""
    grad_norm: float
    """L2 norm of the averaged gradient before clipping; nan for an evaluation."""
    lr: float
    """Learning rate of the first parameter group in this update."""
    tokens: int
    """Number of tokens over all data ranks: elements of ``input_ids``; without ``input_ids``, rows."""
    seconds: float
    """Seconds on this rank: this step until all ranks agree on its norm, plus the update of the previous step."""
    tflops: float | None
    """TFLOP/s per rank: 6 x parameters x tokens / seconds / ranks; None without ``input_ids``."""
    mfu: float | None
    """Model FLOPs utilization: ``tflops`` over the dense bf16 peak of the GPU; None if the peak is unknown."""
    peak_bytes: int
    """Peak memory of this rank so far, in bytes: allocated on the GPU, or resident on the CPU."""
    bytes_sent: int
    """Bytes that this rank sent in this step; collectives count as ring algorithms."""
    skipped: bool
    """True if the gradient was not finite and the weights were not updated."""
    nonfinite: str | None
    """Cause of a skipped step: "the loss", "the weight", the name of the first parameter with a gradient that is not
    finite while the loss is, or "the gradient norm"; None in any other step."""
    loss_scale: float
    """Factor of the loss in backward; 1.0 without fp16."""
    grid: str = ""
    """Grid of ranks in this step, as "4 ranks = 1 pipeline x 4 data x 1 tensor"; it may change when a run is resumed.
    """
    nonfinite_ranks: tuple[int, ...] = ()
    """Ranks on which the value was not finite; empty for a gradient in the first skipped step, because the sum over
    data ranks hides them.
    """
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that ``loss_fn`` returned, by the names of ``monitor.metrics``: weighted mean over all microbatches and
    data ranks. Equal on every rank.
    """
    expert_load: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """With ``monitor.expert_load``: tokens routed to each expert, by module name, over all microbatches and data ranks.
    A token routed to two experts counts twice. Equal on every rank.
    """
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers of features that are on, such as ``outer/clock`` and ``outer/version`` of an outer loop; those of
    rank 0.
    """

    @property
    def expert_imbalance(self) -> float | None:
        """Largest ratio, over all layers, of the busiest expert's tokens to the mean of the layer's experts.

        None without expert token counts.
        """
        return max(_imbalances(self.expert_load).values(), default=None)

    @property
    def tokens_per_second(self) -> float:
        """``tokens`` / ``seconds``: tokens of all data ranks per second; 0.0 if ``seconds`` is 0."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a dict for JSON, with ``tokens_per_second`` and, if counted, ``expert_imbalance``.

        Entries of ``figures`` are merged in. Non-finite numbers become None.
        """
        values = asdict(self) | {"tokens_per_second": self.tokens_per_second}
        metrics = {name: _finite(value) for name, value in values.pop("metrics").items()}
        load = {name: list(rows) for name, rows in values.pop("expert_load").items()}
        figures = {name: _finite(value) for name, value in values.pop("figures").items()}
        further: dict[str, Any] = ({"metrics": metrics} if metrics else {}) | figures
        if load:
            further |= {"expert_imbalance": self.expert_imbalance, "expert_load": load}
        return {name: _finite(value) for name, value in values.items()} | further

    def numbers(self) -> dict[str, float]:
        """Returns the report's finite numbers except ``step`` by chart name, such as ``train/loss``,
        ``metrics/NAME`` or ``experts/LAYER``.
        """
        found = {
            name: value for name, value in self.flat().items() if isinstance(value, int | float) and name != "step"
        }
        return {name if "/" in name else f"train/{name}": value for name, value in found.items()}

    def flat(self) -> dict[str, Any]:
        """Returns the report as :meth:`as_dict` does, but without nested dicts.

        Metrics are under ``metrics/NAME``, and each layer's expert imbalance under ``experts/LAYER``. Non-finite
        numbers become None.
        """
        values = self.as_dict()
        metrics = {metric_key(name): value for name, value in values.pop("metrics", {}).items()}
        layers = {f"experts/{name}": value for name, value in _imbalances(values.pop("expert_load", {})).items()}
        return values | metrics | layers


def metric_key(name: str) -> str:
    """Returns the key of a ``loss_fn`` metric in a flat report: ``metrics/NAME``."""
    return f"metrics/{name}"


def _imbalances(load: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Returns the rows of the busiest expert over the mean, for each layer with rows."""
    return {name: max(rows) * len(rows) / total for name, rows in load.items() if (total := sum(rows))}


def _finite(value: Any) -> Any:
    return None if value != value or value in (inf, -inf) else value


def peak_memory(device: torch.device) -> int:
    """Returns this process's peak memory in bytes: memory allocated by torch on a GPU, resident memory on a CPU."""
    allocated = peak_allocated(device)
    return allocated if allocated is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_tflops(device: torch.device) -> float | None:
    """Returns the dense bf16 peak of a GPU in TFLOP/s by its model name; None for a CPU or an unknown GPU."""
    if is_host(device):
        return None
    name = device_name(device)
    return next((peak for model, peak in PEAK_TFLOPS.items() if model in name), None)


def utilisation(
    parameter_tokens: float | None, seconds: float, device: torch.device
) -> tuple[float | None, float | None]:
    """Returns (TFLOP/s of this rank, model FLOPs utilization relative to the dense bf16 peak of ``device``).

    Unknown values are None.

    Args:
        parameter_tokens: number of the model's parameters times the number of tokens per rank; None: unknown.
        seconds: time in which these tokens were trained.
    """
    if parameter_tokens is None:
        return None, None
    tflops, peak = 6e-12 * parameter_tokens / seconds, peak_tflops(device)
    return tflops, tflops / peak if peak else None


def line_parts(report: StepReport) -> list[str]:
    """Returns the parts of the progress line that follow step and loss, such as "lr 1.9e-03"; leaves out unavailable
    values.
    """
    parts = [
        f"lr {report.lr:.1e}",
        f"norm {report.grad_norm:.2f}",
        *(f"{name} {value:.4g}" for name, value in report.metrics.items()),
        *([f"busiest expert {load:.2f}x"] if (load := report.expert_imbalance) is not None else []),
        f"{_thousands(report.tokens_per_second)} tok/s",
        *([f"mfu {report.mfu:.1%}"] if report.mfu is not None else []),
        f"mem {megabytes(report.peak_bytes)}",
    ]
    return parts + ([f"scale {report.loss_scale:g}"] if report.loss_scale != 1.0 else [])


def trouble(report: StepReport) -> str:
    """Returns the progress line's text about a skipped step; "" for other steps.

    It names the value that was not finite, such as "the loss", and, if known, the ranks with such a value.
    """
    where = f" on rank {', '.join(map(str, report.nonfinite_ranks))}" if report.nonfinite_ranks else ""
    return f"SKIPPED: {report.nonfinite} not finite{where}" if report.skipped else ""


def _thousands(number: float) -> str:
    """Returns a short text of a number of tokens."""
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


class ProgressSink:
    """Sink that prints a line for each report: ``step 40  loss 2.413  lr 1.9e-03  norm 0.81  24.1k tok/s  mem 0.4
    GiB``.

    The line is in color on a terminal if rich is installed.
    """

    def __init__(self) -> None:
        self._console = _console()

    def write(self, report: StepReport) -> None:
        """Prints a step report as one line on stdout; a skipped step is red on a color terminal."""
        parts = [f"step {report.step}", f"loss {report.loss:.4f}", *line_parts(report), trouble(report)]
        line = "  ".join(filter(None, parts))
        if self._console is None:
            print(line, flush=True)
        else:
            self._console.print(line, markup=False, style="red" if report.skipped else None)

    def close(self) -> None:
        """Does nothing."""


def _console() -> Any:
    """Returns rich's console; None without rich, and if output goes into a file."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(soft_wrap=True)
