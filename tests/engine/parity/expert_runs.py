"""Runs of a small mixture of experts whose experts data ranks share, on thread ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import engine
from engine.engine import Engine
from engine.parallel.comm.threads import run_thread_ranks

ROWS, TOKENS, WORDS, STEPS = 8, 12, 64, 3
CONFIG: Mapping[str, Any] = {
    "train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
}  # fmt: skip
GRIDS: Mapping[str, dict[str, Any]] = {
    "ep2": {"data": 2, "expert": 2},
    "dp4-ep2": {"data": 4, "expert": 2},
    "ep4": {"data": 4, "expert": 4},
    "ep2-tp2": {"data": 2, "expert": 2, "tensor": 2},
    "ep2-pp2": {"data": 2, "expert": 2, "pipeline": 2},
}


def mixture(**changes: Any) -> nn.Module:
    """A small Qwen3-MoE of two layers and eight experts."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 8,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True, "output_router_logits": True,
        "router_aux_loss_coef": 0.01, "max_position_embeddings": 64,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | changes))


def own_batch(eng: Engine, step: int) -> dict[str, Tensor]:
    """The rows of this data rank; microbatch i of rank r of n is row i * n + r, so that all grids add the same."""
    rows = eng.config.train_batch_size
    assert rows is not None
    ids = torch.randint(0, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(step))
    own = ids.view(-1, eng.grid.row_ranks, TOKENS)[:, eng.grid.row_rank]
    return {"input_ids": own, "labels": own}


@dataclass(frozen=True, slots=True)
class Run:
    """Result of a few steps."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    extra: list[Any]
    """Results of ``after`` on each rank."""


def run(
    parallel: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    make: Callable[[], nn.Module] = mixture,
    after: Callable[[Engine], Any] | None = None,
    batch: Callable[[Engine, int], Any] = own_batch,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    steps: int = STEPS,
) -> Run:
    """Trains on thread ranks; ``changes``: of ``CONFIG``."""

    def rank(world: Any) -> tuple[list[Any], dict[str, Tensor], Any]:
        example = {name: torch.zeros(1, TOKENS, dtype=torch.long) for name in ("input_ids", "labels")}
        config = {**CONFIG, **(changes or {}), "parallel": parallel}
        with engine.initialize(make(), config, loss_fn, example, world=world) as eng:
            reports = [eng.train_batch(batch(eng, step)) for step in range(steps)]
            return reports, eng.full_state_dict(), after(eng) if after is not None else None

    ranks = prod(int(parallel.get(axis, 1)) for axis in ("data", "tensor", "pipeline"))
    found = run_thread_ranks(ranks, rank)
    reports = found[0][0]
    return Run(
        [each.loss for each in reports], [each.grad_norm for each in reports], found[0][1], [f[2] for f in found]
    )


def assert_equal(found: Run, wanted: Run, loss: float = 1e-6, norm: float = 1e-5, weight: float = 1e-5) -> None:
    """Losses and norms are equal relatively, weights absolutely."""
    assert found.losses == pytest.approx(wanted.losses, rel=loss, abs=0)
    assert found.norms == pytest.approx(wanted.norms, rel=norm, abs=0)
    assert found.weights.keys() == wanted.weights.keys()
    apart = {name: float((found.weights[name] - each).abs().max()) for name, each in wanted.weights.items()}
    assert max(apart.values()) <= weight, max(apart, key=lambda name: apart[name])
