"""Reference run: parts outside the engine (settings, corpus, validation and the sample at the end)."""

import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import engine
from engine.config import load_raw
from engine.data import evaluation_batches
from engine.data.corpus import Corpus, builtin_corpus, text_corpus
from engine.kernels.device import find_accelerator
from engine.launch.run_folder import CHECKPOINTS, DATA_CONFIG, DEFAULT_CONFIG, METRICS
from engine.models.decoder import Decoder, DecoderConfig, generate
from engine.parallel.comm.launcher import find_place
from engine.reporting.step_report import StepReport, line_parts, trouble

EVALUATION_BATCHES = 8
"""Validation batches per rank at the end of a run."""
CHECKPOINT_EVERY = 50
"""Default number of steps between checkpoints."""


def job_place() -> tuple[int, int]:
    """Returns (rank, number of ranks) from the launcher's environment variables, before the engine starts; (0, 1)
    without a launcher.
    """
    place = find_place(os.environ)
    return (place.rank, place.size) if place is not None else (0, 1)


def read_settings(options: Namespace, root: Path) -> dict[str, Any]:
    """Reads the JSON configuration of the run; missing settings come from the command line or have defaults.

    ``root``: folder of the default configurations, used if the command line names no configuration.

    Raises:
        ConfigError: the file is missing or is not a JSON object.
    """
    ranks = job_place()[1]
    path = options.config or root / (DATA_CONFIG if ranks % 4 else DEFAULT_CONFIG)
    given = load_raw(path, options.overrides)
    settings = engine.load_config(given).to_json()
    if settings["scheduler"] is None:
        warm = max(2, options.steps // 10)
        settings["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": options.steps, "warmup_num_steps": warm, "cos_min_ratio": 0.1},
        }
    if "bf16" not in given and "fp16" not in given:
        settings["bf16"]["enabled"] = find_accelerator() is not None
    settings["monitor"]["jsonl"] = settings["monitor"]["jsonl"] or str(options.out / METRICS)
    settings["monitor"]["report"] = settings["monitor"]["report"] or str(options.out)
    settings["monitor"]["profile"] = options.profile or settings["monitor"]["profile"]
    settings["checkpoint"]["folder"] = settings["checkpoint"]["folder"] or str(options.out / CHECKPOINTS)
    if "every" not in given.get("checkpoint", {}):
        settings["checkpoint"]["every"] = CHECKPOINT_EVERY
    return settings


def read_corpus(options: Namespace) -> tuple[Corpus, Corpus]:
    """Returns (training text, validation text): the user's files, or Python's standard library."""
    if options.data:
        return text_corpus(options.data, "train"), text_corpus(options.data, "validation")
    return builtin_corpus("train"), builtin_corpus("validation")


def describe_text(corpus: Corpus) -> str:
    """Returns a banner line about the training text: name, size, number of files and digest."""
    return f"  text       {corpus.name}, {len(corpus.tokens):,} bytes of {corpus.files} files, digest {corpus.digest}"


def decoder_config(options: Namespace) -> DecoderConfig:
    """Returns the sizes of the reference decoder from the command line."""
    return DecoderConfig(layers=options.layers, width=options.width, heads=options.heads, context=options.context)


def example_batch(settings: dict[str, Any], shape: DecoderConfig) -> dict[str, torch.Tensor]:
    """Returns one microbatch of token ids and labels on the meta device, to partition the model."""
    rows = engine.load_config(settings, job_place()[1]).micro
    ids = torch.empty((rows, shape.context), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def save_last(eng: engine.Engine, before: int) -> None:
    """Begins to save a checkpoint of the last step, if this step has none yet. All ranks must call it.

    It does not wait for the end of the save. ``before``: number of steps when this process started; without new steps
    nothing is saved.
    """
    every = eng.config.checkpoint.every
    if eng.step_count > before and (not every or eng.step_count % every):
        eng.save_checkpoint()


def evaluate(eng: engine.Engine, corpus: Corpus, context: int) -> float:
    """Returns the mean validation loss of ``corpus`` in nats per byte, over all data ranks. All ranks must call it.

    ``context``: number of tokens per sequence.
    """
    grid, rows = eng.grid, eng.config.micro * eng.config.accumulation
    batches: Iterator[Any] = evaluation_batches(
        corpus, context, rows, grid.row_rank, grid.row_ranks, EVALUATION_BATCHES
    )
    total = weight = 0.0
    for batch in batches:
        report = eng.eval_batch(batch)
        if report.weight:
            total, weight = total + report.loss * report.weight, weight + report.weight
    return total / weight


def sample_text(eng: engine.Engine, shape: DecoderConfig, length: int) -> bytes | None:
    """Generates ``length`` bytes after a fixed prompt with the trained model. All ranks must call it.

    Returns prompt and generated bytes on rank 0, None on other ranks.
    """
    state = eng.full_state_dict()
    if eng.grid.rank:
        return None
    model = Decoder(shape)
    model.load_state_dict(state)
    prompt = b"def "
    return prompt + generate(model, prompt, length)


WARM_UP_STEPS = 2
"""Number of first steps that the estimate of the remaining time excludes."""


@dataclass(slots=True)
class ProgressLine:
    """Printer of a run's progress, one line per printed step with loss, learning rate, speed and remaining time."""

    steps: int
    """Total number of steps of the run, including earlier starts."""
    every: int
    smoothed: float | None = None
    _marks: list[float] = field(default_factory=list)

    def show(self, report: StepReport) -> None:
        """Records the report of a step, and prints a line for every ``every``-th step.

        The first step, the last step and steps without an update are printed too.
        """
        self._marks.append(time.perf_counter())
        fresh = self.smoothed is None or not math.isfinite(self.smoothed)
        self.smoothed = report.loss if fresh else 0.9 * (self.smoothed or 0.0) + 0.1 * report.loss
        first, last = len(self._marks) == 1, report.step == self.steps
        if first or last or report.step % self.every == 0 or report.skipped:
            print(self._line(report), flush=True)

    def _line(self, report: StepReport) -> str:
        done = report.step
        parts = [
            f"step {done}/{self.steps} {done * 100 // self.steps}%",
            f"loss {report.loss:.3f} (mean {self.smoothed:.3f})",
            f"bpb {bits_per_byte(report.loss):.3f}",
            *line_parts(report),
            f"eta {self._eta(done)}",
            trouble(report),
        ]
        return "  ".join(filter(None, parts))

    def _eta(self, done: int) -> str:
        if len(self._marks) <= WARM_UP_STEPS:
            return "?"
        pace = (self._marks[-1] - self._marks[WARM_UP_STEPS - 1]) / (len(self._marks) - WARM_UP_STEPS)
        return _duration(pace * (self.steps - done))


def bits_per_byte(loss: float) -> float:
    """Converts a loss in nats per byte to bits per byte."""
    return loss / math.log(2)


def decode_for_terminal(text: bytes) -> str:
    """Decodes generated bytes as UTF-8 for a terminal; invalid bytes and unprintable characters become U+FFFD."""
    shown = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in shown)


def say(*lines: str) -> None:
    """Prints lines and flushes stdout."""
    for line in lines:
        print(line, flush=True, file=sys.stdout)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
