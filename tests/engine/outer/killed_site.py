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
from engine.models.decoder import Decoder, DecoderConfig, loss_sum

CONTEXT, ROWS, SITES = 64, 8, 3
OUTER: dict[str, Any] = {
    "sites": SITES, "rule": "quorum", "least": 2, "grace": "adaptive", "period": 20, "wire": "int8", "lease": 5.0,
    "most_steps": 400,
}  # fmt: skip


def make_model() -> Decoder:
    """Returns the decoder with 137 k parameters."""
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocabulary=256, layers=2, width=64, heads=4, context=CONTEXT))


def config_of(url: str, site: int) -> dict[str, Any]:
    """Returns the configuration of a site, or of the store."""
    return {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "outer": OUTER | {"url": url, "site": site},
    }


def text() -> torch.Tensor:
    """Returns the bytes of sixty files of Python's library."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:60]
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)), dtype=torch.int64)


def batch_of(data: torch.Tensor, site: int, row: int) -> dict[str, torch.Tensor]:
    """Returns the rows of a site from ``row``: a function of both alone."""
    generator = torch.Generator().manual_seed(site * 1_000_003 + row)
    starts = torch.randint(0, len(data) - CONTEXT - 1, (ROWS,), generator=generator)
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def main() -> None:
    """Trains, and appends a line for each step."""
    url, site, log, stop, pause = (
        sys.argv[1],
        int(sys.argv[2]),
        Path(sys.argv[3]),
        Path(sys.argv[4]),
        float(sys.argv[5]),
    )
    torch.set_num_threads(1)
    data, model = text(), make_model()
    example = batch_of(data, site, 0)
    config = config_of(url, site) | {"checkpoint": {"folder": str(log.with_suffix(".saved")), "every": 100, "keep": 2}}
    eng = engine.initialize(model, config, loss_fn=loss_sum, example_batch=example)
    eng.load_checkpoint(missing_ok=True)
    assert eng.outer is not None
    with log.open("a") as file:
        while not stop.exists():
            began, waited = time.time(), eng.outer.waited
            report = eng.train_batch(batch_of(data, site, eng.outer.rows))
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
