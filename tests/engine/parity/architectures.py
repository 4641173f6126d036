"""Architectures that are trained over pipeline stages as they are: Hugging Face's with random weights, and our own.

Every model is tiny, draws no dropout and gets a global batch a step, in the form that it is called with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.parallel.model.blocks import find_units
from tests import models
from tests.models import LENGTH, VOCABULARY
from tests.parallel.pipeline.zoo import SMALL, UNet, hugging_face
from tests.parallel.pipeline.zoo_wide import GROUPED, NO_DROPOUT

ROWS, STEPS = 8, 3
Batches = Callable[[int], list[Any]]


@dataclass(frozen=True)
class Architecture:
    """A model, its global batches for a number of rows, and what makes it hard to cut."""

    build: Callable[[], nn.Module]
    batches: Batches
    special: str
    loss_fn: Callable[[Any, Any], Any] | None = None


# ------------------------------------------------------------------------------------------------ batches


def text(rows: int) -> list[Any]:
    """Token ids as inputs and labels."""
    tokens = models.token_batches(rows, STEPS)
    return [{"input_ids": t[:, :-1], "labels": t[:, :-1].contiguous()} for t in tokens]


def pairs(rows: int) -> list[Any]:
    """Token ids and the next ones, as positional arguments."""
    return [(t[:, :-1], t[:, 1:]) for t in models.token_batches(rows, STEPS)]


def pictures(rows: int, channels: int = 3, size: int = 32) -> list[Any]:
    """Noise and one of two classes."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "pixel_values": torch.randn(rows, channels, size, size, generator=generator),
            "labels": torch.randint(0, 2, (rows,), generator=generator),
        }
        for _ in range(STEPS)
    ]


def planes(rows: int) -> list[Any]:
    """Pictures of two channels for the U-Net."""
    return [batch["pixel_values"] for batch in pictures(rows, 2, 16)]


def speech(rows: int) -> list[Any]:
    """Spectrograms and what is said."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "input_features": torch.randn(rows, 8, 2 * LENGTH, generator=generator),
            "labels": tokens[:, :-1].contiguous(),
        }
        for tokens in models.token_batches(rows, STEPS)
    ]


# ------------------------------------------------------------------------------------------------ our own


class EmbeddingResidual(nn.Module):
    """Every block gets the embedding again, by glue: ``x + a * x0``."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(models.NanoBlock(width, 2) for _ in range(layers))
        self.share = nn.Parameter(torch.linspace(0.1, 0.5, layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = x0 = self.embed(ids)
        for share, block in zip(self.share, self.blocks, strict=True):
            x = block(x + share * x0)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class StateBlock(nn.Module):
    """Takes and gives a dict: the hidden state, the running sum of what blocks added, and how many there were."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = models.NanoBlock(width, 2)
        self.mix = nn.Linear(width, width)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = self.inner(state["x"] + self.mix(state["total"]))
        return {"x": x, "total": state["total"] + x, "depth": state["depth"] + 1}


class DictPassing(nn.Module):
    """Blocks hand a dict of tensors and a number from one to the next."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(StateBlock(width) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        state = self.blocks({"x": x, "total": torch.zeros_like(x), "depth": 0})
        logits = self.head(state["x"] + state["total"] / state["depth"])
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class Convolutions(nn.Module):
    """As VGG is written: convolutions, norms and activations in one Sequential, a classifier in another."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((2, 4), (4, 8), (8, 8)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(32, 16), nn.ReLU(True), nn.LayerNorm(16), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out


class OneBlock(nn.Module):
    """All in one module, nothing to cut between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.rnn = nn.GRU(width, width, num_layers=4, batch_first=True)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.rnn(self.embed(ids))[0]).flatten(0, 1), targets.flatten())


class ReadsContent(nn.Module):
    """Glue looks at a value to choose the way."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(models.NanoBlock(width, 2) for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if x.abs().mean() > 100:
                break
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same weights on every call."""
    return partial(_seeded, build)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def squared_error(output: Tensor, batch: Tensor) -> Tensor:
    """Of a picture that should come out as it went in."""
    return (output - batch).square().mean()


