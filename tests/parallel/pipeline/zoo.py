"""Models to cut: those of users, of Hugging Face, and one for every way in which a forward can be awkward.

A case gives a model, batches, and what is run for one batch: forward and loss, as (loss sum, weight).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.decoder import Decoder, DecoderConfig
from tests import models

WIDTH, VOCABULARY, LENGTH, ROWS = 8, 17, 6, 2

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Case:
    """``exact``: every value is read by one stage only, so that gradients are equal bit by bit."""

    build: Callable[[], nn.Module]
    run: Forward
    batch: Callable[[torch.Generator], Any]
    exact: bool = True
    tier: int | None = None
    """The tier that some stage must have."""


def tokens(generator: torch.Generator, vocabulary: int = VOCABULARY, length: int = LENGTH) -> Tensor:
    return torch.randint(0, vocabulary, (ROWS, length), generator=generator)


def text(generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(generator, models.VOCABULARY, models.LENGTH)
    return {"input_ids": ids, "labels": ids}


def run_hugging_face(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    kwargs = {} if "decoder_input_ids" in batch or model.__class__.__name__ in ENCODERS else {"use_cache": False}
    return model(**batch, **kwargs).loss, 1.0


ENCODERS = ("BertForMaskedLM", "AlbertForMaskedLM")


def run_own(model: nn.Module, batch: Tensor) -> Any:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[:, 1:].numel()


# ---- models of our own


def run_autocast(model: nn.Module, batch: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return run_own(model, batch)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Own(nn.Module):
    """Embedding, blocks, norm, head; subclasses change the way through the blocks."""

    block: type[nn.Module] = Block

    def __init__(self, layers: int = 6, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block(**options) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.add()

    def add(self) -> None:
        """What a subclass has more."""

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.trunk(self.embed(ids))))
        return out


class MixerBlock(nn.Module):
    """Another way along the sequence: a sum that decays, as in linear attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cumsum(self.mix(self.norm(x)) * self.decay, 1)


class Hybrid(Own):
    """Blocks of two classes in turns."""

    def add(self) -> None:
        self.blocks = nn.ModuleList(MixerBlock() if index % 2 else Block() for index in range(len(self.blocks)))


class HybridExperts(Hybrid):
    """The blocks of one class hold lists of experts."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.stack([torch.tanh(expert(x)) for expert in self.experts]).sum(0)

    def add(self) -> None:
        self.blocks = nn.ModuleList(MixerBlock() if index % 2 else self.Mixture() for index in range(len(self.blocks)))


class HybridSequential(nn.Module):
    """All in one Sequential, inside a module that wraps it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        blocks = [MixerBlock() if index % 2 else Block() for index in range(4)]
        self.inner = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        )

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids)


class Tied(Own):
    """The head is a function of the embedding's weight: glue reads a parameter."""

    def add(self) -> None:
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.trunk(self.embed(ids))), self.embed.weight)


class TwoInputBlock(Block):
    def forward(self, x: Tensor, x0: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + 0.5 * x0)


class FirstReadByAll(Own):
    block = TwoInputBlock

    def trunk(self, x: Tensor) -> Tensor:
        x0 = x
        for block in self.blocks:
            x = block(x, x0)
        return x


class SkipsInGlue(Own):
    """The second half adds what the first half kept, last first."""

    def trunk(self, x: Tensor) -> Tensor:
        kept = []
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
            kept.append(x)
        for block in self.blocks[half:]:
            x = block(x + kept.pop())
        return x


class Gated(Own):
    """Residual and bare gates in glue."""

    def add(self) -> None:
        self.gates = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + 0.1 * i)) for i in range(len(self.blocks)))

    def trunk(self, x: Tensor) -> Tensor:
        for gate, block in zip(self.gates, self.blocks, strict=True):
            x = x + gate * block(x)
        return x


class InPlaceGlue(Own):
    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += 0.5
            x = y.mul_(1.5)
        return x


class SliceWritten(Own):
    """A buffer made free, into which glue writes values through views."""

    def trunk(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 2:
                both = torch.zeros(2, *x.shape)
                both[0].copy_(x)
                both[1] = x * 2
                x = both.sum(0)
        return x


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class FunctionInGlue(Own):
    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Scaled.apply(block(x)) * 0.5  # type: ignore[no-untyped-call]
        return x


class SharedByGlue(Own):
    """A value reaches the blocks through a dict that glue fills."""

    def add(self) -> None:
        self.shared: dict[str, Tensor] = {}
        for block in self.blocks:
            block.forward = self._reading(block, type(block).forward)

    def _reading(self, block: nn.Module, forward: Any) -> Any:
        return lambda x: forward(block, x + self.shared["x0"])

    def __deepcopy__(self, memo: Any) -> "SharedByGlue":
        copy = type(self)(len(self.blocks))
        copy.load_state_dict(self.state_dict())
        return copy

    def trunk(self, x: Tensor) -> Tensor:
        self.shared["x0"] = x * 2
        return super().trunk(x)


class SharingBlock(Block):
    """Leaves something for the next block beside the return value: the unit has to be opened."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shared: list[Tensor]) -> Tensor:  # type: ignore[override]
        own = self.own(x)
        shared.append(own)
        return super().forward(x) + shared[-2 if len(shared) > 1 else -1]


class SharedByBlocks(Own):
    block = SharingBlock

    def trunk(self, x: Tensor) -> Tensor:
        shared: list[Tensor] = []
        for block in self.blocks:
            x = block(x, shared)
        return x


class WritingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class ReturningWritingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(self.up(self.norm(x.clone()))))


class ArgumentWritten(Own):
    block: type[nn.Module] = WritingBlock

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x * 1.0)


class ArgumentWrittenAndReturned(ArgumentWritten):
    block = ReturningWritingBlock


class FrozenStart(Own):
    def add(self) -> None:
        self.embed.requires_grad_(False)
        self.blocks[:3].requires_grad_(False)


class Uncalled(Own):
    """Goes around the blocks' forward."""

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(block.norm(x))))  # type: ignore[operator]
        return x


