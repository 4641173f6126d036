"""A machine without Triton: everything imports and trains, and who insists on kernels is told."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import engine
from engine.models.decoder import loss_sum
from tests import models

settings = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
losses = []
for kernels in ("auto", "reference"):
    torch.manual_seed(0)
    with engine.initialize(models.decoder(), settings | {"kernels": kernels}, loss_fn=loss_sum) as eng:
        batch = models.batches_for("decoder", rows=4, steps=1)[0]
        losses.append(eng.train_batch(batch).loss)
print(losses)
assert abs(losses[0] - losses[1]) <= 1e-6 * losses[0], losses
try:
    engine.initialize(models.decoder(), settings | {"kernels": "triton"}, loss_fn=loss_sum)
except engine.ConfigError as error:
    print(error)
"""


def test_training_needs_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "kernels 'triton' on cpu: Triton kernels need a GPU and the package triton" in done.stdout
