"""A recomputed block runs twice, and nothing but its gradients shows it: what it keeps has the values of one run."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import engine
from engine.parallel.activation_checkpointing.blocks import recompute_blocks
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.model.forward_patch import ForwardPatches
from engine.planning.activation_memory import LiveStorages
from tests.engine.dry_run.measured_peak import LENGTH, VOCABULARY, hugging_face
from tests.parallel.activation_checkpointing.test_blocks import Policy
from tests.selection import wide

WIDTH, MICROBATCHES = 6, 3


class Normalized(nn.Module):
    """BatchNorm's running statistics and its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, said: list[float]) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


class Counting(nn.Module):
    """A schedule in an attribute, which the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor, said: list[float]) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x).tanh() / self.calls + (x if self.calls % 2 else x.sin())
        return out


class Listing(nn.Module):
    """Lists, dicts and sets that a forward adds to, nested ones among them, and the caller's own list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.by_name = nn.Linear(WIDTH, WIDTH), list[float](), {"sums": list[float]()}
        self.kinds, self.counts = set[str](), Counter[str]()

    def forward(self, x: Tensor, said: list[float]) -> Tensor:
        y = self.layer(x).tanh()
        self.seen.append(float(y.detach().sum()))
        self.by_name["sums"].append(len(self.seen))
        self.kinds.add(f"kind {len(self.seen)}")
        self.counts["calls"] += 1
        said.append(self.seen[-1])
        out: Tensor = y * len(self.seen)
        return out


class Averaging(nn.Module):
    """A moving average in a buffer, written in place, one that is replaced, and a large one that is written late."""

    average: Tensor
    replaced: Tensor
    large: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(5000))
        self.plain = torch.zeros(WIDTH)

    def forward(self, x: Tensor, said: list[float]) -> Tensor:
        y = self.layer(x - self.average).tanh()
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.3)
            self.plain.add_(y.mean(0))
            self.calls += 1
            if self.calls > 1:
                self.large.add_(1)
        self.replaced = self.replaced + y.detach().mean(0)
        out: Tensor = y * (1 + self.average) * (1 + self.plain) + self.replaced
        return out


class Labelling(nn.Module):
    """Attributes of a layer of torch's, one from the beginning and one of a later call, and its training flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        vars(self.layer)["calls"] = 0

    def forward(self, x: Tensor, said: list[float]) -> Tensor:
        own = vars(self.layer)
        own["calls"] += 1
        late = vars(self.drop)
        if own["calls"] > 1:
            late["later"] = late.get("later", 0) + 1
        out: Tensor = self.drop(self.layer(x)).tanh() * own["calls"] + late.get("later", 0)
        return out


class Spectral(nn.Module):
    """Power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, said: list[float]) -> Tensor:
        out: Tensor = self.layer(x).tanh()
        return out


@dataclass
class Meter:
    """A plain object."""

    total: float = 0.0
    parts: list[float] = field(default_factory=list)


class Metered(nn.Module):
    """Plain objects, and a tensor that a forward leaves for others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.meter, self.penalty = nn.Linear(WIDTH, WIDTH), Meter(), torch.zeros(())

    def forward(self, x: Tensor, said: list[float]) -> Tensor:
        y = self.layer(x).tanh()
        self.meter.total += float(y.detach().sum())
        self.meter.parts.append(self.meter.total)
        self.penalty = y.square().mean()
        out: Tensor = y * (1 + len(self.meter.parts))
        return out


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.said: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.said)
        penalties = [layer.penalty for layer in self.layers if isinstance(layer, Metered)]
        return x.square().mean() + sum(penalties, torch.zeros(()))


BLOCKS = (Normalized, Counting, Listing, Averaging, Labelling, Spectral, Metered)
POLICIES = (Policy(), Policy("selective", every=2), Policy("selective"))


def trained(block: Callable[[], nn.Module], policy: Policy | None, order: str) -> dict[str, Any]:
    """Everything that two steps leave: losses, gradients, buffers, attributes."""
    model, patches = Model(block), ForwardPatches()
    if policy is not None:
        recompute_blocks(model, policy, patches)
    losses: list[Tensor] = []
    for step in range(2):
        rows = torch.randn(MICROBATCHES, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        waiting = []
        for part in rows:
            loss = model(part)
            losses.append(loss.detach())
            # as in a pipeline, where forwards of later microbatches run before the backward of this one
            waiting.append(loss)
            if order == "in turn":
                waiting.pop().backward()
        for loss in waiting:
            loss.backward()
    patches.remove()
    attributes = [
        {name: repr(sorted(value) if isinstance(value, set) else value) for name, value in vars(module).items()}
        for module in (*model.layers, *(part for layer in model.layers for part in layer.children()))
    ]
    for found in attributes:
        for name in [name for name in found if name.startswith("_") or name == "forward"]:
            del found[name]
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    tensors = {str(index): loss for index, loss in enumerate(losses)} | grads | model.state_dict()
    return {
        "tensors": tensors,
        "attributes": attributes,
        "said": model.said,
    }


@pytest.mark.parametrize("order", ["in turn", "forwards first"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_recomputed_block_leaves_what_one_run_leaves(block: Callable[[], nn.Module], order: str) -> None:
    once = trained(block, None, order)
    for policy in POLICIES:
        twice = trained(block, policy, order)
        for name, tensor in once["tensors"].items():
            assert torch.equal(tensor, twice["tensors"][name]), f"{policy}: {name}"
        for what in ("attributes", "said"):
            assert twice[what] == once[what], f"{policy}: {what}"


def left_by_a_step(mode: str, world: World) -> int:
    """Bytes of tensors that the second step makes and that outlive it."""
    torch.manual_seed(0)
    model = hugging_face(
        "GptOssForCausalLM", hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "parallel": {"tensor": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "activation_checkpointing": {"mode": mode},
        "kernels": "reference",
    }
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    with engine.initialize(model, config, world=world) as eng:
        eng.train_batch(batch)
        with LiveStorages() as live:
            eng.train_batch(batch)
        return int(live.bytes)


@pytest.mark.parametrize("mode", ["selective", wide("full")])
def test_a_second_run_that_stops_inside_of_sharded_experts_leaves_nothing(mode: str) -> None:
    again = run_thread_ranks(2, partial(left_by_a_step, mode))
    kept = run_thread_ranks(2, partial(left_by_a_step, "none"))
    assert again == kept
