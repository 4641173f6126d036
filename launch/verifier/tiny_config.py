"""A Hugging Face configuration with the parts of a model and the widths of a toy.

What decides on the path of the forward stays: activations, norms, biases, ties, kinds of attention, whether keys are
shared by heads, the pattern of layers. Widths, numbers of heads, experts and layers, vocabulary and positions shrink.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

HEAD = 8
"""Elements of a head; rotary embeddings take halves of it."""
VOCABULARY, POSITIONS, WINDOW = 128, 64, 8
CHOSEN = 2
"""Experts that a token goes to, at most."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers")  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
          "decoder_attention_heads")  # fmt: skip
_KEYS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "lru_width")
_INNER = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
          "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")  # fmt: skip
_OF_A_HEAD = ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "kv_channels", "qk_head_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_FIXED: Mapping[str, int] = MappingProxyType({
    "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "n_positions": POSITIONS, "n_ctx": POSITIONS,
    "max_sequence_length": POSITIONS, "q_lora_rank": 2 * HEAD, "kv_lora_rank": 2 * HEAD,
})  # fmt: skip
_MOST: Mapping[str, int] = MappingProxyType({
    "num_experts_per_tok": CHOSEN, "experts_per_token": CHOSEN, "moe_top_k": CHOSEN, "moe_topk": CHOSEN,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": WINDOW,
    "window_size": WINDOW, "attention_window": WINDOW, "num_nextn_predict_layers": 0,
})  # fmt: skip


def shrink(config: Any, tensor: int, layers: int) -> None:
    """Shrink a configuration in place, so that ``tensor`` ranks can share its heads and experts.

    Args:
        layers: as many blocks, or as it has.
    """
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            shrink(inner, tensor, layers)
    found = _Sizes(config)
    before = found.first(_LAYERS)
    keys, heads = _heads(found, tensor)
    width = heads * HEAD
    found.set(_HEADS, heads)
    found.set(_KEYS, keys)
    found.set(_WIDTHS, width)
    found.set(_INNER, 2 * width)
    found.set(_OF_A_HEAD, HEAD)
    found.set(_LAYERS, min(before or layers, layers))
    found.set(_EXPERTS, max(2 * CHOSEN, tensor))
    for name, value in _FIXED.items():
        found.set((name,), value)
    for name, value in _MOST.items():
        found.set((name,), value, most=True)
    _shorten_lists(config, before, min(before or layers, layers))
    _drop_nothing(config)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(token := getattr(config, name, None), int) and token >= VOCABULARY:
            setattr(config, name, VOCABULARY - 1)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


class _Sizes:
    """The numbers of a configuration; a name that it does not have, or that is None there, is left alone."""

    def __init__(self, config: Any) -> None:
        self._config, self._known = config, set(config.to_dict())

    def first(self, names: tuple[str, ...]) -> int | None:
        values = (getattr(self._config, name, None) for name in names if name in self._known)
        return next((value for value in values if _is_number(value)), None)

    def set(self, names: tuple[str, ...], value: int, most: bool = False) -> None:
        """Set those that are there; ``most``: only where they are larger."""
        for name in names:
            before: Any = getattr(self._config, name, None) if name in self._known else None
            if _is_number(before) and not (most and before <= value):
                setattr(self._config, name, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _heads(found: _Sizes, tensor: int) -> tuple[int, int]:
    """(key heads, query heads): equal where they were, else two query heads for each key head."""
    heads, keys = found.first(_HEADS) or 1, found.first(_KEYS)
    least = max(2, tensor)
    if keys is None or keys == heads:
        return least, least
    return (1, least) if keys == 1 else (least, 2 * least)


def _drop_nothing(config: Any) -> None:
    """Without dropout, whose masks inside sharded layers are not those of one process."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _shorten_lists(config: Any, before: int | None, layers: int) -> None:
    """Lists with an entry for each layer lose those of the layers that are gone."""
    for name, value in config.to_dict().items():
        if isinstance(value, list) and before is not None and len(value) == before and before > layers:
            setattr(config, name, value[:layers])
