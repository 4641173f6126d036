"""Two models of ``benchmarks.gpu_step``, the operations of one step, and the GPU memory that it needs.

    decoder    engine.models.decoder: GPT-2's architecture, LayerNorm, GELU, biases; the loss is made outside
    llama      Hugging Face's LlamaForCausalLM unchanged, sizes of Llama 3.2 1B; the loss is its own

Operations of a step (forward and backward, without recomputation):

    6 P T  +  6 L A S T      P weights that are multiplied: not embeddings, which are looked up, but for a tied head
                             T tokens, L layers, A width of all heads, S sequence length
    the second term is attention's two products, causal: half of S is looked at on average
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder, DecoderConfig, loss_sum

Name = Literal["decoder", "llama"]
_STATE_BYTES = 18
"""A parameter: weight 2, gradient sum 4, master and moments 12."""
_LAYER_BYTES = (40, 10)
"""A token and layer, for each of the width and of the perceptron's width: an upper guess of what eager code keeps."""
_LOGIT_BYTES = 14
"""bf16 logits, fp32 logits, and gradients of both."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model: architecture, layers, widths, heads, vocabulary, sequence."""

    name: Name
    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int
    sequence: int
    title: str = ""
    """Name in the table; default: the architecture."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)


ONE_BILLION: Mapping[str, Sizes] = MappingProxyType(
    {
        "decoder": Sizes("decoder", 18, 2048, 8192, 16, 16, 32000, 4096),
        "llama": Sizes("llama", 16, 2048, 8192, 32, 8, 128256, 4096),
    }
)
EIGHT_BILLION_SHAPE = Sizes("llama", 8, 4096, 14336, 32, 8, 32064, 8192, "8b-shape")
"""Eight layers of Llama 8B with a quarter of its vocabulary: 1.9 B parameters of 18 bytes each fit one GPU."""
MODELS: Mapping[str, Sizes] = MappingProxyType({**ONE_BILLION, EIGHT_BILLION_SHAPE.title: EIGHT_BILLION_SHAPE})
"""Models trained on a GPU, by title."""
TINY: Mapping[str, Sizes] = MappingProxyType(
    {
        "decoder": Sizes("decoder", 2, 32, 128, 2, 2, 64, 16),
        "llama": Sizes("llama", 2, 32, 64, 2, 1, 64, 16),
    }
)


def make_model(sizes: Sizes, device: torch.device) -> nn.Module:
    """Builds the model in fp32, with equal random weights in every process."""
    torch.manual_seed(0)
    with device:
        if sizes.name == "decoder":
            return Decoder(DecoderConfig(sizes.vocabulary, sizes.layers, sizes.width, sizes.heads, sizes.sequence))
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.key_heads,
            max_position_embeddings=sizes.sequence,
            tie_word_embeddings=True,
            use_cache=False,
        )
        model: nn.Module = LlamaForCausalLM(config)
        return model


def loss_of(sizes: Sizes) -> Any:
    """Returns the ``loss_fn`` of the engine; None if the model returns the loss."""
    return loss_sum if sizes.name == "decoder" else None


def mean_loss(model: nn.Module, sizes: Sizes, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the mean loss of a microbatch in plain torch."""
    output = model(**batch)
    if sizes.name == "decoder":
        total, weight = loss_sum(output, batch)
        return total / weight
    loss: Tensor = output.loss
    return loss


def make_batch(sizes: Sizes, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the rows of a step, equal in every step, so that the loss falls."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(sizes.vocabulary, (rows, sizes.sequence + 1), generator=generator).to(device)
    if sizes.name == "decoder":
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    inputs = tokens[:, :-1].contiguous()
    return {"input_ids": inputs, "labels": inputs}  # the model shifts labels itself


def multiplied_parameters(sizes: Sizes) -> int:
    """Returns the number P of matrix parameters in the FLOP formula, without biases and norms."""
    head = sizes.width // sizes.heads
    attention = sizes.width * head * (2 * sizes.heads + 2 * sizes.key_heads)
    perceptron = sizes.width * sizes.hidden * (2 if sizes.name == "decoder" else 3)
    return sizes.layers * (attention + perceptron) + sizes.width * sizes.vocabulary


def step_flops(sizes: Sizes, tokens: int) -> int:
    """Returns the FLOPs of a step on ``tokens`` tokens, by the formula."""
    attention = 6 * sizes.layers * sizes.width * sizes.sequence
    return (6 * multiplied_parameters(sizes) + attention) * tokens


def needed_bytes(sizes: Sizes, micro: int) -> int:
    """Estimates the GPU memory of a contender in bytes, from above."""
    lookups = sizes.width * (sizes.vocabulary + sizes.sequence if sizes.name == "decoder" else 0)
    state = _STATE_BYTES * (multiplied_parameters(sizes) + lookups)
    by_width, by_hidden = _LAYER_BYTES
    layers = sizes.layers * (by_width * sizes.width + by_hidden * sizes.hidden)
    return state + micro * sizes.sequence * (layers + _LOGIT_BYTES * sizes.vocabulary)
