"""Work of training a model, as data: products, attention, passes over memory, and bytes kept for the backward.

    product    a matrix product of each token: inner x outer, and which side tensor ranks cut
    pass       elementwise code and norms: bytes that a token moves; tensor ranks share the bytes of a sharded part
    kept       bytes that a token leaves for the backward, by what is recomputed

Widths in bytes are those of a 16-bit model; elements of logits are fp32. Attention counts all pairs of tokens, as torch
counts its FLOPs; half of them are computed where it is causal.

Sizes of a decoder, given or read from a Hugging Face configuration, and the workload that follows from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Recomputation = Literal["none", "selective", "full"]
Side = Literal["inner", "outer", "none"]


class Product(NamedTuple):
    """Matrix products of one token with a weight."""

    inner: int
    outer: int
    cut: Side
    times: float = 1.0

    @property
    def weights(self) -> float:
        """Elements of the weights."""
        return self.inner * self.outer * self.times

    def narrow(self, tp: int) -> float:
        """Returns the narrower side of a tensor rank's product."""
        inner = self.inner / tp if self.cut == "inner" else self.inner
        outer = self.outer / tp if self.cut == "outer" else self.outer
        return min(inner, outer)


class CutAmount(NamedTuple):
    """Number with a part that tensor ranks share, and a part that each has in full (or shares along the sequence)."""

    cut: float
    whole: float

    def on(self, tp: int, sequence: bool) -> float:
        """Returns the amount of one tensor rank."""
        return self.cut / tp + self.whole / (tp if sequence else 1)


class ExpertWork(NamedTuple):
    """Experts of an average block."""

    parameters: float
    """Parameters of all experts of a block."""
    experts: int
    """Number of experts."""
    chosen: int
    """Number of experts of a token."""
    layers: int
    """Number of blocks that have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model of equal blocks between an embedding and a head."""

    blocks: int
    context: int
    """Tokens of a row."""
    width: int
    """Elements of a token between blocks."""
    products: tuple[Product, ...]
    """Products of a block."""
    attention: float
    """Width of all heads: pairs of tokens cost 4 FLOPs for each."""
    causal: bool
    heads: int
    passes: CutAmount
    """Bytes a token in the forward of a block, each operator by itself."""
    fused: CutAmount
    """The same with fused operators."""
    kept: tuple[CutAmount, CutAmount, CutAmount]
    """Bytes a token and block, with nothing, everything but products and attention, and everything recomputed."""
    head: tuple[Product, ...]
    vocabulary: int
    block_parameters: float
    """Parameters of one block, all of them cut by tensor ranks (norms are neglected)."""
    outer_parameters: float
    """Parameters of embedding and head; tied ones count once."""
    experts: ExpertWork | None = None
    """Experts, which are among the parameters of a block; None: there are none."""

    @property
    def parameters(self) -> float:
        """Parameters of the model."""
        return self.blocks * self.block_parameters + self.outer_parameters

    def flops_of_token(self) -> float:
        """Returns the model FLOPs of training one token: three times the forward; attention counts all pairs."""
        block = sum(2 * product.weights for product in self.products) + 4 * self.attention * self.context
        return 3 * (self.blocks * block + sum(2 * product.weights for product in self.head))

    def keeps(self, recomputation: Recomputation) -> CutAmount:
        """Returns the bytes of activations that a token leaves in a block for the backward."""
        return self.kept[("none", "selective", "full").index(recomputation)]


GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "smollm3", "granite", "stablelm")
"""Model types with a gate in their MLP."""
PLAIN = ("gpt2", "gpt_neox", "opt", "gpt_neo", "bloom", "gptj", "phi", "starcoder2")
SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
}
"""Our names -> names of the families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder, from which its workload follows."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    head_width: int | None = None
    hidden: int | None = None
    """Width of the MLP; None: four times the width."""
    gated: bool = False
    """The MLP has three weights (SwiGLU), not two."""
    tied: bool = False

    def workload(self) -> Workload:
        """Returns the workload of training it on full rows."""
        h = self.width
        head = self.head_width or h // self.heads
        q, kv = self.heads * head, (self.kv_heads or self.heads) * head
        f = self.hidden or 4 * h
        ups = 2 if self.gated else 1
        products = (
            Product(h, q + 2 * kv, "outer"),
            Product(q, h, "inner"),
            Product(h, ups * f, "outer"),
            Product(f, h, "inner"),
        )
        inputs = 2 * h  # of one activation of the width between blocks, in 16 bits
        products_out = 2 * (q + 2 * kv) + 2 * ups * f
        kept = (
            CutAmount(products_out + 2 * (q + kv) * self.gated + 2 * q + 2 * f * (ups - 1) + 2 * f, 4 * inputs),
            CutAmount(products_out + 2 * q, 3 * inputs),
            CutAmount(0.0, inputs),
        )
        return Workload(
            blocks=self.layers,
            context=self.context,
            width=h,
            products=products,
            attention=q,
            causal=True,
            heads=self.heads,
            passes=CutAmount(12 * (q + kv) * self.gated + 5 * ups * 2 * f, (22 if self.gated else 10) * inputs),
            fused=CutAmount(4 * (q + kv) * self.gated + 2 * (ups + 1) * f, 8 * inputs),
            kept=kept,
            head=(Product(h, self.vocabulary, "outer"),),
            vocabulary=self.vocabulary,
            block_parameters=sum(product.weights for product in products),
            outer_parameters=h * self.vocabulary * (1 if self.tied else 2),
        )


def is_model_config(raw: object) -> bool:
    """Returns True if a JSON object describes a model, not a run of this engine."""
    return isinstance(raw, Mapping) and any(key in raw for key in ("model_type", "architectures", *SIZES["width"]))


def decoder_shape_of(raw: Mapping[str, Any]) -> DecoderShape | None:
    """Returns the decoder that a configuration describes; None for families with other kinds of blocks."""
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
