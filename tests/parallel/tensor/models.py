"""Tiny models in the shapes that tensor parallelism has to know."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder, DecoderConfig

LENGTH = 8
VOCABULARY = 61  # divided by no tensor size


def decoder(tied: bool = False, dropout: float = 0.0, vocabulary: int = VOCABULARY) -> nn.Module:
    """The reference decoder with two blocks."""
    torch.manual_seed(7)
    config = DecoderConfig(
        vocabulary=vocabulary, layers=2, width=32, heads=4, context=LENGTH, tied=tied, dropout=dropout
    )
    return Decoder(config)


def llama_sizes(kv_heads: int, **more: Any) -> dict[str, Any]:
    """Sizes that Llama and its relatives share."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": LENGTH,
        "pad_token_id": None, "use_cache": False, **more,
    }  # fmt: skip


def llama(kv_heads: int = 2) -> nn.Module:
    """Hugging Face Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**llama_sizes(kv_heads)))


def qwen2() -> nn.Module:
    """Biases on query, key and value."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    return Qwen2ForCausalLM(Qwen2Config(**llama_sizes(1)))


def qwen3(tied: bool = False) -> nn.Module:
    """A norm on each head of query and key."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    return Qwen3ForCausalLM(Qwen3Config(**llama_sizes(2, head_dim=8, tie_word_embeddings=tied)))


def stablelm() -> nn.Module:
    """Attention that computes with its numbers of heads; rotary positions on a part of each head."""
    from transformers import StableLmConfig, StableLmForCausalLM

    torch.manual_seed(7)
    return StableLmForCausalLM(StableLmConfig(**llama_sizes(2)))


def gemma2() -> nn.Module:
    """A scaled embedding with a padding row, tied; soft-capped logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(7)
    sizes = llama_sizes(2, head_dim=8, query_pre_attn_scalar=8) | {"pad_token_id": 0}
    return Gemma2ForCausalLM(Gemma2Config(**sizes))


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Hugging Face GPT-2: fused Conv1D thirds, tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, use_cache=False,
                   bos_token_id=0, eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    )  # fmt: skip


MODELS: dict[str, Any] = {
    "decoder": (decoder, {}),
    "decoder-tied": (decoder, {"tied": True}),
    "llama-kv2": (llama, {"kv_heads": 2}),
    "llama-kv1": (llama, {"kv_heads": 1}),
    "qwen2-kv1": (qwen2, {}),
    "qwen3": (qwen3, {}),
    "qwen3-tied": (qwen3, {"tied": True}),
    "stablelm": (stablelm, {}),
    "gemma2": (gemma2, {}),
    "gpt2": (gpt2, {}),
}


def build(name: str) -> nn.Module:
    """One of ``MODELS`` in training mode, with key biases and the like away from zero."""
    function, options = MODELS[name]
    model: nn.Module = function(**options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.train()


def tokens(rows: int = 3, seed: int = 5) -> Tensor:
    """Random ids, the same on all ranks."""
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
