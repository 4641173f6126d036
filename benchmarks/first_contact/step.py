"""Profiles one engine mode on one model: seconds, MFU, host lead over the device, host waits, longest kernels."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.first_contact.telling import Finding, device_kind, on_gpu, settle, tell
from benchmarks.gpu_step.contenders import Contender, EngineTrainer, Job, TorchTrainer, Trainer
from benchmarks.gpu_step.models import EIGHT_BILLION_SHAPE, ONE_BILLION, TINY, make_batch, step_flops
from benchmarks.gpu_step.report import known_peak
from benchmarks.harness.device_profile import host_waits, profile_step

SHORT = 64
"""Tokens per row of steps that the device finishes before the host has launched them."""
STEPS = 4


def make_job(name: str) -> Job:
    """Parses a contender and its sizes from a name such as "engine 1b compiled"."""
    kind, which, *how = name.split()
    kernels = next((word for word in how if word in ("reference", "triton")), "auto")
    contender = Contender(name, "engine" if kind == "engine" else "torch", kernels, "compiled" in how)
    if not on_gpu():
        return Job(contender, TINY["llama"], "cpu", 1, 2)
    if which == "1b":
        return Job(contender, ONE_BILLION["llama"], "cuda", 2, 4)
    return Job(contender, EIGHT_BILLION_SHAPE, "cuda", 1, 2)


def run_step(name: str) -> None:
    """Measures steps, then host waits and a profile; prints each finding, the one for ``name`` last."""
    began, job = time.monotonic(), make_job(name)
    device = torch.device(device_kind())
    trainer: Trainer = (EngineTrainer if job.contender.kind == "engine" else TorchTrainer)(job, device)
    batch = make_batch(job.sizes, job.rows, device)
    # another batch, because equal ones in a row are compared, which waits for the device
    found = _first(trainer, {key: rows.roll(1, 0) for key, rows in batch.items()}, began)
    found |= _timed(trainer, batch, job)
    if not job.contender.compiled:  # other shapes compile again
        found["host_bound_ms"] = _host_bound_ms(trainer, batch) / job.accumulation
    tell(f"{name}: steps", True, began, **found)
    waits = host_waits(lambda: trainer.step(batch), device)
    tell(f"{name}: waits of the host", True, began, waits=sum(waits.values()), places=waits)
    tell(name, True, began, **profile_step(lambda: trainer.step(batch), device))


def _first(trainer: Trainer, batch: Mapping[str, Tensor], began: float) -> Finding:
    built = time.monotonic()
    first = trainer.step(batch)()
    settle()
    stepped = time.monotonic()
    return {
        "build_s": round(built - began, 1),
        "first_step_s": round(stepped - built, 1),
        "first_loss": round(first, 4),
    }


def _timed(trainer: Trainer, batch: Mapping[str, Tensor], job: Job) -> Finding:
    trainer.step(batch)()
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    times, host, loss = list[float](), list[float](), 0.0
    for _ in range(STEPS if on_gpu() else 1):
        settle()
        start = time.perf_counter()
        read: Callable[[], float] = trainer.step(batch)
        host.append(time.perf_counter() - start)
        settle()
        times.append(time.perf_counter() - start)
        loss = read()
    seconds = median(times)
    peak = known_peak(torch.cuda.get_device_name(0)) if on_gpu() else None
    told: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)} if on_gpu() else {}
    return told | {
        "step_ms": round(seconds * 1e3, 1),
        "spread_ms": round((max(times) - min(times)) * 1e3, 1),
        "tokens_per_s": round(job.tokens / seconds),
        "MFU": None if peak is None else round(step_flops(job.sizes, job.tokens) / seconds / peak, 3),
        "loss": round(loss, 4),
        "micro": f"{job.micro} x {job.sizes.sequence} x {job.accumulation}",
        "host_share": round(sum(host) / sum(times), 3),
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 1) if on_gpu() else None,
    }


def _host_bound_ms(trainer: Trainer, batch: Mapping[str, Tensor]) -> float:
    """Milliseconds of a step of short rows, of which the device makes nothing."""
    short = {key: rows[:, :SHORT].contiguous() for key, rows in batch.items()}
    trainer.step(short)()
    settle()
    start = time.perf_counter()
    for _ in range(2):
        trainer.step(short)()
    settle()
    return round((time.perf_counter() - start) / 2 * 1e3, 2)
