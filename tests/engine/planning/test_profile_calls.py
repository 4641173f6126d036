"""Measured costs of calls: what they say of units whose cost is known.

Costs are made of sleep, many times longer than all else, so that other work on the machine changes no outcome.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.build.assemble import measure_model, plan_run
from engine.build.request import Request
from engine.config import Config, load_config
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.parallel.tensor import deferred_linear as product
from engine.planning import isolated_block
from engine.planning import profile_calls as measure
from engine.planning.isolated_block import IsolatedBlock, signatures
from engine.planning.profile_calls import Costs
from engine.precision.dtypes import Precision

RunRanks = Callable[..., list[Any]]
WIDTH, ROWS = 8, 4
CPU = torch.device("cpu")
FAST, SLOW = 0.0, 0.05


class Pause(torch.autograd.Function):
    """Waits in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class Block(nn.Module):
    """As many FLOPs as any other, and as slow as it is told. ``number``: which of the layers it is.

    The times are private, since ranks compare the public numbers of their modules, and here they differ.
    """

    def __init__(self, forward: float = 0.0, backward: float = 0.0, number: int = 0) -> None:
        super().__init__()
        self._seconds, self._backward, self.number = forward, backward, number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        pause: Any = Pause.apply
        return F.relu(self.linear(pause(x, self._backward) if self._backward else x))


class Chain(nn.Module):
    """A first unit, blocks, and their mean as loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.mean()


def slow_at(place: int, blocks: int = 6) -> Chain:
    return Chain(*(Block(SLOW if index == place else FAST, number=index) for index in range(blocks)))


def config(world: int = 2, **parallel: Any) -> Config:
    own = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 4}
    return load_config(own | {"parallel": {"pipeline": world, **parallel}}, world)


def example() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def measured(model: nn.Module, changes: dict[str, Any] | None = None, **parallel: Any) -> Costs:
    given = config(**({"balance": "time"} | parallel)).to_json() | (changes or {})
    return measure_model(model, load_config(given, 2), Request(), example(), CPU)


@pytest.fixture
def slow_weights(monkeypatch: pytest.MonkeyPatch) -> float:
    """Every weight gradient that can wait takes so many seconds."""
    plain, seconds = product.weight_gradient, 0.3

    def late(x: Tensor, dy: Tensor, dtype: torch.dtype, transposed: bool, kernels: Kernels = REFERENCE) -> Tensor:
        time.sleep(seconds)
        return plain(x, dy, dtype, transposed, kernels)

    monkeypatch.setattr(product, "weight_gradient", late)
    return seconds


def test_what_each_part_takes_is_told_apart(slow_weights: float) -> None:
    costs = measured(Chain(Block(0.01, 0.08), Frozen()))
    assert costs.units == ("first", "blocks.0", "blocks.1") and costs.measured
    first, slow, fast = costs.calls
    assert 0.01 <= slow.forward_seconds < 0.08 <= slow.input_seconds < slow_weights <= slow.weight_seconds
    # nothing waits where a weight is frozen, or where nobody waits for the gradient of the input
    assert slow_weights > 3 * fast.seconds and fast.weight_seconds < 0.05 and fast.left_bytes == 0
    assert slow_weights > 3 * first.seconds and first.weight_seconds < 0.05 and first.input_seconds > 0


class Frozen(Block):
    """Trains its bias only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)


@pytest.mark.parametrize(("balance", "start"), [("flops", "blocks.2"), ("time", "blocks.1")])
def test_stages_are_even_in_what_the_configuration_says(balance: str, start: str) -> None:
    settings, model = config(balance=balance), slow_at(0)
    costs = measure_model(model, settings, Request(), example(), CPU)
    plan = plan_run(model, settings, Request(), example(), costs)
    assert plan.partition is not None and plan.partition.boundaries == ((start, 0),)


def test_without_a_measurement_time_means_flops() -> None:
    plan = plan_run(slow_at(0), config(balance="time"), Request(), example())
    assert plan.partition is not None and plan.partition.boundaries == (("blocks.2", 0),)


def test_chains_in_chains_are_seen_as_in_the_plan() -> None:
    model = Chain(*(nn.Sequential(*(Block() for _ in range(3))) for _ in range(2)))
    settings = config(balance="time", schedule="interleaved", virtual_stages=2)
    costs = measure_model(model, settings, Request(), example(), CPU)
    assert costs.units[1] == "blocks.0.0"
    plan = plan_run(model, settings, Request(), example(), costs)
    assert plan.partition is not None and len(plan.partition.stages) == 4


