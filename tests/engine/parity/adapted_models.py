"""Models with adapters of PEFT, as its users write them."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tests.engine.parity.architectures import Architecture, face
from tests.engine.parity.tensor_models import FOUR, GROUPED, HEADS, UNSEEN

RANK = 4
LORA: Mapping[str, Any] = MappingProxyType(
    {"r": RANK, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
)
"""On every linear layer but the head; both halves of a pair are random, so that both have gradients."""


def adapted(base: Architecture, kind: str = "LoraConfig", **settings: Any) -> Architecture:
    """The same model, frozen, with the adapters of a configuration of PEFT."""
    given = {**(LORA if kind == "LoraConfig" else {}), "task_type": "CAUSAL_LM", **settings}
    return Architecture(partial(build, base, kind, given), base.batches, base.special, base.loss_fn)


def build(base: Architecture, kind: str, settings: Mapping[str, Any]) -> nn.Module:
    """The model of one process."""
    import peft

    model: Any = base.build()
    torch.manual_seed(11)
    made: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(**settings))
    return made


_DECODERS: Mapping[str, Architecture] = MappingProxyType(
    {name: FOUR[name + HEADS] for name in ("Llama", "GPT-2", "OPT", "Phi")}
    | {"Mistral": face("MistralForCausalLM", "", **GROUPED), "Qwen2": face("Qwen2ForCausalLM", "", **GROUPED)}
)
ADAPTED: Mapping[str, Architecture] = MappingProxyType(
    {f"{name} with LoRA": adapted(model) for name, model in _DECODERS.items()}
    | {
        "T5 with LoRA": adapted(FOUR["T5" + HEADS], task_type="SEQ_2_SEQ_LM"),
        "Mixtral with LoRA": adapted(FOUR["Mixtral" + HEADS], target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    }
)
EXPERTS: Mapping[str, Architecture] = MappingProxyType(
    {
        "Mixtral with LoRA of experts": adapted(FOUR["Mixtral" + HEADS]),
        "Qwen3-MoE with LoRA of experts": adapted(
            UNSEEN["Qwen3-MoE" + HEADS],
            target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        ),
    }
)
"""PEFT puts pairs beside the stacked matrices of experts too, and writes their products into them while it runs."""
DORA: Mapping[str, Architecture] = MappingProxyType(
    {f"{name} with DoRA": adapted(_DECODERS[name], use_dora=True) for name in ("Llama", "Qwen2")}
)
PROMPTS: Mapping[str, Architecture] = MappingProxyType({
    "Llama with prompts": adapted(_DECODERS["Llama"], "PromptTuningConfig", num_virtual_tokens=4),
    "Llama with prefixes": adapted(_DECODERS["Llama"], "PrefixTuningConfig", num_virtual_tokens=4),
})  # fmt: skip
