"""Plans as a user writes them, for the models of these tests."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

_DECODER = {
    "*.attention.query": "column", "*.attention.key": "column", "*.attention.value": "column",
    "*.attention.output": "row", "blocks.*.up": "column", "blocks.*.down": "row",
    "tokens": "vocabulary", "head": "vocabulary",
}  # fmt: skip
_LLAMA = {
    "*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row",
    "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row",
    "*.self_attn": "ratio:num_key_value_groups=q_proj/k_proj heads:num_heads?=q_proj heads:num_key_value_heads?=k_proj",
    "*embed_tokens": "vocabulary", "lm_head": "vocabulary",
    "*.q_norm": "partial", "*.k_norm": "partial",
    "*.query_layernorm": "partial", "*.key_layernorm": "partial",
}  # fmt: skip
_GPT2 = {
    "*h.*.attn.c_attn": "column:3", "*h.*.attn.c_proj": "row", "*h.*.mlp.c_fc": "column", "*h.*.mlp.c_proj": "row",
    "*h.*.attn": "divide:split_size,num_heads", "*wte": "vocabulary", "lm_head": "vocabulary",
}  # fmt: skip


def written_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan of the family that ``model`` is of, without what it does not have."""
    names = [name for name, _ in model.named_modules()]

    def found(pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in names)

    family = next(plan for plan in (_DECODER, _LLAMA, _GPT2) if found(next(iter(plan))))
    return {pattern: style for pattern, style in family.items() if found(pattern)}
