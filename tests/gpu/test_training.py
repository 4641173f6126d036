"""The promises of training, on one GPU with NCCL."""

from typing import Any

import pytest
import torch

import engine
from engine.models.decoder import loss_sum
from engine.verify import verify
from tests import models
from tests.engine.parity.test_parity import config_for

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_matmul() -> None:
    """TF32 would hide in the comparison."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("stage", [0, 1])
def test_fp32_equals_one_process(stage: int) -> None:
    result = verify(models.decoder, config_for(1, stage), models.batches_for("decoder", 16), loss_sum)
    assert result is not None and result.holds(), str(result)


@pytest.mark.parametrize("name", ["llama", "gpt2", "nano"])
def test_bf16_follows_plain_torch(name: str) -> None:
    config = config_for(1, 1, bf16={"enabled": True})
    result = verify(getattr(models, name), config, models.batches_for(name, 16))
    assert result is not None and result.loss <= 5e-5, str(result)


def test_dropout_leaves_the_generators_alone() -> None:
    config: dict[str, Any] = config_for(1, 1)
    batch = models.batches_for("decoder", 16, 1)[0]
    with engine.initialize(models.decoder(dropout=0.3), config, loss_fn=loss_sum) as eng:
        before = torch.cuda.get_rng_state(eng.device)
        losses = [eng.eval_batch(batch).loss, eng.train_batch(batch).loss]
        assert torch.equal(torch.cuda.get_rng_state(eng.device), before)
        assert losses[0] != losses[1], "dropout acts in training"
        assert all(parameter.is_cuda for parameter in eng.module.parameters())
