"""Mistakes in a user's script, made on two ranks under torchrun: the job ends with one sentence as its last line."""

from pathlib import Path

import pytest

from tests.launch.test_reference_run import run
from tests.warm_python import warm_torchrun

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

import engine

CONFIG = {{
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
}}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, y=None):
        out = self.layers(x).squeeze(-1)
        return out if y is None else {{"loss": (out - y).square().mean()}}


torch.manual_seed(0)
model, batch = Network(), (torch.randn(4, 8), torch.randn(4))
{body}
"""
MISTAKES: dict[str, tuple[str, str]] = {
    "a misspelt key": (
        'engine.initialize(model, CONFIG | {"gradient_cliping": 1.0})',
        "ConfigError: gradient_cliping: unknown key. Did you mean gradient_clipping?",
    ),
    "a grid that does not fit": (
        'engine.initialize(model, CONFIG | {"parallel": {"tensor": 3}})',
        "the world size 2",
    ),
    "batch sizes that do not fit": (
        'engine.initialize(model, CONFIG | {"gradient_accumulation_steps": 3})',
        "train_batch_size",
    ),
    "another key of the engine that it came from": (
        'engine.initialize(model, CONFIG | {"tensor_parallel_size": 2})',
        "ConfigError: tensor_parallel_size: unknown key; the key for it here is parallel.tensor.",
    ),
    "no optimizer": (
        'engine.initialize(model, CONFIG | {"optimizer": None}).train_batch(batch)',
        "name one in the config, or pass optimizer=",
    ),
    "other weights on each rank": (
        "torch.manual_seed(int(__import__('os').environ['RANK']))\n"
        "engine.initialize(Network(), CONFIG | {'train_batch_size': 4})",
        "were given different weights, first in 'layers.0.weight'; build the model with the same seed on every rank",
    ),
    "another configuration on each rank": (
        "rank = int(__import__('os').environ['RANK'])\n"
        "engine.initialize(model, CONFIG | {'gradient_clipping': 1.0 + rank})",
        "ranks were given different",
    ),
    "rows that do not fit": (
        "with engine.initialize(model, CONFIG) as eng:\n    eng.train_batch((torch.randn(3, 8), torch.randn(3)))",
        "has leading dim 3, but a data rank's share has",
    ),
    "no loss": (
        "with engine.initialize(model, CONFIG) as eng:\n    eng.train_batch(torch.randn(4, 8))",
        "a loss is a 0-dim floating tensor",
    ),
    "step before backward": (
        "with engine.initialize(model, CONFIG) as eng:\n    eng.step()",
        "EngineError: step() before backward(): there is no gradient to step with; call backward first.",
    ),
    "a checkpoint that is not there": (
        "with engine.initialize(model, CONFIG) as eng:\n    eng.load_checkpoint('nowhere')",
        "CheckpointError: ",
    ),
    "the model's own forward on a pipeline": (
        "with engine.initialize(model, CONFIG | {'parallel': {'pipeline': 2}}) as eng:\n"
        "    eng.train_batch((torch.randn(8, 8), torch.randn(8)))\n"
        "    eng.module(batch[0])",
        "has no values on this rank",
    ),
    "a parameter that is replaced": (
        "with engine.initialize(model, CONFIG) as eng:\n"
        "    model.layers[0].weight = nn.Parameter(torch.zeros(8, 8))\n"
        "    eng.train_batch(batch)",
        "write into the parameter in place",
    ),
}
ALONE = {
    call: f" is in train_batch, while rank 0 is in {call.partition('(')[0]}: all ranks must call the engine in the "
    "same order, so move its calls out of `if rank == 0:`."
    for call in ("eval_batch(batch)", "predict(batch[0])", "load_checkpoint('run')", "save_checkpoint('run')")
}
"""Calls of the engine on rank 0 alone, and what the watchdog says of them, which acts before the call gives up."""
MISTAKES |= {
    f"{call} on rank 0 alone": (
        "import os\nos.environ['TRINE_TIMEOUT_SECONDS'] = '3'\n"
        "with engine.initialize(model, CONFIG) as eng:\n"
        "    eng.train_batch(batch)\n"
        f"    if eng.grid.rank == 0:\n        eng.{call}\n"
        "    eng.train_batch(batch)",
        sentence,
    )
    for call, sentence in ALONE.items()
}
MISTAKES["save_checkpoint on rank 0, where rank 1 has ended"] = (
    "eng = engine.initialize(model, CONFIG)\n"
    "eng.train_batch(batch)\n"
    "if eng.grid.rank == 0:\n    eng.save_checkpoint('run')",
    "save_checkpoint was called on rank 0, but not on rank 1, where the engine is closed or the script has ended; call",
)
QUICK = ("a misspelt key",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MISTAKES]
)
def test_the_job_ends_with_one_sentence(tmp_path: Path, name: str, warm_python: str) -> None:
    body, sentence = MISTAKES[name]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body=body), encoding="utf-8")
    command = [*warm_torchrun(warm_python), "--standalone", "--nproc_per_node", "2", str(script)]
    done = run(command, tmp_path, 180)
    assert done.returncode == 1, done.stderr
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip(" =-")]
    assert sentence in lines[-1], done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, f"torchrun's own: {done.stderr}"
