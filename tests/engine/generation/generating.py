"""Models that generate, and grids of thread ranks that generate with them."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.engine import Engine
from engine.models.decoder import Decoder, DecoderConfig
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models

WORDS, POSITIONS = models.VOCABULARY, 64
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "initializer_range": 0.3,
}  # fmt: skip


def transformers_model(name: str, layers: int = 2) -> nn.Module:
    """A tiny model of transformers, of four heads and two groups of keys; weights are wide, so that tokens vary."""
    import transformers

    torch.manual_seed(7)
    every: Mapping[str, Mapping[str, Any]] = {
        "Llama": SIZES,
        "Qwen3": {**SIZES, "head_dim": 8},
        "Mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Mistral": {**SIZES, "sliding_window": 4},
        "Mamba": {"vocab_size": WORDS, "hidden_size": 32, "state_size": 4, "initializer_range": 0.3},
        "GPT2": {
            "vocab_size": WORDS, "n_embd": 32, "n_head": 4, "n_positions": POSITIONS, "initializer_range": 0.3,
            "bos_token_id": None, "eos_token_id": None,
        },
    }  # fmt: skip
    key = "n_layer" if name == "GPT2" else "num_hidden_layers"
    config = getattr(transformers, f"{name}Config")(**every[name], **{key: layers})
    config.eos_token_id = config.pad_token_id = None
    made: nn.Module = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))(config)
    return made


def small_decoder() -> nn.Module:
    """The reference decoder with wide weights."""
    model = Decoder(DecoderConfig(vocabulary=WORDS, layers=2, width=32, heads=4, context=POSITIONS))
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def on_grid(
    make: Callable[[], nn.Module],
    parallel: Mapping[str, Any],
    body: Callable[[Engine], Any],
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    **changes: Any,
) -> list[Any]:
    """Results of ``body`` on each rank of a grid of threads."""
    data = parallel.get("data", 1)
    config = {
        "train_batch_size": 2 * data, "train_micro_batch_size_per_gpu": 2, "parallel": parallel,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, **changes,
    }  # fmt: skip
    example = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}

    def rank(world: World) -> Any:
        with engine.initialize(make(), config, loss_fn, example, world=world) as eng:
            return body(eng)

    return run_thread_ranks(prod(parallel.get(axis, 1) for axis in ("data", "tensor", "pipeline", "context")), rank)


def prompts(rows: int = 4, longest: int = 7) -> tuple[Tensor, Tensor]:
    """Prompts of unequal lengths, padded on the left, and their mask."""
    ids = torch.randint(1, WORDS, (rows, longest), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 3] = 0
    return ids * mask, mask
