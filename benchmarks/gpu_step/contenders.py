"""Contenders of ``benchmarks.gpu_step``, each in a process: the engine in several modes, plain torch, DeepSpeed.

All train bf16 weights with fp32 master weights and fp32 gradient sums, clipped at norm 1, by AdamW without autocast;
the plain torch loop emulates the engine's master weights and sums.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from benchmarks.gpu_step.models import Sizes, loss_of, make_batch, make_model, mean_loss
from benchmarks.harness.device_profile import host_waits, profile_step
from benchmarks.harness.interpreted import interpret
from engine.reporting.step_report import peak_memory

LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Contender:
    """Row of the table: name, kind and options of a trainer."""

    name: str
    kind: Literal["engine", "torch", "deepspeed"]
    kernels: str = "auto"
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """Contender with its model, microbatch and number of microbatches."""

    contender: Contender
    sizes: Sizes
    device: str
    micro: int
    accumulation: int

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.micro * self.accumulation

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.rows * self.sizes.sequence


class Trainer(Protocol):
    """Interface of a contender's training loop."""

    def step(self, batch: Mapping[str, Tensor]) -> Callable[[], float]:
        """Trains one step; returns a function that returns the mean loss, and may synchronize."""


class EngineTrainer:
    """Trine: ``engine.initialize`` and ``train_batch`` in one process without torchrun."""

    def __init__(self, job: Job, device: torch.device) -> None:
        import engine

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": job.micro,
            "gradient_accumulation_steps": job.accumulation,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
            },
            "gradient_clipping": CLIP,
            "kernels": job.contender.kernels,
            "compile": job.contender.compiled,
        }
        self._engine = engine.initialize(make_model(job.sizes, device), config, loss_fn=loss_of(job.sizes))

    def step(self, batch: Mapping[str, Tensor]) -> Callable[[], float]:
        """Trains one step; see :class:`Trainer`."""
        report = self._engine.train_batch(dict(batch))
        return lambda: float(report.loss)


class TorchTrainer:
    """Plain torch: a handwritten loop with fp32 gradient sums and masters of bf16 weights, and fused AdamW."""

    def __init__(self, job: Job, device: torch.device) -> None:
        model = make_model(job.sizes, device)
        self._weights: list[Tensor] = list(model.parameters())
        self._masters = [weight.detach().clone() for weight in self._weights]
        for weight in self._weights:  # not the buffers: rounded rotary frequencies would turn to other positions
            weight.data = weight.data.to(torch.bfloat16)
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._sums: list[Tensor] = [master.grad for master in self._masters if master.grad is not None]
        self._optimizer = torch.optim.AdamW(self._masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        self._run = model
        if job.contender.compiled:
            model.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
        self._job = job

    def step(self, batch: Mapping[str, Tensor]) -> Callable[[], float]:
        """Trains one step; see :class:`Trainer`."""
        losses = [self._accumulate(part) for part in _microbatches(batch, self._job.micro)]
        torch.nn.utils.clip_grad_norm_(self._masters, CLIP, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        torch._foreach_zero_(self._sums)
        return lambda: float(torch.stack(losses).mean())

    def _accumulate(self, part: Mapping[str, Tensor]) -> Tensor:
        loss = mean_loss(self._run, self._job.sizes, part)
        (loss / self._job.accumulation).backward()  # type: ignore[no-untyped-call]
        torch._foreach_add_(self._sums, [w.grad for w in self._weights if w.grad is not None])
        for weight in self._weights:
            weight.grad = None
        return loss.detach().float()


class DeepSpeedTrainer:
    """DeepSpeed: ``deepspeed.initialize`` with ZeRO 1 and its own loop."""

    def __init__(self, job: Job, device: torch.device) -> None:
        given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
        for name, value in given.items():
            os.environ.setdefault(name, value)
        warnings.filterwarnings("ignore", category=FutureWarning)
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": job.micro,
            "gradient_accumulation_steps": job.accumulation,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": CLIP,
        }
        model = make_model(job.sizes, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._job = job

    def step(self, batch: Mapping[str, Tensor]) -> Callable[[], float]:
        """Trains one step; see :class:`Trainer`."""
        losses = []
        for part in _microbatches(batch, self._job.micro):
            loss = mean_loss(self._engine, self._job.sizes, part)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach().float())
        return lambda: float(torch.stack(losses).mean())


def _microbatches(batch: Mapping[str, Tensor], micro: int) -> Iterator[dict[str, Tensor]]:
    for parts in zip(*(torch.split(rows, micro) for rows in batch.values()), strict=True):
        yield dict(zip(batch, parts, strict=True))


_KINDS: Mapping[str, Callable[[Job, torch.device], Trainer]] = MappingProxyType(
    {"engine": EngineTrainer, "torch": TorchTrainer, "deepspeed": DeepSpeedTrainer}
)


def make_runner(job: Job) -> Callable[..., Any]:
    """Returns the request handler of a contender: ("start",) builds, ("steps", n) trains and returns time, losses,
    memory.

    ("profile",) trains two more steps: one counts host waits, one is profiled.
    """
    if job.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or the engine would take the GPU
        if job.contender.kernels == "triton":
            interpret()
    device = torch.device(job.device)
    started = time.perf_counter()
    trainer = _KINDS[job.contender.kind](job, device)
    batch = make_batch(job.sizes, job.rows, device)
    _wait(device)
    built = time.perf_counter() - started

    def answer(task: str, steps: int = 0) -> dict[str, Any]:
        if task == "start":
            return {"start_seconds": built}
        if task == "profile":
            waits = host_waits(lambda: trainer.step(batch), device)
            return {"waits": waits, **profile_step(lambda: trainer.step(batch), device)}
        _wait(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        losses = [trainer.step(batch) for _ in range(steps)]
        _wait(device)
        seconds = (time.perf_counter() - begin) / steps
        return {"seconds": seconds, "losses": [read() for read in losses], "peak_bytes": peak_memory(device)}

    return answer


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
