"""A job whose training is compared with that of one process: ``parity.py data=2,tensor=2 STAGE``."""

import sys

import torch.distributed as dist

from engine.models.decoder import loss_sum
from engine.verify import verify
from tests import models

SIZES = {key: int(size) for key, _, size in (part.partition("=") for part in sys.argv[1].split(","))}
ROWS = 16

config = {
    "train_batch_size": ROWS,
    "train_micro_batch_size_per_gpu": 2,
    "parallel": {"data": 1} | SIZES,
    "zero_optimization": {"stage": int(sys.argv[2])},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}},
    "gradient_clipping": 0.25,
}
parity = verify(lambda: models.decoder(layers=4), config, models.batches_for("decoder", ROWS, 3), loss_sum)
if parity is not None and dist.get_rank() == 0:
    print("holds" if parity.holds() else "differs", parity, flush=True)
