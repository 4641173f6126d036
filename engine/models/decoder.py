"""Reference decoder: a small GPT-2 style language model on bytes, trained by ``train.py``.

A plain ``nn.Module`` without any reference to the engine, which shards it like any other model.
Pre-norm blocks, learned positions, biased projections (Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners", section 2.3, for the norms and for the scale of the residual projections).

Shape suffixes: B batch, L length, D width, H heads, K head width, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.program.program import evaluating

IGNORED_LABEL = -100
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder; the defaults give 6,482,432 parameters.

    ``context``: longest input in tokens. ``tied``: the head shares the token embedding's weight.

    Raises:
        ValueError: a size is below 1, the width is not a multiple of the heads, or the dropout is outside [0, 1).
    """

    vocabulary: int = 256
    layers: int = 8
    width: int = 256
    heads: int = 4
    context: int = 128
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "heads", "context"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"{name} = {size} is too small; the smallest is 1. Choose 1 or more.")
        if self.width % self.heads:
            raise ValueError(
                f"width = {self.width} is not divisible by heads = {self.heads}, and all heads are equally wide. "
                f"Choose a multiple, such as {-(-self.width // self.heads) * self.heads}."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout} is not a probability below 1. Choose at least 0 and below 1.")

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the weights in each layer's two output projections, which write to the residual
        stream.

        More layers give a smaller value.
        """
        return INIT_STD / math.sqrt(2 * self.layers)


class Projection(nn.Linear):
    """Linear layer initialized with weights from normal(0, ``std``) and bias zero."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, std: float = INIT_STD) -> None:
        self.std = std  # set first, because nn.Linear.__init__ calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Embedding with GPT-2's initialization: normal(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class LayerCache:
    """Cached keys and values of one decoder layer, each [B, H, L, K]: B sequences, H heads, L positions, head width K.

    Both are None at first.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def get_seq_length(self) -> int:
        """Returns the number of cached positions."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values, each [B, H, L, K], of L new positions to the cache; returns the keys and values of
        all positions.

        B sequences, H heads, head width K.
        """
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values
        return keys, values


class DecoderCache:
    """Key-value cache of a :class:`Decoder`, with an entry for each layer; the forward appends to it."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache() for _ in range(layers)]

    def get_seq_length(self) -> int:
        """Returns the number of cached positions, which is equal in all layers."""
        return self.layers[0].get_seq_length()


