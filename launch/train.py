"""The pieces of the reference run that are not the engine's: settings, corpus, run folder, sample."""

import json
import os
import platform
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import engine
from engine.corpus import Corpus, builtin_corpus, text_corpus
from engine.data import evaluation_batches
from engine.decoder import Decoder, DecoderConfig, generate
from engine.launch.options import DATA_CONFIG, DEFAULT_CONFIG

EVALUATION_BATCHES = 8
"""Validation batches a rank reads at the end: enough for two digits of bits per byte."""


def read_settings(options: Namespace, root: Path) -> dict[str, Any]:
    """The JSON configuration with what the command line adds: schedule length, bf16 on GPUs, log file.

    Raises:
        ConfigError: the file is missing or is no JSON object.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    path = options.config or root / (DATA_CONFIG if ranks % 4 else DEFAULT_CONFIG)
    settings = engine.load_config(path).to_json()
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    if settings["scheduler"] is None:
        warm = max(2, options.steps // 10)
        settings["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": options.steps, "warmup_num_steps": warm, "cos_min_ratio": 0.1},
        }
    if "bf16" not in given and "fp16" not in given:
        settings["bf16"]["enabled"] = torch.cuda.is_available()
    settings["monitor"]["jsonl"] = settings["monitor"]["jsonl"] or str(options.out / "metrics.jsonl")
    return settings


def read_corpus(options: Namespace) -> tuple[Corpus, Corpus]:
    """Training and validation text: the user's files, or the interpreter's own sources."""
    if options.data:
        return text_corpus(options.data, "train"), text_corpus(options.data, "validation")
    return builtin_corpus("train"), builtin_corpus("validation")


def describe_text(corpus: Corpus) -> str:
    """A line for the banner."""
    return f"  text       {corpus.name}, {len(corpus.tokens):,} bytes of {corpus.files} files, digest {corpus.digest}"


def decoder_config(options: Namespace) -> DecoderConfig:
    """The shape of the decoder."""
    return DecoderConfig(layers=options.layers, width=options.width, heads=options.heads, context=options.context)


def example_batch(settings: dict[str, Any], shape: DecoderConfig) -> dict[str, torch.Tensor]:
    """The shapes of one microbatch, so that the engine can cut the model before the first batch is read."""
    rows = engine.load_config(settings, int(os.environ.get("WORLD_SIZE", "1"))).micro
    ids = torch.empty((rows, shape.context), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def open_run_folder(folder: Path, settings: dict[str, Any], corpus: Corpus) -> None:
    """Make the folder, keep an older run under a number, and record what this run depends on."""
    if folder.exists():
        number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
    folder.mkdir(parents=True)
    text = {"name": corpus.name, "files": corpus.files, "bytes": len(corpus.tokens), "digest": corpus.digest}
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    record = {"corpus": text, "versions": versions, "config": settings}
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def evaluate(eng: engine.Engine, corpus: Corpus, context: int) -> float:
    """Validation loss in nats per byte; every byte counts once, over all data ranks."""
    coord, rows = eng.grid.coord(), eng.config.micro * eng.config.accumulation
    batches: Iterator[Any] = evaluation_batches(corpus, context, rows, coord.dp, eng.grid.dp, EVALUATION_BATCHES)
    total = weight = 0.0
    for batch in batches:
        report = eng.eval_batch(batch)
        if report.weight:
            total, weight = total + report.loss * report.weight, weight + report.weight
    return total / weight


def sample_text(eng: engine.Engine, shape: DecoderConfig, length: int) -> bytes | None:
    """Text that the trained model writes, on rank 0; the whole model is put together there. Collective."""
    state = eng.full_state_dict()
    if eng.grid.rank:
        return None
    model = Decoder(shape)
    model.load_state_dict(state)
    prompt = b"def "
    return prompt + generate(model, prompt, length)
