"""Turns the samples of all contenders into table rows and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.gpu_step.contenders import Job
from benchmarks.gpu_step.models import multiplied_parameters, step_flops
from benchmarks.harness.figures import markdown_table

BF16_PEAK = 989.4e12
"""Peak bf16 FLOP/s (dense) of an H100 or H200 SXM, from NVIDIA's data sheet."""
LEAST_MFU = 0.5
LOSS_TOLERANCE = 0.02
"""Maximum difference in nats between contenders' losses, due to bf16 rounding."""
PLAIN, COMPILED = "torch", "torch, compiled"


def known_peak(device_name: str) -> float | None:
    """Returns the peak FLOP/s for MFU; None for other GPUs."""
    sxm = any(model in device_name for model in ("H100", "H200")) and not any(
        other in device_name for other in ("PCIe", "NVL")
    )
    return BF16_PEAK if sxm else None


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a contender on a model, or the reason ``error`` for their absence."""

    model: str
    contender: str
    error: str | None = None
    step_seconds: float = 0.0
    """Median seconds of a step over turns."""
    fastest: float = 0.0
    slowest: float = 0.0
    turns: int = 0
    tokens_per_second: float = 0.0
    flops_per_second: float = 0.0
    mfu: float | None = None
    peak_bytes: int = 0
    start_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    loss: float = 0.0
    """Loss after an equal number of steps of all contenders."""


def make_row(job: Job, found: Mapping[str, Any], peak: float | None) -> Row:
    """Makes a row from a process's answers to "start", "warm_up" and "turns", or from its "error"."""
    model, name = job.sizes.title, job.contender.name
    turns: Sequence[Mapping[str, Any]] = found.get("turns", ())
    if not turns:
        return Row(model, name, found.get("error", "not measured"))
    times = [turn["seconds"] for turn in turns]
    rate = step_flops(job.sizes, job.tokens) / median(times)
    return Row(
        model,
        name,
        found.get("error"),
        median(times),
        min(times),
        max(times),
        len(times),
        job.tokens / median(times),
        rate,
        rate / peak if peak else None,
        max(turn["peak_bytes"] for turn in turns),
        found["start"]["start_seconds"],
        found["warm_up"]["seconds"],
        turns[0]["losses"][-1],
    )


HEADINGS = ("contender", "step ms", "fastest-slowest", "tokens/s", "TFLOP/s", "MFU", "peak GB", "start s", "loss")


def table(rows: Sequence[Row]) -> str:
    """Formats rows as a Markdown table, one line per contender."""
    return markdown_table(HEADINGS, map(_cells, rows))


def _cells(row: Row) -> tuple[str, ...]:
    if not row.turns:
        return row.contender, row.error or "not measured"
    return (
        row.contender,
        f"{row.step_seconds * 1e3:.1f}",
        f"{row.fastest * 1e3:.1f}-{row.slowest * 1e3:.1f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.flops_per_second / 1e12:.1f}",
        "-" if row.mfu is None else f"{row.mfu:.1%}",
        f"{row.peak_bytes / 1e9:.1f}",
        f"{row.start_seconds:.0f}",
        f"{row.loss:.4f}",
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Checked statement with its result; ``passed`` None: not decidable."""

    text: str
    passed: bool | None

    def __str__(self) -> str:
        return f"{self.text} -> {'not measured' if self.passed is None else 'pass' if self.passed else 'FAIL'}"


def judge(model: str, rows: Sequence[Row], judges_speed: bool) -> list[Verdict]:
    """Checks that losses agree, and that the best engine row reaches its MFU and beats torch.compile."""
    verdicts = [_losses(model, rows)]
    if not judges_speed:
        return verdicts
    engines = [row for row in rows if row.turns and row.contender.startswith("engine")]
    best = max(engines, key=lambda row: row.tokens_per_second, default=None)
    if best is None:
        return [*verdicts, Verdict(f"{model}: no engine row was measured", None)]
    reached = "unknown" if best.mfu is None else f"{best.mfu:.1%}"
    text = f"{model}: MFU of {best.contender} {reached}; at least {LEAST_MFU:.0%}"
    verdicts.append(Verdict(text, None if best.mfu is None else best.mfu >= LEAST_MFU))
    for name in (PLAIN, COMPILED):
        its = next((row for row in rows if row.contender == name and row.turns), None)
        ratio = None if its is None else best.tokens_per_second / its.tokens_per_second
        figure = "" if ratio is None else f" {ratio:.3f}x"
        text = f"{model}: {best.contender} is{figure} as fast as {name}; more than 1"
        verdicts.append(Verdict(text, None if ratio is None else ratio > 1))
    return verdicts


def _losses(model: str, rows: Sequence[Row]) -> Verdict:
    losses = {row.contender: row.loss for row in rows if row.turns}
    if len(losses) < 2:
        return Verdict(f"{model}: fewer than two losses to compare", None)
    middle = median(losses.values())
    apart = {name: abs(loss - middle) for name, loss in losses.items()}
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    agree = all(distance <= LOSS_TOLERANCE for distance in apart.values())  # also not a number does not
    text = f"{model}: losses within {apart[worst]:.1e} of their median, {worst} furthest; limit {LOSS_TOLERANCE}"
    return Verdict(text, agree)


def formula(job: Job, peak: float | None) -> str:
    """Describes the FLOP count behind TFLOP/s and MFU, with its numbers."""
    sizes = job.sizes
    weights = f"{multiplied_parameters(sizes):,}"
    over = "no peak is known for this device: give --peak-tflops" if peak is None else f"MFU over {peak / 1e12} TFLOP/s"
    return (
        f"{sizes.title}: {job.micro} x {sizes.sequence} tokens x {job.accumulation} microbatches a step; "
        f"operations a token = 6 x {weights} multiplied weights (not looked-up embeddings, norms, "
        f"biases) + 6 x {sizes.layers} layers x {sizes.width} width x {sizes.sequence} tokens "
        f"(causal attention, half of 12); recomputation not counted; {over}."
    )


def profiled(jobs: Sequence[Job], answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats each contender's profiled step, and the longest kernels of the first contender."""
    lines = []
    for job, answer in zip(jobs, answers, strict=True):
        if (found := answer.get("profile")) is not None and "error" not in found:
            share = "none" if found["busy_share"] is None else f"{found['busy_share']:.1%}"
            waits = ", ".join(f"{place} {count}x" for place, count in found["waits"].items()) or "nothing"
            name = job.contender.name
            lines.append(f"{name}: busy {share}, {found['launches']} launches; the host waits at {waits}.")
    tops = (answer["profile"]["top_ms"] for answer in answers if "top_ms" in answer.get("profile", {}))
    longest: Mapping[str, float] = next(tops, {})
    return lines + [f"{milliseconds} ms {kernel}" for kernel, milliseconds in longest.items()]