class Attention(nn.Module):
    """Causal self-attention, [B, L, D] -> [B, L, D]: B sequences, L positions, D features.

    With tensor parallelism, a rank may have only some of the heads.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.dropout = config.dropout
        self.query = Projection(width, width)
        self.key = Projection(width, width)
        self.value = Projection(width, width)
        self.output = Projection(width, width, std=config.residual_std)

    def forward(self, x: Tensor, seen: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        batch, length, _ = x.shape
        q_BHLK, k_BHLK, v_BHLK = (
            projection(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if cache is not None:
            k_BHLK, v_BHLK = cache.update(k_BHLK, v_BHLK)
        dropout = self.dropout if self.training else 0.0
        y_BHLK = functional.scaled_dot_product_attention(
            q_BHLK, k_BHLK, v_BHLK, attn_mask=seen, dropout_p=dropout, is_causal=seen is None
        )
        mixed: Tensor = self.output(y_BHLK.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class Block(nn.Module):
    """Transformer block, [B, L, D] -> [B, L, D]: attention, then an MLP with 4 D hidden features, each pre-normalized
    and residual.

    B sequences, L positions, D features.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(width)
        self.up = Projection(width, 4 * width)
        self.down = Projection(4 * width, width, std=config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, seen: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        x_BLD = x + self.dropout(self.attention(self.norm1(x), seen=seen, cache=cache))
        hidden = functional.gelu(self.up(self.norm2(x_BLD)), approximate="tanh")
        y_BLD: Tensor = x_BLD + self.dropout(self.down(hidden))
        return y_BLD


class Decoder(nn.Module):
    """GPT-2 style decoder from token ids [B, L] to logits [B, L, V]: B sequences of L tokens, V entries in the
    vocabulary.

    To fill a decoder built on the meta device, call ``to_empty``, tie tied weights again, then call
    ``reset_parameters`` of each module that has it.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocabulary, config.width)
        self.positions = Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Projection(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def new_cache(self) -> DecoderCache:
        """Returns an empty key-value cache for the argument ``past_key_values`` of ``forward``."""
        return DecoderCache(len(self.blocks))

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: DecoderCache | None = None,
    ) -> Tensor:
        """Returns the logits of the next token, [B, L, V]: B sequences, L positions, a vocabulary of V tokens.

        Args:
            input_ids: token ids, int64 [B, L].
            labels: ignored.
            attention_mask: int64 [B, S], 0 for padding and 1 for tokens; S is L plus the number of cached positions.
                Positions are counted without padding.
            past_key_values: cache of earlier positions, to which this call appends; None: no cache.

        Raises:
            ValueError: a position is not below ``config.context``.
        """
        cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        total = cached + input_ids.shape[1]
        if attention_mask is None:
            places, used = torch.arange(cached, total, device=input_ids.device), total
        else:
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, cached:]
            used = int(places.max()) + 1
        if used > self.config.context:
            raise ValueError(
                f"input_ids has length {used}; positions end at context = {self.config.context}. "
                "Shorten the input, or build the decoder with a larger context."
            )
        x_BLD = self.dropout(self.tokens(input_ids) + self.positions(places))
        seen = _seen(attention_mask, cached, total, input_ids.device) if attention_mask is not None or cached else None
        for index, block in enumerate(self.blocks):
            x_BLD = (
                block(x_BLD)
                if past_key_values is None and seen is None
                else block(x_BLD, seen, past_key_values.layers[index] if past_key_values is not None else None)
            )
        logits_BLV: Tensor = self.head(self.norm(x_BLD))
        return logits_BLV


def _seen(mask: Tensor | None, cached: int, total: int, device: torch.device) -> Tensor:
    """Returns a mask [L, S], or with padding [B, 1, L, S]: True where a query sees a key; each sees itself."""
    keys_S = torch.arange(total, device=device)
    queries_L1 = keys_S[cached:, None]
    if mask is None:
        return keys_S <= queries_L1
    return (keys_S < queries_L1) & mask.bool()[:, None, None] | (keys_S == queries_L1)


def loss_sum(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy in nats as (sum, number of labels that are not ignored), 0-dim fp32 and int64.

    A ``loss_fn`` for ``engine.initialize``: ``logits`` are [B, L, V] in any float dtype, ``batch["labels"]`` int64 [B,
    L], already shifted; -100 is ignored.
    """
    labels = batch["labels"]
    total = functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total, (labels != IGNORED_LABEL).sum()


@torch.no_grad()
def generate(model: Decoder, prompt: bytes, length: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continues ``prompt`` by ``length`` sampled bytes and returns only the new bytes.

    The model runs in eval mode and sees the last ``context`` bytes. ``temperature`` 0 takes the likeliest byte. The
    global random state is unchanged.

    Raises:
        ValueError: the prompt is empty, length or temperature is negative, or the vocabulary does not have 256 entries.
    """
    _check_request(model.config.vocabulary, prompt, length, temperature)
    device = model.tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    text, cache = list(prompt), model.new_cache()
    with evaluating(model):
        for _ in range(length):
            # once the first bytes leave the window, all positions change, and what is cached is of no use
            fits = len(text) <= model.config.context
            begin = cache.get_seq_length() if fits else len(text) - model.config.context
            logits = model(torch.tensor([text[begin:]], device=device), past_key_values=cache if fits else None)
            text.append(_pick(logits[0, -1].float().cpu(), temperature, generator))
    return bytes(text[len(prompt) :])


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # subtract the largest logit before the division, because a tiny temperature would make it infinite
    chances_V = ((logits - logits.max()) / temperature).softmax(dim=-1)
    return int(torch.multinomial(chances_V, 1, generator=generator))


def _check_request(vocabulary: int, prompt: bytes, length: int, temperature: float) -> None:
    if vocabulary != 256:
        raise ValueError(f"The model has vocabulary = {vocabulary}; bytes need 256. Use a model of that size.")
    if not prompt:
        raise ValueError("prompt is empty; a byte is predicted from earlier ones. Pass at least one, such as b'\\n'.")
    if length < 0 or temperature < 0:
        raise ValueError(f"length = {length}, temperature = {temperature}: neither can be negative. Choose 0 or more.")
