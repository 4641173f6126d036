"""Successive halving next to trials that all train to their ends: updates, and the learning rate that wins.

    python -m benchmarks sweep [--updates 27] [--write-figures]

A decoder learns sequences with nine learning rates. Optuna prunes all but the best third after 3 and after 9 updates.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import engine
from benchmarks.harness.figures import record_cells, render_cells
from engine.models.decoder import Decoder, DecoderConfig, loss_sum

RATES = tuple(10 ** (-4.5 + 0.375 * index) for index in range(9))
ROWS, LENGTH, WORDS = 8, 32, 64
KEY = "optimizer.params.lr"
HALVING, ALL = "successive halving", "all to their ends"
PRUNERS: Mapping[str, Any] = {
    HALVING: {"type": "successive_halving", "params": {"min_resource": 3, "reduction_factor": 3}},
    ALL: "nop",
}


def batch_of(step: int) -> dict[str, Tensor]:
    """Returns sequences in which each word follows from the one before it."""
    words = torch.randint(0, WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    for _ in range(LENGTH):
        words = torch.cat([words, (5 * words[:, -1:] + 3) % WORDS], 1)
    return {"input_ids": words[:, :-1], "labels": words[:, 1:]}


def sweep(pruner: Any, updates: int, folder: Path) -> Any:
    """Trains the trials of a sweep; returns it."""
    made = engine.Sweep(
        {
            "space": {KEY: {"choices": list(RATES)}}, "grid": True, "metric": None, "pruner": pruner,
            "journal": str(folder / "journal"),
        }
    )  # fmt: skip
    config = {"train_batch_size": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    for trial in made:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(vocabulary=WORDS, layers=2, width=64, heads=4, context=LENGTH))
        with trial.initialize(model, config, loss_sum) as eng:
            while eng.step_count < updates and not trial.should_prune():
                report = eng.train_batch(batch_of(eng.step_count))
                trial.report(report.loss, report.step)
    return made


def measure(updates: int) -> dict[tuple[str, str], str]:
    """Returns the cells of the table."""
    cells = {}
    for name, pruner in PRUNERS.items():
        with TemporaryDirectory() as folder:
            made = sweep(pruner, updates, Path(folder))
            rows, best = made.rows(), made.best()
            for row in sorted(rows, key=lambda row: float(row.values[KEY])):
                won = ", wins" if row.number == best.number else ""
                cells[f"{row.values[KEY]:.1e}", name] = f"{row.updates} updates, loss {row.value:.3f}{won}"
            cells["all", name] = f"{sum(row.updates for row in rows)} updates"
    return cells


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the figure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=27, help="updates of a trial that is not pruned")
    parser.add_argument("--write-figures", action="store_true", help="keep the table, and show it")
    asked = parser.parse_args(command)
    torch.set_num_threads(1)
    cells = measure(asked.updates)
    print(render_cells("learning rate", cells))
    if asked.write_figures:
        record_cells("sweep", "learning rate", cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
