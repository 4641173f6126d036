"""Every model type of the installed transformers that has a language head, built small from its configuration class.

The types are enumerated, and sizes are found by what their keys are called: a type that a later version adds is tried
without a line here.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

LAYERS, VOCABULARY, LENGTH = 2, 96, 24
MOST_PARAMETERS = 2_000_000
"""A model with more has sizes that the rules do not know."""
TASKS: Mapping[str, str] = MappingProxyType(
    {
        "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    }
)
_KEY_HEADS = r"(num_)?key_value_heads|num_kv_heads|n_head_kv|num_query_groups|(encoder|decoder)_key_value_heads"
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?|(src|tgt|n|text|decoder|encoder)_vocab_size|vocabulary_size", VOCABULARY),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|seq_length|max_length", 64),
    (r"model_max_length|max_sequence_length|original_max_position_embeddings", 64),
    (r".*(layer_ids|_interval|_freq|_step|_every|_offset|_period)", 0),  # kept
    (r"(num|n)_(hidden_)?layers?|(num_)?(encoder|decoder)_layers|num_(entity_)?hidden_layers|depth", LAYERS),
    (_KEY_HEADS, 2),
    (r"mamba_(n|num)_heads", 8),
    (r"mamba_d_head|mamba_expand|num_heads_per.*", 0),  # kept
    (r".*(attention_heads|num_heads)|n_heads?|(encoder|decoder)_heads|num_n_heads|.*_n_heads", 4),
    (r"(moe|expert|shared|shared_expert)_?(intermediate|ffn_hidden)_size|.*expert.*(intermediate|hidden|ffn)\w*", 16),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|feedforward\w*)|d_ff|n_inner|d_inner|dff|ffn_embed_dim", 48),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_(top)?k|num_selected_experts|moe_topk|num_experts_per_token|top_k", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group", 1),
    (r"head_dim|d_kv|kv_channels|d_head|.*_head_dim|qk_nope_head_dim|v_head_dim|attention_head_dim|head_size", 8),
    (r"rotary_dim", 4),
    (r"adapter_(in|out)_dim|adapter_input_size", 32),
    (r"(q|kv|o)_lora_rank|embedding_size|lru_width", 16),
    (r"hidden_size|d_model|n_embd|(word_)?embed(ding)?_(proj_)?dim|emb_dim|dim|width|.*_hidden_size|d_embed", 32),
)


@dataclass(frozen=True, slots=True)
class ModelType:
    """A model type of transformers with one head."""

    name: str
    task: str
    head: str
    """Class of the model with its head."""

    def __str__(self) -> str:
        return f"{self.name} ({self.task})"


def model_types() -> Iterator[ModelType]:
    """All of the installed version."""
    from transformers.models.auto import modeling_auto

    for task, mapping in TASKS.items():
        for name, heads in getattr(modeling_auto, mapping).items():
            yield ModelType(name, task, heads if isinstance(heads, str) else heads[0])


def build(kind: ModelType, adjust: Callable[[Any], None] | None = None, most: int = MOST_PARAMETERS) -> nn.Module:
    """The small model with weights from one seed, without dropout; ``adjust`` changes its configuration further.

    Raises:
        ValueError: the rules do not know its sizes.
    """
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"  # a configuration that wants a file of the hub is not alone
    head = getattr(transformers, kind.head)
    torch.manual_seed(7)
    with torch.device("meta"):
        size = sum(p.numel() for p in head(_adjusted(kind, adjust)).parameters())
    if size > most:
        raise ValueError(f"{size:,} parameters, so its sizes have other names")
    torch.manual_seed(7)
    model: nn.Module = head(_adjusted(kind, adjust)).train()
    return model


def _adjusted(kind: ModelType, adjust: Callable[[Any], None] | None) -> Any:
    from transformers import CONFIG_MAPPING

    config = _small(CONFIG_MAPPING[kind.name])
    if adjust is not None:
        adjust(config)
    return config


def _small(config_class: Any) -> Any:
    defaults = config_class()
    config = config_class(**_changes(defaults))
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # a configuration of a published model has one
    return config


def _changes(config: Any) -> dict[str, Any]:
    """Values by key: sizes, no dropout, token ids inside the vocabulary, and the same for the parts inside."""
    given = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    parts = getattr(config, "sub_configs", {})
    found: dict[str, Any] = {name: _changes(part) for name in parts if (part := given.pop(name, None)) is not None}
    for name, value in given.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif isinstance(value, int) and re.search(r"token_(id|index)|_token$|(eo|bo)[ia]_", name):
            found[name] = value if value < VOCABULARY else 1
        elif (name, value) in (("num_experts_per_tok", 1), ("qk_rope_head_dim", 0)):
            found[name] = value  # code has another form for these
        elif isinstance(value, int) and (size := _size(name)):
            found[name] = 4 if re.fullmatch(_KEY_HEADS, name) and value == given.get("num_attention_heads") else size
        elif isinstance(value, list | tuple) and len(value) > LAYERS and len(value) == _depth(given):
            found[name] = [value[0], next((other for other in value if other != value[0]), value[1])]
    return found


def _size(name: str) -> int:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), 0)


def _depth(given: Mapping[str, Any]) -> int:
    return next((value for name, value in given.items() if _size(name) == LAYERS and isinstance(value, int)), 0)


def text(rows: int, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Ids and labels for each step; no id has a meaning, as the padding of a model may be 0 to 2."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(4, VOCABULARY, (rows, LENGTH), generator=generator) for _ in range(steps)]
    return [{"input_ids": one, "labels": one.clone()} for one in ids]
