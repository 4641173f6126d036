"""Tensor parallelism by torch: ``parallelize_module`` with DTensor plans.

Plans follow torch's Llama tutorial: the inputs of attention and MLP become DTensors once, so that the input gradients
of parallel products are added before their all-reduce. That takes 4 all-reduces a block instead of 6.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.loop import OneDataRank
from benchmarks.peers.models import SplitBlock
from engine.models.decoder import Decoder

Styles = dict[str, ParallelStyle]


class DecoderPeer(OneDataRank):
    """Decoder under ``parallelize_module``, with vocabulary-parallel embedding, head and loss, as in torch's tutorial.

    The attention's input becomes a DTensor once, so that input gradients of query, key and value are added before their
    reduction: 4 all-reduces per block instead of 6.
    """

    def step(self, rows: Tensor) -> float | None:
        with loss_parallel():
            return super().step(rows)

    def _wrap(self, model: Decoder) -> nn.Module:
        edges = _model_edges("tokens", "norm", "head") | {"positions": Replicated()}
        return self._parallelized(model, edges, "blocks", _block("norm1", "norm2"))

    def _parallelized(self, model: nn.Module, edges: Styles, blocks: str, block: Styles) -> nn.Module:
        mesh = init_device_mesh("cpu", (self._mode.ranks,))
        return parallelize_module(model, mesh, edges | {f"{blocks}.*.{name}": style for name, style in block.items()})


class Replicated(ParallelStyle):
    """Parameter replicated as a DTensor, since clipping cannot mix plain and distributed gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch types both as returning None, yet takes what they return
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    @staticmethod
    def _enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(given, mesh, (Replicate(),), run_check=False) for given in inputs)

    @staticmethod
    def _leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local()


class LlamaPeer(DecoderPeer):
    """Hugging Face's Llama under ``parallelize_module``."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        edges = _model_edges("model.embed_tokens", "model.norm", "lm_head")
        return self._parallelized(model, edges, "model.layers", _llama_block())


class FusedPeer(DecoderPeer):
    """nanoGPT's model with separate query, key and value, since a DTensor plan cannot shard a fused product."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        model.h = nn.ModuleList(SplitBlock(block) for block in model.h)  # type: ignore[union-attr]
        edges = _model_edges("wte", "ln_f", "lm_head") | {"wpe": Replicated()}
        return self._parallelized(model, edges, "h", _block("ln_1", "ln_2"))


def _model_edges(embedding: str, norm: str, head: str) -> Styles:
    return {
        embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        norm: Replicated(),
        head: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def _llama_block() -> Styles:
    whole: dict[str, Placement] = {"hidden_states": Replicate()}
    return {
        "input_layernorm": Replicated(),
        "self_attn": PrepareModuleInput(input_kwarg_layouts=whole, desired_input_kwarg_layouts=whole),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "post_attention_layernorm": Replicated(),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


def _block(norm1: str, norm2: str) -> Styles:
    return {
        norm1: Replicated(),
        "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        norm2: Replicated(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