class NoisyGlue(Own):
    """Dropout and noise in glue, dropout in blocks."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__(layers, dropout=0.3)

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.2) + 0.1 * torch.randn_like(x)
        return x


class Buffered(Own):
    """Batch norms in blocks, and glue that keeps a running mean."""

    def add(self) -> None:
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(LENGTH - 1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def trunk(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 2:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x


class UNet(nn.Module):
    """Convolutions down and up, skips joined by ``cat``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.down = nn.ModuleList(nn.Conv2d(c, c + 2, 3, padding=1) for c in (2, 4, 6, 8))
        self.up = nn.ModuleList(nn.Conv2d(2 * c, c - 2, 3, padding=1) for c in (10, 8, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = F.relu(layer(x))
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for layer in self.up:
            skip = kept.pop()
            x = F.relu(layer(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1)))
        return x


def run_picture(model: nn.Module, batch: Tensor) -> Any:
    return (model(batch) - batch).square().sum(), 1.0


def picture(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 2, 16, 16, generator=generator)


class Checkpointed(Own):
    reentrant = False

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


# ---- Hugging Face


def hugging_face(name: str, **sizes: Any) -> Any:
    import transformers

    torch.manual_seed(7)
    build = getattr(transformers, name)
    options = {"vocab_size": models.VOCABULARY, "attn_implementation": "eager", **sizes}
    return build(build.config_class(**options))


SMALL: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
     "max_position_embeddings": 32}
)  # fmt: skip


def llama() -> Any:
    return hugging_face("LlamaForCausalLM", num_key_value_heads=1, **SMALL)


def llama_checkpointed() -> Any:
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def gpt2() -> Any:
    return hugging_face(
        "GPT2LMHeadModel", n_embd=16, n_layer=4, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def t5() -> Any:
    return hugging_face(
        "T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=24, num_layers=4, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip


def bert() -> Any:
    return hugging_face("BertForMaskedLM", **SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def albert() -> Any:
    return hugging_face(
        "AlbertForMaskedLM", **SMALL, embedding_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def mixtral() -> Any:
    return hugging_face(
        "MixtralForCausalLM", **SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.1, experts_implementation="eager",
    )  # fmt: skip


def own(model: type[nn.Module], exact: bool = True, tier: int | None = None) -> Case:
    return Case(model, run_own, tokens, exact, tier)


def face(build: Callable[[], nn.Module], exact: bool = True, tier: int | None = None) -> Case:
    return Case(build, run_hugging_face, text, exact, tier)


def nano() -> nn.Module:
    torch.manual_seed(7)
    return models.Nano(width=8, heads=2, layers=4)


def run_nano(model: nn.Module, batch: Tensor) -> Any:
    return model(batch[:, :-1], batch[:, 1:])[1], 1.0


def nano_tokens(generator: torch.Generator) -> Tensor:
    return tokens(generator, models.VOCABULARY, models.LENGTH)


def decoder() -> nn.Module:
    torch.manual_seed(7)
    return Decoder(DecoderConfig(vocabulary=VOCABULARY, layers=4, width=8, heads=2, context=LENGTH))


CASES: Mapping[str, Case] = MappingProxyType({
    "decoder": Case(decoder, run_own, tokens),
    "nano": Case(nano, run_nano, nano_tokens, exact=False),
    "own": own(Own),
    "hybrid": own(Hybrid),
    "hybrid_experts": own(HybridExperts),
    "hybrid_sequential": own(HybridSequential),
    "tied": own(Tied, exact=False),
    "x0": own(FirstReadByAll, exact=False),
    "skips": own(SkipsInGlue, exact=False, tier=2),
    "gated": own(Gated, tier=2),
    "in_place": own(InPlaceGlue, tier=2),
    "slice_written": own(SliceWritten),
    "function": own(FunctionInGlue),
    "shared_by_glue": own(SharedByGlue, exact=False),
    "shared_by_blocks": own(SharedByBlocks, exact=False),
    "argument_written": own(ArgumentWritten),
    "argument_written_and_returned": own(ArgumentWrittenAndReturned),
    "frozen_start": own(FrozenStart),
    "uncalled": own(Uncalled, tier=2),
    "checkpointed": own(Checkpointed),
    "checkpointed_reentrant": own(CheckpointedReentrant),
    "buffered": own(Buffered),
    "autocast": Case(SkipsInGlue, run_autocast, tokens, exact=False),
    "autocast_gated": Case(Gated, run_autocast, tokens),
    "unet": Case(UNet, run_picture, picture),
    "llama": face(llama),
    "llama_checkpointed": face(llama_checkpointed),
    "gpt2": face(gpt2, exact=False),
    "t5": face(t5, exact=False),
    "bert": face(bert, exact=False),
    "albert": face(albert, exact=False),
    "mixtral": face(mixtral, tier=2),
})  # fmt: skip
