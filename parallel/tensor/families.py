"""Tensor plans for families of models, known by the names of their modules; norms and positions are replicated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """A plan and the models that it is for."""

    name: str
    required: Mapping[str, str]
    """Styles by pattern; a model is of this family if each of these patterns names a module of it."""
    optional: Mapping[str, str]
    """Styles for modules that not every model of the family has."""

    def fits(self, modules: Iterable[str]) -> bool:
        """Whether a model with these module names is of this family."""
        names = tuple(modules)
        return all(any(fnmatchcase(name, pattern) for name in names) for pattern in self.required)


DECODER = Family(
    "reference decoder",
    MappingProxyType(
        {
            "*.attention.query": "column",
            "*.attention.key": "column",
            "*.attention.value": "column",
            "*.attention.output": "row",
            "blocks.*.up": "column",
            "blocks.*.down": "row",
            "tokens": "vocabulary",
            "head": "vocabulary",
        }
    ),
    MappingProxyType({}),
)

LLAMA = Family(
    "Llama-like",
    MappingProxyType(
        {
            "*.q_proj": "column",
            "*.k_proj": "column",
            "*.v_proj": "column",
            "*.o_proj": "row",
            "*.gate_proj": "column",
            "*.up_proj": "column",
            "*.down_proj": "row",
            # Some of the family (StableLM) also compute with numbers of heads.
            "*.self_attn": "ratio:num_key_value_groups=q_proj/k_proj heads:num_heads?=q_proj "
            "heads:num_key_value_heads?=k_proj",
        }
    ),
    MappingProxyType(
        {
            "embed_tokens": "vocabulary",
            "*.embed_tokens": "vocabulary",
            "lm_head": "vocabulary",
            "*.q_norm": "partial",
            "*.k_norm": "partial",
            "*.query_layernorm": "partial",
            "*.key_layernorm": "partial",
        }
    ),
)

GPT2 = Family(
    "GPT-2-like",
    MappingProxyType(
        {
            "*h.*.attn.c_attn": "column:3",
            "*h.*.attn.c_proj": "row",
            "*h.*.mlp.c_fc": "column",
            "*h.*.mlp.c_proj": "row",
            "*h.*.attn": "divide:split_size,num_heads",
        }
    ),
    MappingProxyType({"wte": "vocabulary", "*.wte": "vocabulary", "lm_head": "vocabulary"}),
)

FAMILIES = (DECODER, LLAMA, GPT2)
