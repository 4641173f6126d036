"""Models besides the reference decoder: Hugging Face's Llama and mixtures, and nanoGPT-style blocks.

All are called with tokens [B, L] and return logits [B, L, V]; all have the sizes of a ``DecoderConfig``. Labels may
come with the tokens, but the loss is made outside.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.decoder import DecoderConfig

Name = Literal["llama", "fused", "mixture", "dense", "experts"]
TENSOR_MODELS: tuple[Name, ...] = ("llama", "fused")
EXPERTS, CHOSEN = 8, 2
"""Number of experts per layer, and per token."""


def make_llama(config: DecoderConfig) -> nn.Module:
    """Makes ``LlamaForCausalLM`` with as many key heads as heads, and an MLP of 11/4 of the width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        """Asked for logits alone: the loss is that of all rows."""

        def forward(
            self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
        ) -> Tensor:
            logits: Tensor = super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            return logits

    sizes = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.width * 11 // 4,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.context,
    )
    return Llama(sizes)


def mixture_config(config: DecoderConfig, **changes: Any) -> Any:
    """Returns the configuration of Qwen3-MoE with these sizes; an expert is twice as wide as the hidden size."""
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": CHOSEN * 2 * config.width,
        "moe_intermediate_size": 2 * config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.width // config.heads,
        "max_position_embeddings": config.context,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**sizes | changes)


def make_mixture(config: DecoderConfig, dense: bool) -> nn.Module:
    """Makes ``Qwen3MoeForCausalLM``; ``dense``: with MLPs of the size of a token's experts instead."""
    from transformers import Qwen3MoeForCausalLM

    class Mixture(Qwen3MoeForCausalLM):  # type: ignore[no-untyped-call]
        """Mixture that returns logits alone."""

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            logits: Tensor = super().forward(input_ids=input_ids, use_cache=False).logits
            return logits

    return Mixture(mixture_config(config, mlp_only_layers=list(range(config.layers)) if dense else []))


class ExpertLayer(nn.Module):
    """Model of one layer of experts between an embedding and a head."""

    def __init__(self, config: DecoderConfig) -> None:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        sizes = mixture_config(config)
        sizes._experts_implementation = "eager"
        self.mlp = Qwen3MoeSparseMoeBlock(sizes)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.mlp.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        logits: Tensor = self.head(x + self.mlp(x))
        return logits


def make(name: Name, config: DecoderConfig) -> nn.Module:
    """Makes the model ``name`` with the sizes of ``config``."""
    if name in ("mixture", "dense"):
        return make_mixture(config, name == "dense")
    return make_llama(config) if name == "llama" else ExpertLayer(config) if name == "experts" else Fused(config)


class FusedBlock(nn.Module):
    """nanoGPT block: one product for query, key and value, with the head size computed from the input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        self.n_head = config.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, L, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (part.view(B, L, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(heads.transpose(1, 2).reshape(B, L, C))
        y: Tensor = x + self.down(functional.gelu(self.up(self.ln_2(x))))
        return y


class SplitAttention(nn.Module):
    """Attention with three products, equal in results to the fused one of a ``FusedBlock``."""

    def __init__(self, fused: FusedBlock) -> None:
        super().__init__()
        width = fused.c_proj.in_features
        self.head = width // fused.n_head
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        with torch.no_grad():
            weights, biases = fused.c_attn.weight.chunk(3), fused.c_attn.bias.chunk(3)
            for layer, weight, bias in zip((self.query, self.key, self.value), weights, biases, strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
        self.output = fused.c_proj

    def forward(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        q, k, v = (f(x).view(B, L, -1, self.head).transpose(1, 2) for f in (self.query, self.key, self.value))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.output(heads.transpose(1, 2).reshape(B, L, -1))
        return y


class SplitBlock(nn.Module):
    """``FusedBlock`` with separate query, key and value layers."""

    def __init__(self, fused: FusedBlock) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.up, self.down = fused.ln_1, fused.ln_2, fused.up, fused.down
        self.attention = SplitAttention(fused)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        y: Tensor = x + self.down(functional.gelu(self.up(self.ln_2(x))))
        return y


class Fused(nn.Module):
    """nanoGPT's model without the tie of embedding and head, which DTensor does not support."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocabulary, config.width), nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(FusedBlock(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits
