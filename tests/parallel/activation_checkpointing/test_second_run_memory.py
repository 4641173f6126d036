"""A block that runs again in backward leaves no activation behind: the step ends with what one without it ends with."""

from functools import partial
from typing import Any

import pytest
import torch

import engine
from engine.parallel.comm.threads.thread_backend import run_thread_ranks
from engine.parallel.comm.world import World
from engine.planning.activation_memory.live_storages import LiveStorages
from tests.engine.rehearsal.measured_peak import LENGTH, VOCABULARY, hugging_face
from tests.selection import wide


def left_by_a_step(mode: str, world: World) -> int:
    """Bytes of tensors that the second step makes and that outlive it."""
    torch.manual_seed(0)
    model = hugging_face(
        "GptOssForCausalLM", hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "parallel": {"tensor": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "activation_checkpointing": {"mode": mode},
        "kernels": "reference",
    }
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    with engine.initialize(model, config, world=world) as eng:
        eng.train_batch(batch)
        with LiveStorages() as live:
            eng.train_batch(batch)
        return int(live.bytes)


@pytest.mark.parametrize("mode", ["selective", wide("full")])
def test_a_second_run_that_stops_inside_of_sharded_experts_leaves_nothing(mode: str) -> None:
    again = run_thread_ranks(2, partial(left_by_a_step, mode))
    kept = run_thread_ranks(2, partial(left_by_a_step, "none"))
    assert again == kept
