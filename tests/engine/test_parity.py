"""Any grid gives the losses, norms and weights of one process (the promise of the project)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from engine.decoder import loss_sum
from engine.verify import Parity, verify
from tests import models

RunRanks = Callable[..., list[Any]]

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": models.decoder,
    "decoder tied": partial(models.decoder, tied=True),
    "decoder dropout": partial(models.decoder, dropout=0.2),
    "llama": models.llama,
    "gpt2": models.gpt2,
    "nano": models.nano,
}


def config_for(dp: int, stage: int, **changes: Any) -> dict[str, Any]:
    """Eight microbatches of two rows in all, clipping active."""
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2 if dp < 4 else 1,
        "parallel": {"data": dp},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000},
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
        "gradient_clipping": 0.5,
    } | changes


def train_both(name: str, config: dict[str, Any]) -> Parity | None:
    """Body of a rank."""
    loss_fn = loss_sum if name.startswith("decoder") else None
    return verify(MODELS[name], config, models.batches_for(name.split()[0], 16), loss_fn)


def parity(run_ranks: RunRanks, name: str, config: dict[str, Any], dp: int) -> Parity:
    """Compare on ``dp`` ranks; rank 0 has the result."""
    result = run_ranks(train_both, dp, name, config)[0]
    assert isinstance(result, Parity)
    return result


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_fp32_equals_one_process(run_ranks: RunRanks, name: str, dp: int, stage: int) -> None:
    result = parity(run_ranks, name, config_for(dp, stage), dp)
    print(result)
    assert result.holds(), str(result)
    assert all(norm > 0.5 for norm in result.reference.norms), "clipping must be active"
