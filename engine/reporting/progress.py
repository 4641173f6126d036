"""A line of text for a step, which rank 0 prints."""

import sys
from typing import Any

from engine.parallel.comm.traffic import megabytes
from engine.reporting.step_report import StepReport


def line_parts(report: StepReport) -> list[str]:
    """What a line says of a step behind its number and loss: rate, norm, metrics, speed, memory, loss scale."""
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
    """Why a step was skipped; nothing for any other step."""
    where = f" on rank {', '.join(map(str, report.nonfinite_ranks))}" if report.nonfinite_ranks else ""
    return f"SKIPPED: {report.nonfinite} not finite{where}" if report.skipped else ""


def _thousands(number: float) -> str:
    """A number of tokens, short."""
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


class ProgressSink:
    """Prints ``step 40  loss 2.413  lr 1.9e-03  norm 0.81  24.1k tok/s  mem 0.4 GiB``; in a terminal with colours of
    rich, where that is installed."""

    def __init__(self) -> None:
        self._console = _console()

    def write(self, report: StepReport) -> None:
        """Print one line."""
        parts = [f"step {report.step}", f"loss {report.loss:.4f}", *line_parts(report), trouble(report)]
        line = "  ".join(filter(None, parts))
        if self._console is None:
            print(line, flush=True)
        else:
            self._console.print(line, markup=False, style="red" if report.skipped else None)

    def close(self) -> None:
        """Nothing is open."""


def _console() -> Any:
    """Rich's console; None without rich, and where output goes into a file."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(soft_wrap=True)
