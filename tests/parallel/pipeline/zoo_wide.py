"""More architectures of Hugging Face, for the wide test."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tests import models
from tests.parallel.pipeline.zoo import LENGTH, ROWS, SMALL, Case, hugging_face, run_hugging_face, text

NO_DROPOUT: Mapping[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED: Mapping[str, Any] = {**SMALL, "num_key_value_heads": 1}


def padded(generator: torch.Generator) -> dict[str, Tensor]:
    """Text whose second row ends early."""
    batch = text(generator)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, LENGTH:] = 0
    return {**batch, "attention_mask": mask}


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    """Pictures and classes."""
    return {
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 2, (ROWS,), generator=generator),
    }


def _run_vision(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(**batch).loss, 1.0


def _text(name: str, batch: Any = text, **sizes: Any) -> Case:
    run = _run_vision if name.startswith(("Deberta", "Mamba", "Bert", "T5")) else run_hugging_face
    return Case(partial(hugging_face, name, **sizes), run, batch, exact=False)


def _vision(name: str, **sizes: Any) -> Case:
    # they have no vocabulary, and convolutions no kind of attention
    def build() -> Any:
        import transformers

        torch.manual_seed(7)
        kind = getattr(transformers, name)
        return kind(kind.config_class(image_size=32, num_labels=2, **sizes))

    return Case(build, _run_vision, pictures, exact=False)


WIDE: Mapping[str, Case] = MappingProxyType({
    "gemma2": _text("Gemma2ForCausalLM", **GROUPED, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": _text("Gemma3ForCausalLM", **GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    "gemma3n": _text(
        "Gemma3nForCausalLM", **GROUPED, head_dim=8, vocab_size_per_layer_input=models.VOCABULARY,
        hidden_size_per_layer_input=8, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4, laurel_rank=4, altup_num_inputs=2,
    ),
    "opt": _text("OPTForCausalLM", hidden_size=16, ffn_dim=24, num_hidden_layers=4, num_attention_heads=2,
                 max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0),
    "bloom": _text("BloomForCausalLM", hidden_size=16, n_layer=4, n_head=2),
    "falcon": _text("FalconForCausalLM", hidden_size=16, num_hidden_layers=4, num_attention_heads=2),
    "gpt_neox": _text("GPTNeoXForCausalLM", **SMALL),
    "phi3": _text("Phi3ForCausalLM", **GROUPED, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0),
    "qwen3_moe": _text("Qwen3MoeForCausalLM", **GROUPED, head_dim=8, moe_intermediate_size=8, num_experts=4,
                       num_experts_per_tok=2, output_router_logits=True, experts_implementation="eager"),
    "deberta": _text("DebertaV2ForMaskedLM", **SMALL, **NO_DROPOUT, relative_attention=True,
                     pos_att_type=["p2c", "c2p"], max_relative_positions=8, position_buckets=4),
    "mamba": _text("MambaForCausalLM", hidden_size=16, num_hidden_layers=4, state_size=4),
    "bart": _text("BartForConditionalGeneration", d_model=16, encoder_layers=3, decoder_layers=3,
                  encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                  max_position_embeddings=32, dropout=0.0),
    "llama_padded": _text("LlamaForCausalLM", padded, **GROUPED),
    "llama_sdpa_padded": _text("LlamaForCausalLM", padded, **{**GROUPED, "attn_implementation": "sdpa"}),
    "mixtral_padded": _text("MixtralForCausalLM", padded, **GROUPED, num_local_experts=4, output_router_logits=True,
                            experts_implementation="eager"),
    "mixtral_grouped": _text("MixtralForCausalLM", **GROUPED, num_local_experts=4, output_router_logits=True),
    "t5_padded": _text("T5ForConditionalGeneration", padded, d_model=16, d_kv=8, d_ff=24, num_layers=4, num_heads=2,
                       dropout_rate=0.0, decoder_start_token_id=0),
    "bert_padded": _text("BertForMaskedLM", padded, **SMALL, **NO_DROPOUT),
    "vit": _vision("ViTForImageClassification", hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                   num_attention_heads=2, patch_size=8, **NO_DROPOUT),
    "swin": _vision("SwinForImageClassification", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
                    patch_size=4, drop_path_rate=0.0, **NO_DROPOUT),
    "convnext": _vision("ConvNextForImageClassification", hidden_sizes=[4, 8], depths=[2, 2], num_stages=2),
    "resnet": _vision("ResNetForImageClassification", embedding_size=4, hidden_sizes=[4, 8], depths=[2, 2]),
})  # fmt: skip