def test_costs_of_another_model_are_refused() -> None:
    costs = measured(Chain(Block(), Block()))
    with pytest.raises(engine.PlanError, match="other modules than the model on rank 0"):
        plan_run(slow_at(0), config(balance="time"), Request(), example(), costs)


def test_alike_calls_share_a_measurement() -> None:
    model = Chain(*(Block(number=5 + index) for index in range(3)), Block(FAST + 1e-9, number=8))
    names = ["first", *(f"blocks.{index}" for index in range(4))]
    given: list[Any] = [((example(),), {})] * 5
    first, *blocks = signatures(model, names, given)
    assert len({first, *blocks}) == 3 and blocks[0] == blocks[1] == blocks[2]
    wide: list[Any] = [*given[:-2], ((torch.ones(2, WIDTH),), {}), given[-1]]
    assert len(set(signatures(model, names, wide))) == 4
    assert measured(model).notes[0].startswith("measured 3 kinds of calls on cpu")


def test_an_attribute_that_only_looks_like_a_number_counts() -> None:
    model = Chain(Block(number=0), Block(number=7))
    given: list[Any] = [((example(),), {})] * 2
    assert len(set(signatures(model, ["blocks.0", "blocks.1"], given))) == 2


@pytest.mark.parametrize("meta", [False, True])
def test_nothing_is_changed(meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        model = Chain(Block(), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)))
    batch = example()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, attributes = torch.get_rng_state(), {name: dict(vars(m)) for name, m in model.named_modules()}
    costs = measure_model(model, config(balance="time"), Request(), batch, CPU)
    assert costs.measured and "not measured" not in " ".join(costs.notes)
    assert all(tensor.is_meta == meta for tensor in model.state_dict().values())
    assert meta or all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(batch, example())
    assert all(vars(module) == attributes[name] for name, module in model.named_modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class Masked(nn.Module):
    """Saves its input, what the scale made of it, the mask, which depends on the batch alone, and the result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = F.relu(x * self.scale * mask)
        return out


class Masking(Chain):
    """Gives its blocks a mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask, x = (x > 0).float(), self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return x.mean()


def test_kept_bytes_are_what_the_backward_needs() -> None:
    activation = ROWS * WIDTH * 4
    for model in (Chain(Block(), Block()), Masking(Masked(), Masked())):
        # of linear and scale the input, of relu the output; not weights, mask and batch
        costs = measured(model).calls
        assert [cost.kept_bytes for cost in costs] == [0, 2 * activation, 2 * activation]
        # of linear its input and the gradient of its output; a scale does not wait
        assert costs[1].left_bytes == (2 * activation if isinstance(model.blocks[0], Block) else 0)


class Scored(Chain):
    """Its loss is glue."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.blocks[1](self.blocks[0](self.first(x)))
        return F.cross_entropy(scores * self.blocks[1].get_parameter("linear.weight")[0], torch.zeros(ROWS).long())


def test_what_glue_keeps_counts_for_the_call_before() -> None:
    activation = ROWS * WIDTH * 4
    # the product saves what relu made, known to the block by another copy; the loss saves probabilities and a weight
    assert [cost.kept_bytes for cost in measured(Scored(Block(), Block())).calls[:2]] == [0, 2 * activation]
    last = measured(Scored(Block(), Block())).calls[2].kept_bytes
    assert 4 * activation <= last <= 4 * activation + 8


def test_recomputed_blocks_keep_their_input_and_run_forward_again() -> None:
    model = Chain(Block(0.05), Block(0.05))
    kept, again = measured(model), measured(model, {"activation_checkpointing": {"mode": "full"}})
    activation = ROWS * WIDTH * 4
    assert [cost.kept_bytes for cost in again.calls] == [0, activation, activation]
    assert [cost.left_bytes for cost in again.calls] == [0, 2 * activation, 2 * activation]
    assert kept.calls[1].input_seconds < 0.05 <= again.calls[1].input_seconds


def test_blocks_that_are_recomputed_in_part_are_measured_as_they_run() -> None:
    model, activation = Chain(Block(0.05), Block(0.05)), ROWS * WIDTH * 4
    costs = measured(model, {"activation_checkpointing": {"mode": "selective"}})
    assert len(costs.notes) == 1, costs.notes
    assert [cost.kept_bytes for cost in costs.calls] == [0, 2 * activation, 2 * activation]  # input and product
    assert costs.calls[1].input_seconds >= 0.05
    every = measured(model, {"activation_checkpointing": {"mode": "selective", "every": 2}})
    kept = [cost.kept_bytes for cost in measured(model).calls]
    assert [cost.kept_bytes for cost in every.calls] == [*kept[:2], activation]


class Reads(nn.Module):
    """Reads a parameter of another unit."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(x) @ self.other[0].weight
        return out


class Reading(Chain):
    """Has a unit that does."""

    def __init__(self) -> None:
        super().__init__(Block(SLOW), Block(SLOW))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reads = Reads(self.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.first(x)))
        out: Tensor = self.head(self.reads(x)).mean()
        return out


