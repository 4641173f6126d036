"""Models for tensor ranks: two blocks, four heads, width 32, no dropout; those of the issue, and families that the
search was not made with."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import models
from tests.engine.parity.architectures import (
    Architecture,
    Convolutions,
    energy,
    face,
    pairs,
    planes,
    seeded,
    speech,
    text,
    vision,
)
from tests.models import LENGTH, VOCABULARY

HEADS = " (4 heads)"
NO_DROPOUT: Mapping[str, Any] = MappingProxyType({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
SIZES: Mapping[str, Any] = MappingProxyType({
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
})  # fmt: skip
GROUPED: Mapping[str, Any] = MappingProxyType({**SIZES, "num_key_value_heads": 2})
BART: Mapping[str, Any] = MappingProxyType({
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
})  # fmt: skip


class Text(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, *blocks: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class GatedBlock(nn.Module):
    """A perceptron whose gate and values come from one layer."""

    def __init__(self, width: int = 32, hidden: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class TorchEncoder(nn.Module):
    """torch's own encoder, as its tutorials use it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(self.embed(ids))).flatten(0, 1), targets.flatten())


def _gated() -> nn.Module:
    return Text(GatedBlock(), GatedBlock())


FOUR: Mapping[str, Architecture] = MappingProxyType({f"{name}{HEADS}": model for name, model in {
    "GPT-2": face(
        "GPT2LMHeadModel", "thirds", n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "Llama": face("LlamaForCausalLM", "", **GROUPED),
    "Qwen3": face("Qwen3ForCausalLM", "", **GROUPED, head_dim=8),
    "Gemma": face("GemmaForCausalLM", "", **GROUPED, head_dim=8, pad_token_id=0),
    "Mistral": face("MistralForCausalLM", "", **SIZES, num_key_value_heads=1),
    "GPT-NeoX": face("GPTNeoXForCausalLM", "", **SIZES, attention_dropout=0.0, hidden_dropout=0.0),
    "OPT": face(
        "OPTForCausalLM", "", hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, layerdrop=0.0,
    ),
    "BLOOM": face("BloomForCausalLM", "", hidden_size=32, n_layer=2, n_head=4),
    "BERT": face("BertForMaskedLM", "", **SIZES, **NO_DROPOUT),
    "T5": face(  # with d_ff = 48 a ReLU stands on its kink in the second step, and rounding decides its gradient
        "T5ForConditionalGeneration", "", d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    ),
    "ViT": vision(
        "ViTForImageClassification", "", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, patch_size=8, **NO_DROPOUT,
    ),
    "Mixtral": face(
        "MixtralForCausalLM", "", **GROUPED, num_local_experts=4, num_experts_per_tok=2,
    ),
    "Phi": face("PhiForCausalLM", "", **SIZES, resid_pdrop=0.0),
    "Phi-3": face("Phi3ForCausalLM", "", **GROUPED, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0),
    "nanoGPT-like": Architecture(partial(models.nano, 2), pairs, ""),
    "nn.TransformerEncoder": Architecture(seeded(TorchEncoder), pairs, ""),
    "gated MLP": Architecture(seeded(_gated), pairs, ""),
    "convolutions": Architecture(seeded(Convolutions), planes, "", energy),
}.items()})  # fmt: skip
"""Of the issue."""


def short_text(rows: int) -> list[Any]:
    """Four tokens a row, and two steps."""
    return [{name: t[:, :4].contiguous() for name, t in batch.items()} for batch in text(rows)[:2]]


SHORT: Mapping[str, Architecture] = MappingProxyType({
    "Llama (interpreted)": face("LlamaForCausalLM", "", short_text, **GROUPED),
})  # fmt: skip
"""Small enough for kernels in Triton's interpreter, which takes a millisecond for each program of a kernel."""

UNSEEN: Mapping[str, Architecture] = MappingProxyType({f"{name}{HEADS}": model for name, model in {
    "DeBERTa v2": face(
        "DebertaV2ForMaskedLM", "", **SIZES, **NO_DROPOUT, relative_attention=True, pos_att_type=["p2c", "c2p"],
        max_relative_positions=8, position_buckets=4,
    ),
    "Whisper": face("WhisperForConditionalGeneration", "", speech, **BART, num_mel_bins=8, max_source_positions=LENGTH,
                    max_target_positions=LENGTH),
    "BART": face("BartForConditionalGeneration", "", **BART, max_position_embeddings=32),
    "ModernBERT": face("ModernBertForMaskedLM", "", **SIZES, pad_token_id=0, attn_implementation="eager",
                       reference_compile=False),
    "RoFormer": face("RoFormerForMaskedLM", "", **SIZES, **NO_DROPOUT),
    "XLNet": face("XLNetLMHeadModel", "", d_model=32, n_layer=2, n_head=4, d_inner=48, dropout=0.0),
    "CTRL": face("CTRLLMHeadModel", "", n_embd=32, n_layer=2, n_head=4, dff=48, n_positions=32, resid_pdrop=0.0,
                 embd_pdrop=0.0),
    "CodeGen": face("CodeGenForCausalLM", "", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32,
                    bos_token_id=0, eos_token_id=0),
    "GPT-J": face("GPTJForCausalLM", "", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32, bos_token_id=0,
                  eos_token_id=0),
    "GPT-BigCode": face("GPTBigCodeForCausalLM", "", n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    "MPT": face("MptForCausalLM", "", d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
    "Persimmon": face("PersimmonForCausalLM", "", **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "Nemotron": face("NemotronForCausalLM", "", **GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "GLM 4": face("Glm4ForCausalLM", "", **GROUPED, head_dim=8, pad_token_id=0, eos_token_id=2),
    "Cohere 2": face("Cohere2ForCausalLM", "", **GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                     logit_scale=1.0, sliding_window=4),
    "OLMoE": face("OlmoeForCausalLM", "", **GROUPED, num_experts=4, num_experts_per_tok=2, pad_token_id=0),
    "Qwen3-MoE": face("Qwen3MoeForCausalLM", "", **GROUPED, head_dim=8, moe_intermediate_size=16, num_experts=4,
                      num_experts_per_tok=2),
    "DeepSeek V2": face(
        "DeepseekV2ForCausalLM", "", **SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "DeepSeek V3": face(
        "DeepseekV3ForCausalLM", "", **SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "GPT-OSS": face("GptOssForCausalLM", "", **GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                    pad_token_id=0, sliding_window=4),
    "RecurrentGemma": face("RecurrentGemmaForCausalLM", "", **GROUPED, lru_width=32, attention_window_size=8,
                           pad_token_id=0, block_types=["recurrent", "attention"]),
    "FNet": face("FNetForMaskedLM", "", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 max_position_embeddings=32, hidden_dropout_prob=0.0),
    "MobileBERT": face("MobileBertForMaskedLM", "", **SIZES, **NO_DROPOUT, embedding_size=32,
                       intra_bottleneck_size=16, true_hidden_size=16),
    "Mamba": face("MambaForCausalLM", "", hidden_size=32, num_hidden_layers=2, state_size=4),
    "Swin": vision("SwinForImageClassification", "", embed_dim=16, depths=[2, 2], num_heads=[4, 4], window_size=4,
                   patch_size=4, drop_path_rate=0.0, **NO_DROPOUT),
    "ConvNeXt": vision("ConvNextForImageClassification", "", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
}.items()})  # fmt: skip
"""Families that the search was not made with."""
