"""Base model with the low-rank adapters of a tenant (LoRA, Hu et al. 2021), on layers found by their roles.

attention      linear layers inside a module named as attention
perceptron     other linear layers inside blocks
unembedding    the output head

Names of the base's parameters in the adapted model differ by PEFT's prefix and by ``base_layer``.
"""

import math
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ConfigError, PlanError
from engine.parallel.model.adapters import PREFIX, base_name
from engine.parallel.model.blocks import find_units
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.tensor.deferred_linear import is_linear
from engine.serving.commands import Adapter

ALPHA = 32
"""Scale of every adapter: its product is multiplied by ALPHA / rank, as in the service whose clients we serve."""
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_ROUTERS = ("gate", "router")
"""Names of linear layers that choose experts; ``gate_proj`` is none."""

_OPTIONS = {"attention": "train_attn", "perceptron": "train_mlp", "unembedding": "train_unembed"}
"""Keys of a client's lora_config that choose a role."""


def adapted_name(name: str) -> str:
    """Converts ``name``, a module's or parameter's name in the base model, to its name in PEFT's wrapper."""
    return PREFIX + name


def find_targets(model: nn.Module, adapter: Adapter) -> tuple[str, ...]:
    """Returns the names of the linear layers of ``model`` that ``adapter`` adapts.

    Raises:
        ConfigError: ``adapter`` has no positive rank, or chooses no layer of the model.
    """
    if adapter.rank < 1:
        raise ConfigError(f"the adapter has rank {adapter.rank}; give a rank of at least 1.")
    asked = {"attention": adapter.attention, "perceptron": adapter.perceptron, "unembedding": adapter.unembedding}
    found = tuple(name for name, role in _roles(model) if asked[role])
    if not found:
        roles = ", ".join(role for role, wanted in asked.items() if wanted) or "nothing"
        useful = {f"{_OPTIONS[role]} to true": None for _, role in _roles(model)}
        raise ConfigError(
            f"lora_config selects {roles}, so the adapter trains no linear layer of {type(model).__name__}; in "
            f"lora_config, set {', or '.join([*useful, 'rank to 0, which trains all parameters'])}."
        )
    return found


def _roles(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (name, role) of each linear layer that has a role."""
    named: Any = getattr(model, "get_output_embeddings", None)
    head = named() if callable(named) else getattr(model, "head", None)
    blocks = find_units(model).blocks
    for name, module in model.named_modules():
        if not is_linear(module):
            continue
        if module is head:
            yield name, "unembedding"
        elif any(is_inside(name, block) for block in blocks) and name.rpartition(".")[2] not in _ROUTERS:
            yield name, "attention" if _in_attention(model, name) else "perceptron"


def _in_attention(model: nn.Module, name: str) -> bool:
    parts = name.split(".")[:-1]
    around = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return any(
        _ATTENTION.search(f"{path.rpartition('.')[2]} {type(model.get_submodule(path)).__name__}") for path in around
    )


def adapted(model: nn.Module, adapter: Adapter) -> nn.Module:
    """Freezes the base ``model`` and returns it in PEFT's wrapper, with trainable LoRA pairs.

    A pair's matrix A [rank, inputs] is random, and depends on seed and layer name only; its matrix B is zero.

    Raises:
        ConfigError: ``adapter`` has no positive rank, or chooses no layer of the model.
        PlanError: PEFT is not installed.
    """
    targets = find_targets(model, adapter)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PlanError(
            f"a tenant's adapters need PEFT, which cannot be imported ({error}); pip install peft."
        ) from error
    exact = "^(" + "|".join(re.escape(name) for name in targets) + ")$"
    settings = LoraConfig(r=adapter.rank, lora_alpha=ALPHA, target_modules=exact, lora_dropout=0.0)
    with torch.random.fork_rng(devices=()):  # PEFT draws A with the process's generator
        made: nn.Module = get_peft_model(model, settings)
    for name, module in made.named_modules():
        if ".lora_" in name and is_linear(module):
            module.weight = nn.Parameter(_drawn(f"{name}.weight", module.weight, adapter.seed))
    return made


def _drawn(name: str, weight: Tensor, seed: int) -> Tensor:
    """Returns the initial value of half a pair, on the host; ``weight`` may be on the meta device."""
    value = torch.zeros(weight.shape, dtype=weight.dtype)
    if ".lora_A." not in name:
        return value
    # torch's generator on the host reads 32 bits of its seed
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {base_name(name)}".encode()))
    bound = 1 / math.sqrt(value.shape[1])
    return value.uniform_(-bound, bound, generator=generator)
