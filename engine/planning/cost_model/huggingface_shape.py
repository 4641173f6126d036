"""Sizes of a decoder from a ``config.json`` of Hugging Face, for families with blocks like those of Llama or GPT-2."""

from collections.abc import Mapping
from typing import Any

from engine.planning.cost_model.workload import DecoderShape

GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "smollm3", "granite", "stablelm")
"""Model types whose MLP has a gate."""
PLAIN = ("gpt2", "gpt_neox", "opt", "gpt_neo", "bloom", "gptj", "phi", "starcoder2")
SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
}
"""Our names -> those of the families."""


def is_model_config(raw: object) -> bool:
    """A JSON object that describes a model, not a run of this engine."""
    return isinstance(raw, Mapping) and any(key in raw for key in ("model_type", "architectures", *SIZES["width"]))


def shape_of(raw: Mapping[str, Any]) -> DecoderShape | None:
    """The decoder that a configuration describes; None for families whose blocks are of other kinds."""
    family = raw.get("model_type")
    found = {name: next((raw[key] for key in keys if raw.get(key)), None) for name, keys in SIZES.items()}
    found["context"] = found["context"] or 2048
    known = {name: value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}
    if family not in (*GATED, *PLAIN) or len(known) < len(SIZES):
        return None
    hidden = raw.get("intermediate_size") or raw.get("n_inner") or raw.get("ffn_dim")
    return DecoderShape(
        **known,
        kv_heads=raw.get("num_key_value_heads"),
        head_width=raw.get("head_dim"),
        hidden=hidden,
        gated=family in GATED,
        tied=bool(raw.get("tie_word_embeddings", family in ("gpt2", "opt", "bloom", "gemma", "gemma2"))),
    )