def test_what_does_not_run_alone_has_its_flops_at_the_mean_speed() -> None:
    costs = measured(Reading())
    reads = costs.calls[costs.units.index("reads")]
    assert len(costs.notes) == 2 and "reads (it reads what is not its own)" in costs.notes[1]
    # twice the FLOPs of each of the four others, of which two are slow
    assert SLOW <= reads.forward_seconds < 4 * SLOW and reads.kept_bytes > 0


class Peeks(Chain):
    """Its second block also reads what the first unit made."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        second: Any = self.blocks[1]
        second.peek = [x]
        return super().forward(x)


class Peeking(nn.Module):
    """Adds something that it is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.peek = nn.Linear(WIDTH, WIDTH), [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(x) + self.peek[0]
        return out


def test_a_unit_that_reads_a_value_by_a_side_door_is_not_measured() -> None:
    assert measured(Peeks(Block(), Peeking())).notes[1].endswith("blocks.1 (it reads what is not its own)")


class Fails(nn.Module):
    """Knows its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.weights = {id(self.own.weight)}

    def forward(self, x: Tensor) -> Tensor:
        if id(self.own.weight) not in self.weights:
            raise ValueError("not alone\nand more")
        out: Tensor = self.own(x)
        return out


def test_an_error_of_a_unit_stays_its_own() -> None:
    costs = measured(Chain(Block(), Fails()))
    assert costs.measured and costs.notes[1].endswith("blocks.1 (not alone)")


def test_a_mistake_of_this_package_is_no_call_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_block, "perf_counter", None)
    with pytest.raises(TypeError, match="not callable"):
        measured(Chain(Block()))


def test_the_time_for_measuring_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LIMIT_SECONDS", 0.0)
    costs = measured(Chain(Block(), Block()))
    assert not costs.measured and "0 s were over" in costs.notes[1]
    assert costs.calls[1].forward_seconds == costs.calls[1].weight_seconds == 2 * ROWS * WIDTH * WIDTH + 1
    assert costs.transfer_seconds(1 << 20) == 0


class Typed(nn.Module):
    """Says in what it computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.wanted = nn.Linear(WIDTH, WIDTH), dtype

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.linear.weight.dtype == self.wanted
        out: Tensor = self.linear(x)
        return out


def test_units_run_in_the_precision_of_the_run() -> None:
    wide = Typed(torch.float32)
    model = Chain(Typed(torch.bfloat16), wide)
    costs = measured(model, {"bf16": {"enabled": True}, "keep_fp32": ["blocks.1"]})
    assert costs.measured and len(costs.notes) == 1
    assert wide.linear.weight.dtype == torch.float32 and "forward" not in vars(wide)


def test_a_copy_takes_the_memory_of_one_unit() -> None:
    first: Any = Block()
    model = Chain(first, Block())
    first.other = [model]
    copied: Any = IsolatedBlock(model, "blocks.0", Precision(None, None), CPU)._module
    tensors = {id(p): p for p in copied.other[0].parameters()}.values()
    assert sum(p.numel() for p in tensors if not p.is_meta) == WIDTH * WIDTH + WIDTH


def test_costs_travel_without_a_change() -> None:
    costs = measured(Chain(Block(), Block()))
    assert Costs.from_bytes(costs.to_bytes()) == costs
