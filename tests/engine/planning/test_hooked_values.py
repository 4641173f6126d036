"""A forward that gives inner modules a value by hooks, and freezes parameters, as X-LoRA of PEFT does."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests.engine.planning.tensor_runs import CONFIG, WIDTH, drawn_batches, recorded


class Inner(nn.Module):
    """Two layers of which both halves meet a gate that a hook adds to the call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.beside = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        gated = x if gate is None else x * gate
        out: Tensor = self.down(torch.tanh(self.up(x) + self.beside(gated)))
        return out


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Hooked(nn.Module):
    """Four blocks, of which hooks reach two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.plain = nn.ModuleList(Block() for _ in range(2))
        self.gated = nn.ModuleList(Block() for _ in range(2))
        self.frozen.requires_grad_(False)

    @property
    def frozen(self) -> nn.Parameter:
        """A weight that tensor ranks share."""
        return self.plain.get_parameter("0.inner.up.weight")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gate = torch.sigmoid(self.gate(x))
        self.frozen.requires_grad = False

        def add(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            return args, {**kwargs, "gate": gate}

        inner = [block.get_submodule("inner") for block in self.gated]
        handles = [module.register_forward_pre_hook(add, with_kwargs=True) for module in inner]
        for block in (*self.plain, *self.gated):
            x = block(x)
        for handle in handles:
            handle.remove()
        return x


def build() -> nn.Module:
    """The model of one process."""
    torch.manual_seed(1)
    return Hooked()


def loss(out: Tensor, _: Tensor) -> Tensor:
    return out.square().mean()


def trained(config: Mapping[str, Any], batches: list[Tensor], world: World) -> tuple[TrainingRecord, frozenset[str]]:
    """Body of a rank: the run, and the layers that are cut."""
    with engine.initialize(build, dict(config), loss_fn=loss, example_batch=batches[0][:2], world=world) as eng:
        record = recorded(eng, batches)
        assert eng.plan.tensor is not None
        return record, frozenset(eng.plan.tensor.layers)


def test_tensor_ranks_leave_a_block_whole_that_reads_other_values_than_its_arguments() -> None:
    batches = drawn_batches()
    alone = train_alone(build, CONFIG, batches, VerifyOptions(loss))
    record, cut = run_thread_ranks(2, partial(trained, CONFIG | {"parallel": {"tensor": 2}}, batches))[0]
    parity = Parity(record, alone)
    assert parity.holds() and min(alone.norms) > 0.01, str(parity)
    assert "plain.0.inner.up" in cut and not any(name.startswith("gated") for name in cut)