def energy(output: Tensor, batch: Tensor) -> Tensor:
    """How far the outputs are from the means of the halves of each picture."""
    means: Tensor = batch.flatten(2).mean(2)
    return (output - means).square().mean()


# ------------------------------------------------------------------------------------------------ Hugging Face


def face(name: str, special: str, batches: Batches = text, **sizes: Any) -> Architecture:
    """A language model."""
    return Architecture(partial(hugging_face, name, **sizes), batches, special)


def vision(name: str, special: str, **sizes: Any) -> Architecture:
    """A classifier of pictures: no vocabulary."""
    return Architecture(partial(_picture_model, name, **sizes), pictures, special)


def _picture_model(name: str, **sizes: Any) -> Any:
    import transformers

    torch.manual_seed(7)
    kind = getattr(transformers, name)
    return kind(kind.config_class(image_size=32, num_labels=2, **sizes))


HUGGING_FACE: Mapping[str, Architecture] = MappingProxyType({
    "GPT-2": face(
        "GPT2LMHeadModel", "fused qkv, head tied to the embedding", n_embd=16, n_layer=4, n_head=2, n_positions=32,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "Llama": face("LlamaForCausalLM", "rotary table and mask recomputed by every stage", **GROUPED),
    "Qwen3": face("Qwen3ForCausalLM", "a norm for every head", **GROUPED, head_dim=8),
    "Gemma": face("GemmaForCausalLM", "scaled and tied embedding", **GROUPED, head_dim=8, pad_token_id=0),
    "Mistral": face("MistralForCausalLM", "sliding window mask", **GROUPED, sliding_window=4),
    "GPT-NeoX": face(
        "GPTNeoXForCausalLM", "parallel residual", **SMALL, attention_dropout=0.0, hidden_dropout=0.0
    ),
    "OPT": face(
        "OPTForCausalLM", "positions by the padding mask, tied head", hidden_size=16, ffn_dim=24, num_hidden_layers=4,
        num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0, layerdrop=0.0,
    ),
    "BERT": face("BertForMaskedLM", "encoder, decoder bias tied twice", **SMALL, **NO_DROPOUT),
    "ALBERT": face(
        "AlbertForMaskedLM", "one block called four times: every stage owns it", **SMALL, **NO_DROPOUT,
        embedding_size=8,
    ),
    "T5": face(
        "T5ForConditionalGeneration", "two towers on one timeline; position bias and encoder states cross", d_model=16,
        d_kv=8, d_ff=24, num_layers=4, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    ),
    "Whisper": face(
        "WhisperForConditionalGeneration", "spectrogram encoder, text decoder", speech, d_model=16, encoder_layers=4,
        decoder_layers=4, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        num_mel_bins=8, max_source_positions=LENGTH, max_target_positions=LENGTH, dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "ViT": vision(
        "ViTForImageClassification", "pictures, class token", hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=2, patch_size=8, **NO_DROPOUT,
    ),
    "Mixtral": face(
        "MixtralForCausalLM", "experts by content; router logits of every block go to the loss", **GROUPED,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1,
    ),
})  # fmt: skip

OWN: Mapping[str, Architecture] = MappingProxyType({
    "nanoGPT-like": Architecture(partial(models.nano, 4), pairs, "tied head; frozen and unused parameters in glue"),
    "U-Net": Architecture(seeded(UNet), planes, "every skip crosses from the way down to the way up", squared_error),
    "VGG-like": Architecture(
        seeded(Convolutions), planes, "layers of several classes in one Sequential, written in place", energy
    ),
    "embedding residual": Architecture(seeded(EmbeddingResidual), pairs, "`x + a * x0` before every block, in glue"),
    "skips and gates": Architecture(models.crossing, pairs, "blocks of the second half add what the first left"),
    "blocks passing a dict": Architecture(seeded(DictPassing), pairs, "two tensors and a number in a dict"),
})  # fmt: skip

REFUSED: Mapping[str, Architecture] = MappingProxyType(
    {
        "GRU": Architecture(seeded(OneBlock), pairs, ""),
        "glue that reads content": Architecture(seeded(ReadsContent), pairs, ""),
    }
)

WIDE: Mapping[str, Architecture] = MappingProxyType({
    "Gemma 2": face("Gemma2ForCausalLM", "two kinds of mask in turn", **GROUPED, head_dim=8, query_pre_attn_scalar=8),
    "Gemma 3": face(
        "Gemma3ForCausalLM", "two rotary tables", **GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4
    ),
    "Gemma 3n": face(
        "Gemma3nForCausalLM", "late layers read keys and values of early ones", **GROUPED, head_dim=8,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=4, altup_num_inputs=2,
    ),
    "Phi-3": face("Phi3ForCausalLM", "fused qkv and gate", **GROUPED, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0),
    "Falcon": face("FalconForCausalLM", "one key head", hidden_size=16, num_hidden_layers=4, num_attention_heads=2),
    "BLOOM": face("BloomForCausalLM", "ALiBi", hidden_size=16, n_layer=4, n_head=2),
    "DeBERTa v2": face(
        "DebertaV2ForMaskedLM", "all blocks read one relative table", **SMALL, **NO_DROPOUT, relative_attention=True,
        pos_att_type=["p2c", "c2p"], max_relative_positions=8, position_buckets=4,
    ),
    "Mamba": face("MambaForCausalLM", "state space", hidden_size=16, num_hidden_layers=4, state_size=4),
    "BART": face(
        "BartForConditionalGeneration", "encoder states cross, shared embedding", d_model=16, encoder_layers=4,
        decoder_layers=4, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_position_embeddings=32, dropout=0.0,
    ),
    "Qwen3-MoE": face(
        "Qwen3MoeForCausalLM", "router logits go to the loss", **GROUPED, head_dim=8, moe_intermediate_size=8,
        num_experts=4, num_experts_per_tok=2, output_router_logits=True,
    ),
    "Swin": vision(
        "SwinForImageClassification", "blocks inside stages, windows", embed_dim=8, depths=[2, 2], num_heads=[2, 2],
        window_size=4, patch_size=4, drop_path_rate=0.0, **NO_DROPOUT,
    ),
    "ConvNeXt": vision("ConvNextForImageClassification", "convolutions", hidden_sizes=[4, 8], depths=[2, 2],
                       num_stages=2),
})  # fmt: skip

ALL: Mapping[str, Architecture] = MappingProxyType({**HUGGING_FACE, **OWN, **REFUSED, **WIDE})


def find(name: str, among: Mapping[str, Architecture] = ALL) -> Architecture:
    """By name, such as "T5", or "T5, dropout and checkpoints"."""
    name, _, way = name.partition(", ")
    found = among[name]
    for step in filter(None, way.split(" and ")):
        found = replace(found, build=partial(WAYS[step], found.build))
    return found


def checkpointed(build: Callable[[], nn.Module]) -> nn.Module:
    """By Hugging Face's own switch."""
    model: Any = build()
    model.train()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


def compiled(build: Callable[[], nn.Module], backend: str) -> nn.Module:
    """Each block by itself."""
    model = build()
    units = find_units(model)
    for name in units.blocks:
        units.modules[name].compile(backend=backend)
    return model


def cast(build: Callable[[], nn.Module]) -> nn.Module:
    """The forward under the user's autocast."""
    model = build()
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*args, **kwargs)

    model.forward = forward
    return model


def dropping(build: Callable[[], nn.Module]) -> nn.Module:
    """Every dropout drops; those that are functions ask their module's attribute."""
    model = build()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


WAYS: Mapping[str, Callable[[Callable[[], nn.Module]], nn.Module]] = MappingProxyType({
    "checkpoints": checkpointed,
    "compiled": partial(compiled, backend="eager"),
    "compiled by AOT": partial(compiled, backend="aot_eager"),
    "autocast": cast,
    "dropout": dropping,
})  # fmt: skip
