"""Live storages of a real rank in a steady step, next to the forecast of a dry run of its plan. Bodies of ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

import engine
from engine.build.request import Request
from engine.dry_run.dry_run_rank import DryRunRank
from engine.dry_run.rank_forecast import RankForecast, forecast_of
from engine.engine import Engine
from engine.kernels.dispatch import Kernels
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.pipeline.runtime.executor import Executor
from engine.planning.activation_memory import LiveStorages
from engine.planning.plan import Plan
from engine.program.batch import Batch
from engine.step.runtime import RankRuntime

ROWS, LENGTH, WIDTH, VOCABULARY, LAYERS = 2, 48, 32, 96, 4
STEPS = 3


def decoder() -> nn.Module:
    """The reference decoder."""
    return Decoder(DecoderConfig(vocabulary=VOCABULARY, layers=LAYERS, width=WIDTH, heads=4, context=LENGTH))


def hugging_face(name: str, **sizes: Any) -> nn.Module:
    """A model of transformers with random weights."""
    import transformers

    build = getattr(transformers, name)
    made: nn.Module = build(build.config_class(vocab_size=VOCABULARY, **sizes)).train()
    return made


GROUPED: Mapping[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "decoder": decoder,
    "llama": lambda: hugging_face("LlamaForCausalLM", **GROUPED),
    "gpt2": lambda: hugging_face(
        "GPT2LMHeadModel", n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    ),
    "t5": lambda: hugging_face(
        "T5ForConditionalGeneration", d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=LAYERS // 2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    ),
    "mixtral": lambda: hugging_face(
        "MixtralForCausalLM", **GROUPED, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip
SHOWN_WHOLE: dict[str, Callable[[], nn.Module]] = {
    "bloom": lambda: hugging_face("BloomForCausalLM", hidden_size=WIDTH, n_layer=LAYERS, n_head=4)
}
"""Families whose code runs on tensors that look whole on tensor ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A grid, and how the model runs on it."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int = 4
    stage: int = 0
    reduce: str = "step"
    recompute: Mapping[str, Any] | None = None
    sequence: bool = False
    bf16: bool = False

    @property
    def world(self) -> int:
        """Its ranks."""
        return self.dp * self.tp * self.pp * self.cp

    def settings(self) -> dict[str, Any]:
        """Its configuration."""
        parallel: dict[str, Any] = {"data": self.dp, "tensor": self.tp, "pipeline": self.pp}
        if self.cp > 1:
            parallel["context"] = self.cp
        if self.pp > 1:
            parallel |= {"schedule": self.schedule, "virtual_stages": self.virtual}
        if self.tp > 1:
            parallel |= {"sequence_parallel": self.sequence, "prove_plan": False, "check_replicas": False}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.microbatches,
            "parallel": parallel,
            "zero_optimization": {"stage": self.stage, "reduce": self.reduce, "reduce_bucket_size": 20_000},
            "activation_checkpointing": dict(self.recompute or {"mode": "none"}),
            "bf16": {"enabled": self.bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }


class PeakPair(NamedTuple):
    """Most live bytes of a rank above its state, in a step."""

    predicted: int
    measured: int
    action: str
    """Where the prediction has its peak."""

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measured bytes."""
        return self.predicted / self.measured - 1


def batch_of(rows: int, seed: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Tokens, which are their own labels."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def forecast_rank(
    model: nn.Module, plan: Plan, rank: int, request: Request, example: Batch, kernels: Kernels | None = None
) -> RankForecast:
    """The forecast of one rank alone; ``kernels``: of a device that is not here."""
    return forecast_of(plan, rank, DryRunRank(model, plan, rank, request, example, kernels).step())


def compare_peaks(family: str, way: Way) -> PeakPair:
    """Body of a rank: its predicted and its measured peak."""
    torch.manual_seed(5)
    build, loss_fn = (FAMILIES | SHOWN_WHOLE)[family], loss_sum if family == "decoder" else None
    model, spare = build(), build()
    eng = engine.initialize(model, way.settings(), loss_fn=loss_fn, example_batch=batch_of(ROWS, 0))
    forecast = forecast_rank(spare, eng.plan, eng.grid.rank, Request(loss_fn), batch_of(ROWS, 0))
    measured = measured_peak(eng, way)
    eng.close()
    return PeakPair(forecast.peak.bytes, measured, forecast.peak.action)


def measured_peak(eng: Engine, way: Way, length: int = LENGTH) -> int:
    """Most live bytes from the first action to the last reduction of a steady step, without state."""
    runtime = eng._runtime
    buckets = (*runtime.buckets, *runtime.frozen)
    live = LiveStorages(lambda: sum(flat.params.untyped_storage().nbytes() for flat in buckets if flat.sharded))
    runtime.on_host.observer = live.leave_out
    batches = [batch_of(ROWS * way.microbatches, 10 * step + eng.grid.coord().dp, length) for step in range(STEPS)]
    with live, _noting(live) as peaks:
        for batch in batches:
            eng.train_batch(batch)
            for state in eng.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        live.leave_out(value)
    return peaks[-1]


@contextmanager
def _noting(live: LiveStorages) -> Iterator[list[int]]:
    """The peak of each step, from the first action to the end of the reductions."""
    peaks: list[int] = []
    run, finish = Executor.run, RankRuntime.finish

    def marked(self: Executor, *given: Any) -> None:
        live.mark()
        run(self, *given)

    def noted(self: RankRuntime, reduced: bool = False) -> None:
        finish(self, reduced)
        peaks.append(live.peak)

    Executor.run, RankRuntime.finish = marked, noted  # type: ignore[method-assign, assignment]
    try:
        yield peaks
    finally:
        Executor.run, RankRuntime.finish = run, finish  # type: ignore[method-assign]
