"""Every kind of adapter that PEFT has, on a small Llama."""

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tests.engine.parity.architectures import seeded
from tests.engine.parity.tensor_models import FOUR, HEADS

BASE = FOUR["Llama" + HEADS]
_LAYERS: Mapping[str, Any] = MappingProxyType({"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]})
_PROMPTS: Mapping[str, Any] = MappingProxyType({"num_virtual_tokens": 4})
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType({
    "LoRA": ("LoraConfig", _LAYERS),
    "LoRA of a classifier": ("LoraConfig", _LAYERS),
    "DoRA": ("LoraConfig", {**_LAYERS, "use_dora": True}),
    "rsLoRA on all linear layers": ("LoraConfig", {"target_modules": "all-linear", "use_rslora": True}),
    "LoRA with biases": ("LoraConfig", {**_LAYERS, "lora_bias": True}),
    "LoRA of embeddings": ("LoraConfig", {"target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA of parameters": ("LoraConfig", {"target_modules": ["q_proj"], "target_parameters": ["o_proj.weight"]}),
    "LoRA, modules to save": ("LoraConfig", {**_LAYERS, "modules_to_save": ["lm_head"]}),
    "LoRA, embedding to save": ("LoraConfig", {**_LAYERS, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "LoRA, norms to save": ("LoraConfig", {**_LAYERS, "modules_to_save": ["input_layernorm"]}),
    "LoRA, trained tokens": ("LoraConfig", {**_LAYERS, "trainable_token_indices": [3, 60]}),
    "LoRA, layers repeated": ("LoraConfig", {**_LAYERS, "layer_replication": [(0, 2), (0, 2)]}),
    "trained tokens": ("TrainableTokensConfig", {"token_indices": [3, 60], "target_modules": ["embed_tokens"]}),
    "AdaLoRA": ("AdaLoraConfig", {**_LAYERS, "total_step": 10, "tinit": 1, "tfinal": 1}),
    "LoHa": ("LoHaConfig", _LAYERS),
    "LoKr": ("LoKrConfig", _LAYERS),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "OFT": ("OFTConfig", {**_LAYERS, "oft_block_size": 4, "r": 0}),
    "AdaMSS": ("AdamssConfig", {**_LAYERS, "r": 8, "num_subspaces": 2, "subspace_rank": 2}),
    "BOFT": ("BOFTConfig", {**_LAYERS, "boft_block_size": 4}),
    "VeRA": ("VeraConfig", {"target_modules": ["q_proj", "o_proj"], "r": 4}),
    "PVeRA": ("PveraConfig", {"target_modules": ["q_proj", "o_proj"], "r": 4}),
    "FourierFT": ("FourierFTConfig", {**_LAYERS, "n_frequency": 50}),
    "X-LoRA": ("XLoraConfig", {"hidden_size": 32, "xlora_depth": 2, "xlora_size": 16, "xlora_dropout_p": 0.0,}),
    "X-LoRA, experts trained": ("XLoraConfig", {"hidden_size": 32, "use_trainable_adapters": True}),
    "HRA": ("HRAConfig", {**_LAYERS, "r": 4}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]}),
    "VB-LoRA": ("VBLoRAConfig", {**_LAYERS, "vector_length": 8, "num_vectors": 16, "topk": 2}),
    "MiSS": ("MissConfig", {**_LAYERS, "r": 4}),
    "RandLoRA": ("RandLoraConfig", {**_LAYERS, "r": 4}),
    "RoAd": ("RoadConfig", {**_LAYERS, "group_size": 4}),
    "HiRA": ("HiraConfig", {**_LAYERS, "r": 4}),
    "SHiRA": ("ShiraConfig", {**_LAYERS, "r": 4, "random_seed": 3}),
    "C3A": ("C3AConfig", {**_LAYERS, "block_size": 8}),
    "WaveFT": ("WaveFTConfig", {**_LAYERS, "n_frequency": 50}),
    "OSF": ("OSFConfig", _LAYERS),
    "DeLoRA": ("DeloraConfig", {**_LAYERS, "r": 4}),
    "GraLoRA": ("GraloraConfig", {**_LAYERS, "r": 4, "gralora_k": 2}),
    "TinyLoRA": ("TinyLoraConfig", _LAYERS),
    "PSOFT": ("PsoftConfig", {**_LAYERS, "r": 4}),
    "PEANuT": ("PeanutConfig", {**_LAYERS, "r": 4}),
    "SuperTuning": ("SupertuningConfig", _LAYERS),
    "DEFT": ("DeftConfig", {**_LAYERS, "r": 4}),
    "BEFT": ("BeftConfig", _LAYERS),
    "FRoD": ("FrodConfig", _LAYERS),
    "GLoRA": ("GloraConfig", {**_LAYERS, "r": 4}),
    "LILY": ("LilyConfig", {**_LAYERS, "r": 4}),
    "Uni-LoRA": ("UniLoraConfig", {**_LAYERS, "r": 4, "theta_d_length": 64}),
    "adaption prompts": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2}),
    "prompts": ("PromptTuningConfig", _PROMPTS),
    "prefixes": ("PrefixTuningConfig", _PROMPTS),
    "prefixes, projected": ("PrefixTuningConfig", {**_PROMPTS, "prefix_projection": True, "encoder_hidden_size": 16}),
    "P-tuning": ("PromptEncoderConfig", {**_PROMPTS, "encoder_hidden_size": 16}),
    "P-tuning, LSTM": ("PromptEncoderConfig", {
        **_PROMPTS, "encoder_hidden_size": 16, "encoder_reparameterization_type": "LSTM", "encoder_dropout": 0.0,
    }),
    "CPT": ("CPTConfig", {
        "cpt_token_ids": [3, 4, 5, 6], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3, 4],
    }),
    "cartridges": ("CartridgeConfig", _PROMPTS),
    "multitask prompts": ("MultitaskPromptTuningConfig", {**_PROMPTS, "num_tasks": 2}),
    "Poly": ("PolyConfig", {**_LAYERS, "r": 4, "n_tasks": 2, "n_skills": 2, "n_splits": 2}),
    "shadows": ("ShadowConfig", {"shadow_dropout": 0.0}),
})  # fmt: skip
"""Name -> class of the configuration, and its settings."""
BY_TASK = frozenset({"multitask prompts", "Poly"})
"""Kinds whose forward is given the task of each row."""


OF_SAVED = frozenset({"X-LoRA", "X-LoRA, experts trained"})
"""Kinds that load adapters from folders."""
CLASSIFIERS = frozenset({"LoRA of a classifier"})
"""Kinds whose task is to classify rows; PEFT saves their head beside the adapters."""
UNTRAINABLE: Mapping[str, str] = MappingProxyType({"CPT": "is no longer in the engine's memory"})
"""Kinds that are refused, and words of the sentence."""


def base(name: str) -> nn.Module:
    """The model without adapters, in one process."""
    made: Any = seeded(_classifier)() if name in CLASSIFIERS else BASE.build()
    if name in OF_SAVED:
        made.config.use_cache = False  # X-LoRA asks for it
    model: nn.Module = made
    return model


def _classifier() -> nn.Module:
    import transformers

    sizes: Any = getattr(BASE.build(), "config").to_dict()  # noqa: B009
    made: Any = transformers.LlamaForSequenceClassification
    model: nn.Module = made(transformers.LlamaConfig(**sizes | {"num_labels": 3, "pad_token_id": 0}))
    return model


def build(name: str) -> nn.Module:
    """The model of one process. What PEFT begins with zeros is moved, so that everything has a gradient."""
    import peft

    kind, settings = KINDS[name]
    model: Any = base(name)
    torch.manual_seed(11)
    task = "SEQ_CLS" if name in CLASSIFIERS else "CAUSAL_LM"
    with TemporaryDirectory() as folder:
        if name in OF_SAVED:
            settings = {**settings, "adapters": save_experts(folder)}
        made: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(task_type=task, **settings))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def save_experts(folder: str) -> dict[str, str]:
    """Write two LoRA adapters; the name of each and its folder, as X-LoRA takes them."""
    import peft

    found = {name: f"{folder}/{name}" for name in ("0", "1")}
    for seed, place in enumerate(found.values()):
        model: Any = BASE.build()
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **_LAYERS)
        peft.get_peft_model(model, config).save_pretrained(place)
    return found


def batches(name: str, rows: int) -> list[dict[str, torch.Tensor]]:
    """Global batches."""
    found: list[dict[str, torch.Tensor]] = [dict(batch) for batch in BASE.batches(rows)]
    if name in CLASSIFIERS:
        for batch in found:
            batch["labels"] = torch.arange(rows) % 3
    if name in BY_TASK:
        for batch in found:
            batch["task_ids"] = torch.arange(rows) % 2
    return found
