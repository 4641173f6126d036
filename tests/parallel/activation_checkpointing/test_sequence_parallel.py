"""Blocks between tensor ranks that shard the sequence are computed again as they were computed first."""

from functools import partial
from typing import Any

import pytest
import torch

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models
from tests.selection import wide


def losses(config: dict[str, Any], world: World) -> list[float]:
    """Of two steps of two microbatches; the first forward of a kind of inputs is watched."""
    torch.manual_seed(0)
    with engine.initialize(models.decoder, config, loss_sum, world=world) as eng:
        return [eng.train_batch(batch).loss for batch in models.batches_for("decoder", 4, 2)]


@pytest.mark.parametrize("overlap", ["off", wide("chunks")])
@pytest.mark.parametrize("mode", ["selective", wide("full")])
def test_a_watched_forward_is_recomputed_as_it_ran(mode: str, overlap: str) -> None:
    settings: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "parallel": {"tensor": 2, "sequence_parallel": True, "overlap": overlap},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.25,
        "kernels": "reference",
    }
    again = run_thread_ranks(2, partial(losses, settings | {"activation_checkpointing": {"mode": mode}}))
    kept = run_thread_ranks(2, partial(losses, settings))
    assert again == kept
