"""Script of a site for tests that kill it: trains a small decoder on Python's own sources until a file exists.

python killed_site.py URL NUMBER LOG STOP SECONDS_A_STEP
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import engine
from benchmarks.outer.text import SIZES, corpus, make_model
from engine.models.decoder import loss_sum

ROWS, SITES = 8, 3
OUTER: dict[str, Any] = {
    "sites": SITES, "rule": "quorum", "least": 2, "grace": "adaptive", "period": 20, "wire": "int8", "lease": 5.0,
    "most_steps": 400,
}  # fmt: skip


def config_of(url: str, site: int) -> dict[str, Any]:
    """Returns the configuration of a site, or of the store."""
    return {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "outer": OUTER | {"url": url, "site": site},
    }


def batch_of(site: int, row: int) -> dict[str, torch.Tensor]:
    """Returns the rows of a site from ``row``: a function of both alone."""
    generator = torch.Generator().manual_seed(site * 1_000_003 + row)
    starts = torch.randint(0, len(corpus()) - SIZES.context - 1, (ROWS,), generator=generator)
    rows = corpus()[starts[:, None] + torch.arange(SIZES.context + 1)].long()
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def main() -> None:
    """Trains, and appends a line for each step."""
    url, number, log_path, stop_path, seconds = sys.argv[1:]
    site, log, stop, pause = int(number), Path(log_path), Path(stop_path), float(seconds)
    torch.set_num_threads(1)
    example = batch_of(site, 0)
    config = config_of(url, site) | {"checkpoint": {"folder": str(log.with_suffix(".saved")), "every": 100, "keep": 2}}
    eng = engine.initialize(make_model(), config, loss_fn=loss_sum, example_batch=example)
    eng.load_checkpoint(missing_ok=True)
    assert eng.outer is not None
    with log.open("a") as file:
        while not stop.exists():
            began, waited = time.time(), eng.outer.waited
            report = eng.train_batch(batch_of(site, eng.outer.rows))
            time.sleep(pause)
            line = {
                "began": began, "ended": time.time(), "waited": eng.outer.waited - waited, "loss": report.loss,
                "life": eng.outer.life, "rows": eng.outer.rows, "version": eng.outer.versions[0],
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
            file.flush()
    eng.close()


if __name__ == "__main__":
    main()
