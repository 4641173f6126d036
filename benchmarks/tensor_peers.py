"""``parallelize_module`` on the models of ``benchmarks.models``, planned as torch's tutorial plans its Llama.

Attention and perceptron become DTensors at their input once, so that the gradients of the products that share it are
added before they are reduced: 4 all-reduces a block. Imported by the ranks of these rows only.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.models import SplitBlock
from benchmarks.parallel_peers import DTensorPeer, Replicated

Styles = dict[str, ParallelStyle]


class LlamaPeer(DTensorPeer):
    """Hugging Face's Llama."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (self._mode.ranks,))
        edges = _edges("model.embed_tokens", "model.norm")
        blocks = {f"model.layers.*.{name}": style for name, style in _llama_block().items()}
        return parallelize_module(model, mesh, edges | blocks)


class FusedPeer(DTensorPeer):
    """nanoGPT's model with query, key and value apart: a plan of DTensor cannot cut one product into three."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (self._mode.ranks,))
        model.h = nn.ModuleList(SplitBlock(block) for block in model.h)  # type: ignore[union-attr]
        blocks = {f"h.*.{name}": style for name, style in _split_block().items()}
        return parallelize_module(model, mesh, _edges("wte", "ln_f") | {"wpe": Replicated()} | blocks)


def _edges(embedding: str, norm: str) -> Styles:
    return {
        embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        norm: Replicated(),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
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


def _split_block() -> Styles:
    return {
        "ln_1": Replicated(),
        "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        "ln_2": Replicated(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
