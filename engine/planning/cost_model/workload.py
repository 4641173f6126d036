"""Workload of a model as data: matrix products, attention, memory passes, and bytes stored for the backward.

    product    a matrix product of each token: inner x outer, and the side that tensor ranks shard
    pass       elementwise operators and norms: memory bytes moved per token
    kept       activation bytes per token, by recomputation mode

Bytes are for a 16-bit model with fp32 logits. Attention counts all token pairs, as torch does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Recomputation = Literal["none", "selective", "full"]
Side = Literal["inner", "outer", "none"]


class Product(NamedTuple):
    """Products of one token with weight matrices [``inner``, ``outer``].

    ``times``: number of these matrices. ``cut``: dim that tensor ranks shard, or "none".
    """

    inner: int
    outer: int
    cut: Side
    times: float = 1.0

    @property
    def weights(self) -> float:
        """Number of weight elements of all ``times`` products, before tensor ranks shard them."""
        return self.inner * self.outer * self.times

    def narrow(self, tp: int) -> float:
        """Returns the smaller dim of the weight shard on one of ``tp`` tensor ranks."""
        inner = self.inner / tp if self.cut == "inner" else self.inner
        outer = self.outer / tp if self.cut == "outer" else self.outer
        return min(inner, outer)


class CutAmount(NamedTuple):
    """Amount per tensor-parallel group, such as bytes: ``cut`` is always divided among tensor ranks, ``whole`` only
    under sequence parallelism.
    """

    cut: float
    whole: float

    def on(self, tp: int, sequence: bool) -> float:
        """Returns the amount on one of ``tp`` tensor ranks. ``sequence``: True with sequence parallelism."""
        return self.cut / tp + self.whole / (tp if sequence else 1)


class ExpertWork(NamedTuple):
    """Numbers of experts and of their parameters in an average MoE block."""

    parameters: float
    """Number of parameters of all experts."""
    experts: int
    """Number of experts."""
    chosen: int
    """Number of experts per token (top-k)."""
    layers: int
    """Number of blocks with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes and costs of training a model with blocks of equal size between embedding and head."""

    blocks: int
    context: int
    """Number of tokens per row."""
    width: int
    """Hidden size: elements of a token between blocks."""
    products: tuple[Product, ...]
    """Matrix products of one block."""
    attention: float
    """Total width of attention heads; each token pair costs 4 FLOPs per element of it."""
    causal: bool
    heads: int
    passes: CutAmount
    """Memory bytes per token in the forward of a block without fusion."""
    fused: CutAmount
    """Memory bytes per token in the forward of a block with fused operators."""
    kept: tuple[CutAmount, CutAmount, CutAmount]
    """Activation bytes per token and block, for recomputation none, selective and full."""
    head: tuple[Product, ...]
    vocabulary: int
    block_parameters: float
    """Number of parameters per block, all sharded by tensor ranks (norms are neglected)."""
    outer_parameters: float
    """Number of parameters of embedding and head; tied ones count once."""
    experts: ExpertWork | None = None
    """Experts of a block, included in its parameters; None for a dense model."""
    keys: float = 0.0
    """Total width of keys and values in a block."""
    itemsize: int = 2
    """Bytes of an element of an activation in the byte counts."""
    buffer_bytes: float = 0.0
    """Bytes of module buffers, which every rank has."""
    trained: float = 1.0
    """Share of the parameters that are trained; the others are frozen."""
    optimizer_bytes: float = 12.0
    """Bytes of optimizer state in GPU memory for each trained parameter, with its fp32 master."""

    @property
    def parameters(self) -> float:
        """Number of parameters of the model."""
        return self.blocks * self.block_parameters + self.outer_parameters

    def flops_of_token(self) -> float:
        """Returns the model FLOPs to train one token; attention counts all token pairs of a row, also masked ones."""
        block = sum(2 * product.weights for product in self.products) + 4 * self.attention * self.context
        return 3 * (self.blocks * block + sum(2 * product.weights for product in self.head))

    def keeps(self, recomputation: Recomputation) -> CutAmount:
        """Returns the activation bytes per token that a block stores for its backward under this recomputation."""
        return self.kept[("none", "selective", "full").index(recomputation)]


GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "smollm3", "granite", "stablelm")
"""Hugging Face model types with a gated MLP (SwiGLU)."""
PLAIN = ("gpt2", "gpt_neox", "opt", "gpt_neo", "bloom", "gptj", "phi", "starcoder2")
SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
}
"""Name of each size here -> its names in Hugging Face configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder-only transformer, from which its workload follows."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    head_width: int | None = None
    hidden: int | None = None
    """Intermediate size of the MLP; None: four times ``width``."""
    gated: bool = False
    """True if the MLP has three weights (SwiGLU)."""
    tied: bool = False

    def workload(self) -> Workload:
        """Returns the workload of training this decoder on rows of ``self.context`` tokens."""
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
            keys=2.0 * kv,
        )


def is_model_config(raw: object) -> bool:
    """Returns True if a parsed JSON value is a Hugging Face model configuration."""
    return isinstance(raw, Mapping) and any(key in raw for key in ("model_type", "architectures", *SIZES["width"]))


def decoder_shape_of(raw: Mapping[str, Any]) -> DecoderShape | None:
    """Returns the decoder's sizes from ``raw``, a Hugging Face model configuration; None if the architecture is unknown
    or a size is missing.
    """
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
