"""Models that the parity tests train: ours, Hugging Face's, and one written as people write them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.decoder import Decoder, DecoderConfig
from engine.program.batch_rows import BatchRows

VOCABULARY = 61
LENGTH = 24


def decoder(tied: bool = False, dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """The reference decoder, tiny."""
    torch.manual_seed(7)
    config = DecoderConfig(
        vocabulary=VOCABULARY, layers=layers, width=32, heads=4, context=LENGTH, tied=tied, dropout=dropout
    )
    return Decoder(config)


def llama(layers: int = 2) -> nn.Module:
    """Hugging Face Llama with fewer kv heads than heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def qwen3(layers: int = 2) -> nn.Module:
    """Hugging Face Qwen3: a norm for every head, which tensor ranks use in part, and shared key heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def repeated() -> nn.Module:
    """A decoder whose four blocks are two, each twice: parameters tied over stages that tensor ranks cut as well."""
    model: Any = decoder(layers=4)
    model.blocks[2], model.blocks[3] = model.blocks[0], model.blocks[1]
    return model  # type: ignore[no-any-return]


def gpt2(layers: int = 2, dropout: float = 0.1) -> nn.Module:
    """Hugging Face GPT-2: fused Conv1D qkv, tied head; dropout as its default is."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=LENGTH,
                   bos_token_id=0, eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    )  # fmt: skip


class NanoBlock(nn.Module):
    """A nanoGPT-like block: fused qkv, head count arithmetic in forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        heads = [t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        out: Tensor = x + self.proj(F.gelu(self.fc(self.ln_2(x))))
        return out


class Nano(nn.Module):
    """Returns (logits, loss) from a positional call, as nanoGPT does; head tied to the embedding."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(NanoBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.frozen_scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.never_used = nn.Parameter(torch.ones(5))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x) * self.frozen_scale)
        return logits, self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class NanoWideLoss(Nano):
    """Its loss is fp32 in any precision, as under autocast; neighbours in bf16 differ by 0.8 %."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits.float(), targets)


def nano_wide_loss(layers: int = 2) -> nn.Module:
    """Nano with a loss that can be compared in any precision."""
    torch.manual_seed(7)
    return NanoWideLoss(layers=layers)


def nano(layers: int = 2) -> nn.Module:
    """The nanoGPT-like module with a frozen, an unused and a tied parameter."""
    torch.manual_seed(7)
    return Nano(layers=layers)


class Crossing(nn.Module):
    """Values pass beside the chain: every block reads the embedding, and the second half adds what the first left."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.h = nn.ModuleList(NanoBlock(width, 4) for _ in range(layers))
        self.gates = nn.Parameter(torch.linspace(0.5, 1.0, layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = first = self.wte(idx)
        left: list[Tensor] = []
        for index, block in enumerate(self.h):
            x = block(x + self.gates[index] * first)
            if index < len(self.h) // 2:
                left.append(x)
            else:
                x = x + left.pop()
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def crossing(layers: int = 4) -> nn.Module:
    """The module whose values cross stages beside the chain."""
    torch.manual_seed(7)
    return Crossing(layers=layers)


def t5(dropout: float = 0.1, layers: int = 2) -> nn.Module:
    """Hugging Face T5: an encoder whose states every block of the decoder reads, a bias that the first block makes."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(7)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_decoder_layers=layers, num_heads=4,
        dropout_rate=dropout, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


class T5WideLoss(nn.Module):
    """T5 with a loss that is fp32 in any precision; neighbours of its bf16 loss differ by 0.7 %."""

    def __init__(self) -> None:
        super().__init__()
        self.t5 = t5()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        t5: Any = self.t5
        logits = t5(input_ids=input_ids, decoder_input_ids=t5._shift_right(labels)).logits
        return logits, F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def token_batches(rows: int, steps: int = 4, seed: int = 3) -> list[Tensor]:
    """Random tokens [rows, LENGTH + 1] for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator) for _ in range(steps)]


def batches_for(kind: str, rows: int, steps: int = 4) -> list[Any]:
    """Global batches in the form that each model is called with."""
    tokens = token_batches(rows, steps)
    if kind in ("nano", "crossing"):
        return [(t[:, :-1], t[:, 1:]) for t in tokens]
    if kind in ("llama", "qwen3", "gpt2", "t5"):
        return [{"input_ids": t[:, :-1], "labels": t[:, :-1].contiguous()} for t in tokens]
    return [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


def take_rows(batch: Any, start: int, count: int) -> Any:
    """Rows ``start`` to ``start + count`` of every tensor that has a dim."""
    return BatchRows().take_rows(batch, start, count)
