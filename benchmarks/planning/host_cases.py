"""Twelve configurations that two processors train, and what is predicted for each from one set of rates."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.config import Config, load_config
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.planning.analysis import PlanRequest
from engine.planning.host_step.host_prediction import predict_from_calls, seconds_by_class
from engine.planning.host_step.host_rates import HostRates
from engine.planning.host_step.operator_trace import OperatorCall, trace_operators
from engine.planning.plan import Plan, build_plan
from engine.planning.step_time.prediction import StepTime
from engine.precision.dtypes import make_precision
from engine.program.program import Program

VOCABULARY = 1024
CONTEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCase:
    """A model and how it is trained."""

    family: Literal["decoder", "llama", "gpt2"]
    width: int
    layers: int
    grid: Mapping[str, int] = field(default_factory=dict)
    """Of the section ``parallel``."""
    stage: int = 0
    micro: int = 2
    microbatches: int = 2
    recomputation: str = "none"

    @property
    def world(self) -> int:
        """Ranks."""
        return 2 if self.grid else 1

    @property
    def name(self) -> str:
        """For a row of a table."""
        short = {"data": "dp", "tensor": "tp", "pipeline": "pp"}
        grid = "".join(f"{short[axis]}{size}" for axis, size in self.grid.items()) or "dp1"
        again = ", recomputed" if self.recomputation != "none" else ""
        batches = f"{self.microbatches} x {self.micro} rows"
        return f"{self.family} {self.layers} x {self.width}, {grid}, ZeRO {self.stage}, {batches}{again}"

    def settings(self) -> dict[str, Any]:
        """The JSON of the configuration."""
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.microbatches,
            "parallel": {**self.grid},
            "zero_optimization": {"stage": self.stage},
            "activation_checkpointing": {"mode": self.recomputation},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient_clipping": 1.0,
        }

    def model(self) -> nn.Module:
        """The same weights on every rank."""
        torch.manual_seed(1)
        if self.family == "decoder":
            heads = self.width // 64
            sizes = DecoderConfig(VOCABULARY, self.layers, self.width, heads, CONTEXT)
            return Decoder(sizes)
        return _transformers(self.family, self.width, self.layers).train()

    @property
    def loss_fn(self) -> Any:
        """None: the model has its own."""
        return loss_sum if self.family == "decoder" else None

    def row(self) -> dict[str, Tensor]:
        """Shapes of a microbatch."""
        ids = torch.empty((self.micro, CONTEXT), dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids}

    def batches(self, rank: int) -> Iterator[dict[str, Tensor]]:
        """Random tokens of one data rank, without end."""
        chance = torch.Generator().manual_seed(rank)
        while True:
            ids = torch.randint(0, VOCABULARY, (self.micro * self.microbatches, CONTEXT), generator=chance)
            yield {"input_ids": ids, "labels": ids}

    def planned(self) -> tuple[Program, Plan]:
        """Made without processes."""
        config: Config = load_config(self.settings(), self.world)
        with torch.device("meta"):
            model = self.model()
        program = Program(model, self.loss_fn, make_precision(config, model), torch.device("cpu"))
        return program, build_plan(config, PlanRequest(program, self.row()))

    def traced(self) -> "TracedCase":
        """The plan, and the operators of a microbatch: seconds of work, once for all predictions."""
        program, plan = self.planned()
        return TracedCase(plan=plan, calls=trace_operators(program, plan, self.row()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCase:
    """What a prediction needs of a configuration beside rates."""

    plan: Plan
    calls: tuple[OperatorCall, ...]

    def predict(self, rates: HostRates) -> StepTime:
        """The seconds of a step."""
        return predict_from_calls(self.plan, self.calls, rates)

    def classes(self, rates: HostRates) -> dict[str, float]:
        """Seconds of a microbatch by table, to see what is off."""
        return dict(sorted(seconds_by_class(self.calls, rates).items(), key=lambda item: -item[1]))


def _transformers(family: str, width: int, layers: int) -> nn.Module:
    import transformers

    heads = width // 64
    if family == "llama":
        llama = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=CONTEXT, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(llama)
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=heads, n_positions=CONTEXT, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(gpt2)


CASES = (
    HostCase(family="decoder", width=256, layers=6, micro=4, microbatches=2),
    HostCase(family="llama", width=512, layers=4, recomputation="full"),
    HostCase(family="decoder", width=512, layers=4, grid={"data": 2}),
    HostCase(family="decoder", width=1024, layers=2, grid={"data": 2}, stage=1, microbatches=1),
    HostCase(family="gpt2", width=512, layers=4, grid={"data": 2}, stage=2),
    HostCase(family="llama", width=512, layers=4, grid={"data": 2}, stage=3),
    HostCase(family="decoder", width=256, layers=6, grid={"data": 2}, stage=3, microbatches=4, recomputation="full"),
    HostCase(family="decoder", width=512, layers=4, grid={"tensor": 2}),
    HostCase(family="llama", width=1024, layers=2, grid={"tensor": 2}, microbatches=1),
    HostCase(family="gpt2", width=512, layers=3, grid={"tensor": 2}, recomputation="full"),
    HostCase(family="decoder", width=512, layers=4, grid={"pipeline": 2}, microbatches=4),
    HostCase(family="gpt2", width=256, layers=6, grid={"pipeline": 2}, microbatches=4, recomputation="full"),
)
